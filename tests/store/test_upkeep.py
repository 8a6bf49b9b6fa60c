"""Which holdings of a cache go: by age, by size, with what is made of them, and never what is in use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oci_builder.store.holdings import Holding, Sizes, choose, in_order

KB = 1 << 10


def file(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    return path


def names(found: list[Holding]) -> str:
    return "".join(one.place.name for one in found)


def measure(holdings: list[Holding]) -> Sizes:
    sizes = Sizes()
    for holding in holdings:
        sizes.add(holding.place)
    return sizes


def blobs(root: Path, **used: float) -> list[Holding]:
    """Blobs of 64 KiB by name, with the time of their last use."""
    return [Holding("blob", file(root / name, 64 * KB), at) for name, at in used.items()]


def test_what_is_old_goes_oldest_first(tmp_path: Path) -> None:
    held = blobs(tmp_path, a=30.0, b=10.0, c=20.0)
    assert names(choose(held, measure(held), 25.0, None)) == "bc"
    assert choose(held, measure(held), 10.0, None) == [] and choose(held, measure(held), None, None) == []


def test_the_oldest_go_until_the_rest_has_room(tmp_path: Path) -> None:
    held = blobs(tmp_path, a=30.0, b=10.0, c=20.0)
    assert names(choose(held, measure(held), None, 64 * KB)) == "bc"
    assert names(choose(held, measure(held), None, 64 * KB - 1)) == "bca"
    assert names(choose(held, measure(held), None, 192 * KB)) == ""


def test_age_and_size_together_free_no_more_than_either_asks_for(tmp_path: Path) -> None:
    held = blobs(tmp_path, a=30.0, b=10.0, c=20.0)
    assert names(choose(held, measure(held), 15.0, 128 * KB)) == "b"


def test_a_file_of_two_names_is_free_with_the_last_of_them(tmp_path: Path) -> None:
    wheel = file(tmp_path / "wheel/x.so", 256 * KB)
    for name in ("env", "other"):
        (tmp_path / name).mkdir()
        os.link(wheel, tmp_path / name / "x.so")
    old, young, store = tmp_path / "env", tmp_path / "other", tmp_path / "wheel"
    held = [Holding("environment", old, 1.0, (store,)), Holding("environment", young, 9.0, (store,)), Holding("wheel", store, 2.0)]
    sizes = measure(held)
    assert 256 * KB <= sizes.of([old, young, store]) < 320 * KB and sizes.of([old]) >= 256 * KB
    assert names(choose(held, sizes, None, 200 * KB)) == "envotherwheel"
    assert names(choose(held, sizes, 5.0, None)) == "env"


def test_what_something_is_made_of_is_as_young_as_it_and_goes_after_it(tmp_path: Path) -> None:
    chain = [("repository", 1.0, ()), ("checkout", 2.0, ("repository",)), ("environment", 3.0, ("wheel",)), ("wheel", 1.0, ())]
    held = [Holding(kind, tmp_path / kind, at, tuple(tmp_path / n for n in needs)) for kind, at, needs in chain]
    assert [(one.kind, one.used) for one in in_order(held)] == [
        ("checkout", 2.0), ("repository", 2.0), ("environment", 3.0), ("wheel", 3.0)
    ]  # fmt: skip


@pytest.mark.parametrize("busy", ["used by somebody", "not measured"])
def test_what_is_in_use_stays_with_all_that_it_is_made_of(tmp_path: Path, busy: str) -> None:
    wheel = Holding("wheel", file(tmp_path / "w", KB), 1.0)
    env = Holding("environment", file(tmp_path / "e", KB), 1.0, (wheel.place,), busy=busy == "used by somebody")
    sizes = measure([wheel, env] if env.busy else [wheel])
    assert choose([env, wheel], sizes, 100.0, 0) == []
    assert names(choose([wheel], sizes, 100.0, None)) == "w"


def test_folders_and_links_are_measured_and_nothing_is_followed(tmp_path: Path) -> None:
    file(tmp_path / "outside/big", 1024 * KB)
    tree = tmp_path / "tree"
    (tree / "sub/sub").mkdir(parents=True)
    (tree / "sub/link").symlink_to(tmp_path / "outside")
    held = [Holding("run", tree, 1.0), Holding("run", tmp_path / "gone", 1.0)]
    sizes = measure(held)
    assert sizes.of([tree]) < 64 * KB and sizes.of([tmp_path / "gone"]) == 0
    assert sizes.links[tree] == sizes.links[tmp_path / "gone"]
