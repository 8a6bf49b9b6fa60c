"""``cache prune`` among what is others': their files, mounts, trees and databases lose nothing, and nothing ends it."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from oci_builder.cache import PruneOptions, prune_cache, show_cache
from oci_builder.cache.contents import _AREAS
from oci_builder.model.errors import SpecError
from oci_builder.payload.tidy import LOCK, note_use, tidy
from tests.cache.lab import ALL, built, staged_tree
from tests.chroot.lab import mount, umount

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, and becomes another user")
NOBODY = 65534
ENVIRONMENT = f"base-{'1' * 20}"


def database(path: Path, version: int = 7) -> None:
    """Somebody's own."""
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE accounts (name)")
        made.execute(f"PRAGMA user_version = {version}")


def written(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"mine")
    return path


@contextmanager
def mounted(source: Path, target: Path) -> Iterator[None]:
    mount(str(source), str(target), "none", 4096)  # MS_BIND
    try:
        yield
    finally:
        umount(str(target))


def as_nobody(cache: Path) -> int:
    """How many things an ordinary user's prune could not remove."""
    child = os.fork()
    if not child:
        status = 99
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            show_cache(cache)
            status = len(prune_cache(cache, ALL).failed)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def opened(place: Path, owner: int) -> None:
    """All of it is this user's, who may come to it."""
    for path in [place, *place.rglob("*")]:
        os.lchown(path, owner, owner)
    for parent in (place, *place.parents[:2]):
        parent.chmod(0o755)


# ---- folders that are no cache


@pytest.mark.parametrize("names", [("stages/train-1/data",), ("failed/my-data/x", "store/notes"), ("staged/a/b",), ()])
def test_a_project_that_is_named_by_mistake_loses_nothing(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Folders of the same names, and a database of the same name."""
    files = [written(tmp_path / name) for name in (*names, "main.c")]
    database(tmp_path / "build.sqlite")
    with pytest.raises(SpecError, match="no cache"):
        prune_cache(tmp_path, ALL)
    assert all(path.read_bytes() == b"mine" for path in files)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({"build.sqlite", "main.c", *(n.split("/")[0] for n in names)})


@pytest.mark.parametrize("names", [(), ("stages",), sorted(_AREAS)], ids=len)
def test_a_folder_that_could_become_a_cache_is_an_empty_one(tmp_path: Path, names: Sequence[str]) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    assert (show_cache(tmp_path).holdings, prune_cache(tmp_path, ALL).removed) == ([], [])


def test_what_a_cache_shares_its_folder_with_is_named_and_left(place: Path) -> None:
    cache = place / "cache"
    built(place)
    mine = [written(cache / name) for name in ("stages/train-1/data", "failed/my-run/x", ".pruned.partial-mine/x")]
    (cache / "build.sqlite").unlink()
    database(cache / "build.sqlite", 1)
    done = prune_cache(cache, ALL)
    assert {one.kind for one in done.removed} == {"blob"} and all(path.read_bytes() == b"mine" for path in mine)
    assert {cache / "build.sqlite", *(path.parent for path in mine)} == set(done.before.foreign)
    with sqlite3.connect(cache / "build.sqlite") as kept:
        assert [name for (name,) in kept.execute("SELECT name FROM sqlite_master")] == ["accounts"]


def test_an_oci_layout_that_is_called_store_is_nobodys_cache(place: Path) -> None:
    store = place / "images/store"
    blob = written(store / "blobs/sha256" / ("a" * 64))
    for name in ("oci-layout", "index.json", "records/x", "ingest/x"):
        written(store / name)
    done = prune_cache(place / "images", ALL)
    assert done.removed == [] and done.before.foreign == [store] and blob.read_bytes() == b"mine"


def test_a_link_that_leads_to_itself_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SpecError, match="no cache"):
        show_cache(tmp_path / "loop")


@pytest.mark.parametrize("part", ["records", "ingest"])
def test_behind_a_link_in_the_store_nothing_is_removed(place: Path, part: str) -> None:
    built(place)
    written(place / "cache/store" / part / "download.part")
    (place / "cache/store" / part).rename(place / "elsewhere")
    (place / "cache/store" / part).symlink_to(place / "elsewhere")
    before = sorted((place / "elsewhere").iterdir())
    done = prune_cache(place / "cache", ALL)
    assert place / "cache/store" in done.before.foreign and sorted((place / "elsewhere").iterdir()) == before


# ---- what cannot go


@needs_root
def test_one_blob_that_cannot_go_keeps_no_other(place: Path) -> None:
    built(place)
    cache = place / "cache"
    blob = sorted((cache / "store/blobs/sha256").iterdir())[0]
    (cache / "tiers" / ENVIRONMENT).mkdir(parents=True)
    with mounted(place / "spec.json", blob):
        done = prune_cache(cache, ALL)
        assert [(path, error.code) for path, error in done.failed] == [(blob, "io.error")]
    assert {one.kind for one in done.removed} == {"blob", "record", "environment"}
    assert (place / "spec.json").read_bytes() and blob.exists()
    assert [one.place for one in prune_cache(cache, ALL).removed] == [blob]


@needs_root
def test_a_tree_with_a_mount_in_it_stays_where_it_is(place: Path) -> None:
    precious, target = written(place / "precious/data"), place / "cache/tiers" / ENVIRONMENT / "base/m\x1bt"
    target.mkdir(parents=True)
    with mounted(precious.parent, target):
        done = prune_cache(place / "cache", ALL)
        assert [error.code for _, error in done.failed] == ["io.busy"] and (target / "data").read_bytes() == b"mine"
        assert done.failed[0][1].message.isprintable()
    assert [one.kind for one in prune_cache(place / "cache", ALL).removed] == ["environment"]
    assert precious.read_bytes() == b"mine"


@needs_root
def test_what_a_build_tidies_away_is_not_what_somebody_mounted_there(tmp_path: Path) -> None:
    work, partial = tmp_path / "tiers", ".x.partial-4194305"
    note_use(work, "spec", [ENVIRONMENT])
    for names in (["b"], ["c"]):
        note_use(work, "spec", names)  # the spec's last two builds used others
    mine = [written(tmp_path / name / "data") for name in ("one", "two")]
    targets = [work / ENVIRONMENT / "mnt", work / partial / "mnt"]
    said: list[str] = []
    for target in targets:
        target.mkdir(parents=True)
    with mounted(mine[0].parent, targets[0]), mounted(mine[1].parent, targets[1]):
        tidy(work, lambda event: said.append(event.kind))
        assert all((target / "data").read_bytes() == b"mine" for target in targets) and "warning" in said
    tidy(work, lambda event: None)
    assert all(path.read_bytes() == b"mine" for path in mine) and not list(work.glob("*base*")) and not (work / partial).exists()


@needs_root
def test_what_another_file_system_holds_takes_no_room_of_the_cache(place: Path) -> None:
    tree = place / "cache/tiers" / ENVIRONMENT / "mnt"
    tree.mkdir(parents=True)
    mount("tmpfs", str(tree), "tmpfs")
    try:
        (tree / "large").write_bytes(bytes(4 << 20))
        assert show_cache(place / "cache").size < 1 << 20
    finally:
        umount(str(tree))


@pytest.mark.parametrize("where", [f"tiers/{ENVIRONMENT}", "staged/" + "a" * 32])
def test_a_tree_deeper_than_the_stack_and_than_a_path_may_be_goes(tmp_path: Path, where: str) -> None:
    """As an image may have it."""
    top = tmp_path / where
    top.mkdir(parents=True)
    at = os.open(top, os.O_RDONLY)
    for _ in range(2500):
        os.mkdir("deep", dir_fd=at)
        below = os.open("deep", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    done = prune_cache(tmp_path, ALL)
    assert done.failed == [] and [one.place for one in done.removed] == [top] and not top.exists()


# ---- several users


@needs_root
def test_root_leaves_the_owner_no_file_that_is_closed_to_them(place: Path) -> None:
    cache = place / "cache"
    staged_tree(place).__exit__()
    for lock in cache.rglob("*.lock"):
        lock.unlink()
    for name in (f"stages/build-{'a' * 32}", f"tiers/{ENVIRONMENT}"):
        (cache / name).mkdir(parents=True)
    opened(place, NOBODY)
    assert len(prune_cache(cache, ALL).removed) == 3
    assert {path.name for path in cache.rglob("*.lock")} > {LOCK, ".prune.lock"}
    assert [path for path in cache.rglob("*") if path.lstat().st_uid != NOBODY] == []


@needs_root
def test_another_users_closed_tree_stays_and_ones_own_goes(place: Path) -> None:
    cache = place / "cache"
    theirs, own = cache / "staged" / ("a" * 32), cache / "staged" / ("b" * 32)
    for tree in (theirs, own):
        written(tree / "staged.json")
    opened(place, NOBODY)
    os.chown(theirs, 0, 0)
    theirs.chmod(0o700)
    assert as_nobody(cache) == 1 and theirs.exists() and not own.exists()


@needs_root
def test_where_a_lock_cannot_be_had_nothing_goes_and_all_of_it_is_said(place: Path) -> None:
    built(place)
    opened(place, 0)
    assert as_nobody(place / "cache") == len(show_cache(place / "cache").holdings) > 0


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_no_file_makes_none_elsewhere_and_is_not_waited_for(place: Path, kind: str) -> None:
    """What a user may leave for the root who prunes."""
    lock = place / "cache/locks" / LOCK
    run = written(place / "cache/stages/build-once/log")
    lock.parent.mkdir()
    lock.symlink_to(place / "made") if kind == "link" else os.mkfifo(lock)
    done = prune_cache(place / "cache", ALL)
    assert [path for path, _ in done.failed] == [run.parent] and run.exists() and not (place / "made").exists()


# ---- times and records that nobody wrote


@pytest.mark.parametrize("record", ['{"uses":{"a":[["NAME"]]},"when":{"a":%s}}' % ("9" * n) for n in (20, 400)] + ["[" * 100_000])
def test_a_record_of_uses_that_makes_no_sense_stops_nothing(tmp_path: Path, record: str) -> None:
    (tmp_path / "tiers" / ENVIRONMENT).mkdir(parents=True)
    (tmp_path / "tiers/uses.json").write_text(record.replace("NAME", ENVIRONMENT))
    json.dumps(show_cache(tmp_path).to_json())
    assert [one.kind for one in prune_cache(tmp_path, ALL).removed] == ["environment"]


@needs_root
@pytest.mark.parametrize(("seconds", "shown"), [(9 * 10**11, "9999-12-31"), (-9 * 10**11, "1970-01-01")])
def test_a_time_that_no_date_has_is_shown_as_the_last(tmp_path: Path, seconds: int, shown: str) -> None:
    mount("tmpfs", str(tmp_path), "tmpfs")
    try:
        tree = tmp_path / "staged" / ("a" * 32)
        os.utime(written(tree / "staged.json"), (seconds, seconds))
        assert show_cache(tmp_path).kinds()["staged tree"]["used"].startswith(shown)
        assert len(prune_cache(tmp_path, PruneOptions(keep_days=1)).removed) == (seconds < 0)
    finally:
        umount(str(tmp_path))


@pytest.mark.parametrize("lines", [b"\xff\xfe\n/x\0y\n", None])
def test_a_checkout_whose_alternates_are_no_text_goes(tmp_path: Path, lines: bytes | None) -> None:
    info = tmp_path / "tiers/sources" / f"x-{'1' * 12}-{'2' * 16}" / ".git/objects/info"
    written(info / "alternates").write_bytes(lines or b"")
    if lines is None:
        (info / "alternates").unlink()
        (info / "alternates").mkdir()
    assert [one.kind for one in prune_cache(tmp_path, ALL).removed] == ["checkout"]


@pytest.mark.parametrize("said", ["{link}/tiers/sources/{bare}/objects", "../../../{bare}/objects"])
def test_a_repository_stays_that_a_checkout_calls_by_a_link_or_from_itself(tmp_path: Path, said: str) -> None:
    """A cache that was reached by a link, as scratch folders often are."""
    sources, bare = tmp_path / "cache/tiers/sources", f"x-{'b' * 16}.git"
    (sources / bare / "objects").mkdir(parents=True)
    (tmp_path / "link").symlink_to("cache")
    checkout = sources / f"x-{'1' * 12}-{'2' * 16}"
    text = said.format(link=tmp_path / "link", bare=bare)
    written(checkout / ".git/objects/info/alternates").write_text(f"{text}\n")
    needs = [one.needs for one in show_cache(tmp_path / "link").holdings if one.kind == "checkout"]
    assert needs == [(sources / bare,)]
