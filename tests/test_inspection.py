"""``inspect``: what it adds up is what lies in the trees that the image was built from."""

from __future__ import annotations

from pathlib import Path

import pytest

from oci_builder.inspection import Inspection, inspect_archive
from oci_builder.model.sizes import human
from tests.conftest import Built


@pytest.fixture(scope="module", params=["oci", "docker"])
def seen(request: pytest.FixtureRequest, quick: Built) -> Inspection:
    return inspect_archive(getattr(quick, request.param))


def sizes(quick: Built, tier: str) -> dict[str, int]:
    """Of a tier's files by name, links to the same file included."""
    root = quick.spec.parent / "envs" / tier
    return {p.name: p.stat().st_size for p in Path(root).rglob("*") if p.is_file() and not p.is_symlink()}


def test_each_tier_costs_what_only_it_has_and_what_it_shares(quick: Built, seen: Inspection) -> None:
    for tier, names in (("one", ["own.py", "again.py"]), ("two", ["own.py"])):
        files = sizes(quick, tier)
        assert seen.tiers[tier] == {
            "size": sum(files.values()), "files": len(files), "own": files["own.py"],
            "shared": sum(size for name, size in files.items() if name not in names),
        }  # fmt: skip


def test_what_is_shared_is_counted_once_in_what_sharing_saves(quick: Built, seen: Inspection) -> None:
    one, two = sizes(quick, "one"), sizes(quick, "two")
    shared = one["hello"] + one["equal.py"] + one["shared.bin"]
    assert seen.totals["plain"] == sum(one.values()) + sum(two.values())
    # The second name of one's own.py costs nothing either.
    assert seen.totals["saved"] == shared + one["again.py"]


def test_the_layers_are_those_of_the_build(quick: Built, seen: Inspection) -> None:
    built = quick.container["layers"]
    assert [layer["diff_id"] for layer in seen.layers] == [layer["diff_id"] for layer in built]
    assert [layer["tiers"] for layer in seen.layers if layer["name"] == "one+two"] == [["one", "two"]]
    assert seen.totals["tar_size"] == quick.container["size"]["uncompressed"]


def test_people_read_the_same_numbers(quick: Built, seen: Inspection) -> None:
    lines = list(seen.lines())
    rows = {words[0]: words for words in map(str.split, lines) if words}
    for name, tier in seen.tiers.items():
        assert " ".join(rows[name]).endswith(f"{human(tier['own'])} {human(tier['shared'])} {tier['files']}")
    assert lines[-1].endswith(f"sharing saves {human(seen.totals['saved'])}")
    assert quick.reference in lines[0]
