"""Inventories and bills of materials: true to the environment, valid CycloneDX, the same bytes each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import FormatError
from oci_builder.payload.inventory import from_lock, from_requirements, inventory, licence

pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")
from email.parser import Parser

from oci_builder.release.sbom import sbom

ONE = "ab" * 32
TWO = "cd" * 32


def environment(root: Path, **packages: str) -> Path:
    """An environment with only metadata: name -> METADATA text after the version."""
    for name, rest in packages.items():
        info = root / f"lib/python3.13/site-packages/{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\n{rest}\n")
        (info / "RECORD").write_text(f"{name}.py,,\n")
    return root


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Any]:
    env = environment(tmp_path, Exact="License-Expression: Apache-2.0 OR MIT", choice="License: Own words", bare="")
    info = env / "lib/python3.13/site-packages/Exact-1.dist-info"
    (info / "licenses").mkdir()
    (info / "licenses" / "LICENSE.txt").write_text("text")
    (info / "direct_url.json").write_text(
        '{"url": "https://x.org/exact.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}'
    )
    listed = from_requirements(
        f"exact==1 \\\n    --hash=sha256:{ONE}\nchoice==1 \\\n    --hash=sha256:{TWO} \\\n    --hash=sha256:{ONE}\n"
    )
    return inventory("vllm", env, {"deep-ep": "needs nvcc"}, listed)


def document(made: dict[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(sbom(made, subject="image", version="r1", epoch=86400))
    return value


def component(made: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in document(made)["components"] if c["name"] == name)


def test_every_package_of_the_environment_is_in_it(made: dict[str, Any]) -> None:
    purls = [c["purl"] for c in document(made)["components"]]
    assert purls == ["pkg:pypi/bare@1", "pkg:pypi/choice@1", "pkg:pypi/exact@1"]


def test_what_was_left_out_is_said_with_its_reason(made: dict[str, Any]) -> None:
    assert document(made)["metadata"]["properties"] == [{"name": "oci-builder:omitted", "value": "deep-ep: needs nvcc"}]


def test_one_accepted_hash_is_the_components_hash(made: dict[str, Any]) -> None:
    assert component(made, "exact")["hashes"] == [{"alg": "SHA-256", "content": ONE}]


def test_of_several_accepted_hashes_none_is_claimed(made: dict[str, Any]) -> None:
    found = component(made, "choice")
    values = [p["value"] for p in found["properties"] if p["name"] == "oci-builder:accepted-sha256"]
    assert ("hashes" in found, values) == (False, [ONE, TWO])


def test_licences_are_expressions_or_the_packages_own_words(made: dict[str, Any]) -> None:
    assert component(made, "exact")["licenses"][0]["expression"] == "Apache-2.0 OR MIT"
    assert component(made, "choice")["licenses"] == [{"license": {"name": "Own words"}}]
    assert "licenses" not in component(made, "bare")


def test_a_git_source_is_named_with_its_commit(made: dict[str, Any]) -> None:
    assert component(made, "exact")["externalReferences"] == [{"type": "vcs", "url": "https://x.org/exact.git@c0ffee"}]


def test_the_same_inventory_gives_the_same_bytes(made: dict[str, Any]) -> None:
    one, two = (sbom(json.loads(json.dumps(made)), subject="i", version="r1", epoch=0) for _ in range(2))
    assert one == two


def test_another_inventory_has_another_serial_number(made: dict[str, Any]) -> None:
    other = {**made, "omitted": {}}
    assert document(made)["serialNumber"] != document(other)["serialNumber"]


def test_the_time_is_the_epoch(made: dict[str, Any]) -> None:
    assert document(made)["metadata"]["timestamp"] == "1970-01-02T00:00:00+00:00"


def test_the_schema_of_cyclonedx_accepts_it(made: dict[str, Any]) -> None:
    pytest.importorskip("jsonschema")
    from cyclonedx.exception import MissingOptionalDependencyException
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    try:
        problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document(made)))
    except MissingOptionalDependencyException as error:
        pytest.skip(str(error))
    assert problem is None


@pytest.mark.parametrize("value", [{}, {"tier": "a", "packages": [{}], "omitted": {}}, {"tier": "a", "packages": 3}])
def test_what_is_no_inventory_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as caught:
        sbom(value, subject="i", version="r1", epoch=0)
    assert caught.value.code == "json.type"


def test_a_folder_of_the_build_machine_is_not_named_as_source(tmp_path: Path) -> None:
    env = environment(tmp_path, local="")
    (env / "lib/python3.13/site-packages/local-1.dist-info/direct_url.json").write_text('{"url": "file:///home/me/x"}')
    assert inventory("t", env, {}, {})["packages"][0]["source"] == "local"


def test_licence_files_are_listed_wherever_the_metadata_has_them(made: dict[str, Any]) -> None:
    exact = next(p for p in made["packages"] if p["name"] == "exact")
    assert exact["licence_files"] == ["Exact-1.dist-info/licenses/LICENSE.txt"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("License-Expression: MIT\nLicense: x\n", "MIT"),
        ("License: UNKNOWN words\nClassifier: License :: OSI Approved :: BSD License\n", "BSD License"),
        ("License: First line\n        second line\n", "First line"),
        ("Name: x\n", ""),
    ],
)
def test_which_field_says_the_licence(metadata: str, expected: str) -> None:
    assert licence(Parser().parsestr(metadata)) == expected


def test_a_lock_gives_hashes_of_wheels_and_sdist_and_the_git_source() -> None:
    lock = {
        "package": [
            {"name": "A_b", "sdist": {"hash": f"sha256:{TWO}"}, "wheels": [{"hash": f"sha256:{ONE}"}], "source": {}},
            {"name": "c", "source": {"git": "https://x.org/c?rev=1#c0ffee"}},
        ]
    }
    assert from_lock(lock) == {
        "a-b": {"hashes": [ONE, TWO]},
        "c": {"hashes": [], "source": "git+https://x.org/c?rev=1#c0ffee"},
    }
