"""Documents about packages and inputs quote them: tags, addresses, versions, licences (issue 7, item 8)."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest

from oci_builder.model.redact import redact
from oci_builder.payload.inventory import from_lock, from_requirements, inventory
from oci_builder.release.packages import inventory_bytes, read_packages
from oci_builder.release.provenance import Material, provenance
from oci_builder.release.walk import Walk
from tests.release.built import package
from tests.release.test_release_provenance import RUN, SUBJECTS, spec

SHAPED = "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"
OWN = "plain-hub-words"
PASSWORD = "url-words-77"
PLANTED = (SHAPED, OWN, PASSWORD)
# Of what ends up in a package's metadata, everything that its maker may choose.
SOURCES = [
    (f"https://host/{SHAPED}/r.git", "c0ffee"), (f"https://host/{OWN}/r.git", SHAPED), ("https://host/r.git", OWN),
    (f"https://u:{PASSWORD}@host/r.git", "c0ffee"), (f"https://host/a-1.whl?token={PASSWORD}", ""),
    (f"https://host/{OWN}/a-1.whl", ""), (f"git@{OWN}:r", ""),
]  # fmt: skip


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", OWN)


def held(data: object) -> list[str]:
    text = data.decode() if isinstance(data, bytes) else json.dumps(data)
    return [secret for secret in PLANTED if secret in text]


@pytest.mark.parametrize(("url", "commit"), SOURCES)
def test_bills_and_inventories_hold_none(url: str, commit: str, tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")
    from oci_builder.sbom import BillOptions, make_bills

    info = package(tmp_path / "t/opt/rt/envs/base", "a", f"1.0+{SHAPED}", f"LicenseRef-{OWN}")
    (info / "direct_url.json").write_text(json.dumps({"url": url, "vcs_info": {"vcs": "git", "commit_id": commit}}))
    made = make_bills(tmp_path / "t", BillOptions(name=f"image-of-{OWN}", version=SHAPED))
    assert made.keys() == {"image", "base"}
    assert [held(data) for data in made.values()] == [[], []]
    assert all(json.loads(data)["bomFormat"] == "CycloneDX" for data in made.values())
    contents = read_packages(tmp_path / "t", Walk())
    assert held(inventory_bytes(contents.tiers["base"])) == []


def test_a_bill_without_secrets_is_as_the_library_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")
    from oci_builder.release import sbom
    from oci_builder.sbom import make_bills

    package(tmp_path / "t/opt/rt/envs/base", "secret-token", "1.0", "MIT AND Apache-2.0")
    made = make_bills(tmp_path / "t")
    monkeypatch.setattr(sbom, "hide", lambda value: value)
    assert make_bills(tmp_path / "t") == made


@pytest.mark.parametrize(("url", "commit"), SOURCES)
def test_the_inventory_in_the_image_holds_none(url: str, commit: str, tmp_path: Path) -> None:
    """A list or lock may name a place with its password; everybody who has the image reads its inventories."""
    package(tmp_path, "a", "1.0")
    lock = {"package": [{"name": "a", "source": {"git": f"{url}?rev=main#{commit}"} if commit else {"url": url}}]}
    for listed in (from_lock(lock), from_requirements(f"a @ git+{url}@{commit}")):
        assert listed["a"]["source"]
        assert held(inventory("base", tmp_path, {}, listed)) == []
    plain = from_requirements("a @ git+https://host/r.git@c0ffee")
    assert inventory("base", tmp_path, {}, plain)["packages"][0]["source"] == "git+https://host/r.git@c0ffee"


def test_provenance_holds_none_by_value_either() -> None:
    asked = spec().model_copy(update={"labels": {"note": f"by {OWN}"}, "env": (f"A={SHAPED}",)})
    material = Material(f"git+https://host/{OWN}", {"gitCommit": "a" * 40}, f"source {OWN}")
    assert held(provenance(asked, SUBJECTS, [material], RUN, [f"tree {OWN}"])) == []


@pytest.mark.parametrize("text", [f"pkg:pypi/a@1.0%2B{SHAPED}", f"https://h/{quote('+' + SHAPED)}", f"a%20{SHAPED}"])
def test_a_token_behind_something_quoted_is_hidden(text: str) -> None:
    assert SHAPED not in redact(text) and redact(redact(text)) == redact(text)
