"""What a prune of the cache takes and leaves, and what the next build makes of it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from oci_builder.cache import DAY, PruneOptions, prune_cache, show_cache
from oci_builder.model.errors import SpecError
from tests.cache.lab import (
    ALL,
    BlobsOf,
    age,
    built,
    hashes,
    staged_tree,
    write_spec,
)
from tests.chroot.lab import mount, umount
from tests.test_cli import call


def test_after_a_prune_of_everything_the_archives_stand_and_a_build_gives_the_same(place: Path) -> None:
    built(place)
    staged_tree(place).__exit__()
    before = hashes(place / "out")
    done = prune_cache(place / "cache", ALL)
    assert {one.kind for one in done.removed} == {"blob", "staged tree", "record"} and not done.failed
    assert done.size == 0 and list((place / "cache/store/blobs/sha256").iterdir()) == []
    assert hashes(place / "out") == before
    assert not built(place).unchanged
    assert hashes(place / "out") == before
    assert not built(place, out="another").unchanged and hashes(place / "another") == before


def test_what_is_younger_stays_and_nothing_has_changed(place: Path) -> None:
    built(place)
    assert prune_cache(place / "cache", PruneOptions(keep_days=1)).removed == []
    assert built(place).unchanged


def test_a_build_with_nothing_to_do_has_used_what_the_archives_were_made_of(place: Path) -> None:
    built(place)
    (place / "other").mkdir()
    (place / "other/c.bin").write_bytes(os.urandom(70_000))
    built(place, write_spec(place, "other.json", "other", "other").name, "out2")
    age(place / "cache", 40)
    with BlobsOf(place, "out") as first:
        assert built(place).unchanged
        done = prune_cache(place / "cache", PruneOptions(keep_days=30))
        assert done.removed and not {one.place.name for one in done.removed} & first.named
    assert built(place).unchanged and built(place, "other.json", "out2").unchanged


def test_the_size_that_was_asked_for_holds_and_the_oldest_go_first(place: Path) -> None:
    built(place)
    staged_tree(place).__exit__()
    record = next((place / "cache/staged").glob("*/staged.json"))
    os.utime(record, (1, 1))
    whole = show_cache(place / "cache").size
    done = prune_cache(place / "cache", PruneOptions(max_size=whole - 1))
    assert [one.kind for one in done.removed] == ["staged tree"]
    assert show_cache(place / "cache").size == done.size < whole
    assert prune_cache(place / "cache", PruneOptions(max_size=1 << 20)).size <= 1 << 20


def test_a_dry_run_says_the_same_and_changes_nothing(place: Path) -> None:
    built(place)
    before = sorted(path for path in (place / "cache").rglob("*"))
    said = prune_cache(place / "cache", PruneOptions(keep_days=0, dry_run=True))
    assert sorted(path for path in (place / "cache").rglob("*")) == before
    assert [one.place for one in said.removed] == [one.place for one in prune_cache(place / "cache", ALL).removed]


def test_what_is_known_of_gone_blobs_goes_with_them(place: Path) -> None:
    built(place)
    database = place / "cache/build.sqlite"
    os.utime(database, (time.time() + DAY,) * 2)
    prune_cache(place / "cache", ALL)
    with sqlite3.connect(database) as known:
        assert known.execute("SELECT count(*) FROM blocks").fetchone() == (0,)
        assert [value for (value,) in known.execute("SELECT value FROM records") if '"files"' not in value] == []
    assert built(place).unchanged


# ---- what is none of the cache's own


def test_foreign_files_and_links_are_named_and_left(place: Path) -> None:
    built(place)
    cache, precious = place / "cache", place / "precious"
    precious.mkdir()
    (precious / "data").write_bytes(b"mine")
    foreign = [cache / "notes.txt", cache / "store/blobs/sha256/README", cache / "tiers/mine", cache / "staged/mine"]
    for path in foreign[:2]:
        path.write_text("mine")
    for path in foreign[2:]:
        path.mkdir(parents=True)
        (path / "data").write_bytes(b"mine")
    links = [cache / "tiers" / f"base-{'1' * 20}", cache / "staged" / ("2" * 32), cache / "store/blobs/sha256" / ("3" * 64)]
    for link in (*links, cache / "installed"):
        link.symlink_to(precious)
    done = prune_cache(cache, ALL)
    assert set(done.before.foreign) == {*foreign, *links, cache / "installed"}
    assert (precious / "data").read_bytes() == b"mine" and all(os.path.lexists(path) for path in (*foreign, *links))
    assert (foreign[2] / "data").exists() and (foreign[3] / "data").exists()


def test_a_part_of_the_cache_that_is_a_link_is_left_alone(place: Path) -> None:
    built(place)
    (place / "cache/store").rename(place / "elsewhere")
    (place / "cache/store").symlink_to(place / "elsewhere")
    done = prune_cache(place / "cache", ALL)
    assert place / "cache/store" in done.before.foreign
    assert list((place / "elsewhere/blobs/sha256").iterdir())
    built(place, out="again")


def test_a_cache_that_is_a_link_is_the_cache(place: Path) -> None:
    built(place)
    (place / "link").symlink_to(place / "cache")
    assert prune_cache(place / "link", ALL).size == 0


def test_a_folder_that_is_no_cache_is_refused_and_an_absent_one_is_empty(place: Path) -> None:
    with pytest.raises(SpecError) as caught:
        prune_cache(place, ALL)
    assert caught.value.code == "spec.path" and not (place / ".prune.lock").exists()
    assert prune_cache(place / "absent", ALL).removed == [] and not (place / "absent").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: becomes another user")
def test_an_ordinary_user_removes_trees_whose_folders_are_closed(place: Path) -> None:
    cache = place / "cache"
    tree = cache / "staged" / ("a" * 32)
    (tree / "rootfs/closed/inner").mkdir(parents=True)
    (tree / "rootfs/closed/inner/file").write_bytes(b"x")
    (cache / "tiers" / f"base-{'1' * 20}/base/read-only").mkdir(parents=True)
    (cache / "tiers" / f"base-{'1' * 20}/base/read-only/file").write_bytes(b"x")
    (cache / "tiers" / f"base-{'1' * 20}/base/read-only").chmod(0o500)
    (tree / "rootfs/closed/inner").chmod(0)
    (tree / "rootfs/closed").chmod(0o111)
    subprocess.run(["chown", "-R", "65534:65534", place], check=True)
    for parent in (place, *place.parents[:2]):
        parent.chmod(0o755)
    show_cache(cache)
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os._exit(len(prune_cache(cache, ALL).failed))
    assert os.waitpid(child, 0)[1] == 0
    assert list(cache.glob("staged/*/")) == list(cache.glob("tiers/base*")) == list(cache.glob("tiers/.pruned*")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")
def test_what_cannot_be_removed_is_said_and_the_rest_goes(place: Path) -> None:
    built(place)
    staged_tree(place).__exit__()
    root = next((place / "cache/staged").glob("*/rootfs"))
    (root / "mnt").mkdir()
    mount("tmpfs", str(root / "mnt"), "tmpfs")
    try:
        done = prune_cache(place / "cache", ALL)
        assert [(path, error.code) for path, error in done.failed] == [(root.parent, "io.busy")]
        assert {one.kind for one in done.removed} == {"blob", "record"}
    finally:
        umount(str(root / "mnt"))
    assert [one.kind for one in prune_cache(place / "cache", ALL).removed][:1] == ["staged tree"]


# ---- the command


def test_the_command_says_what_there_is_and_what_went(place: Path) -> None:
    built(place)
    cache = ["--cache", str(place / "cache")]
    shown = json.loads(call("cache", "show", "--json", *cache).stdout)
    assert shown["size"] == sum(row["size"] for row in shown["holdings"]) == sum(k["size"] for k in shown["kinds"].values())
    assert shown["kinds"]["blob"]["count"] == len(list((place / "cache/store/blobs/sha256").iterdir()))
    assert b"blob" in call("cache", "show", *cache).stdout
    said = json.loads(call("cache", "prune", "--max-size", "1kB", "--dry-run", "--json", *cache).stdout)
    assert said["dry_run"] and said["size"] <= 1000 and said["freed"] == shown["size"] - said["size"]
    assert b"0 B would go" in call("cache", "prune", "--dry-run", *cache).stdout
    done = call("cache", "prune", "--keep-days", "0", *cache)
    assert done.returncode == 0 and b"0 B left" in done.stdout and done.stderr == b""


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--max-size", "much"], 2), (["--max-size", "-1"], 2), (["--max-size", ""], 2), (["--keep-days", "-1"], 2),
        (["--keep-days", "nan"], 2), (["--cache", "/etc"], 2), (["--cache", "/nowhere/at/all"], 0),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_a_wrong_input(place: Path, words: list[str], status: int) -> None:
    assert call("cache", "prune", "--cache", place / "cache", *words).returncode == status


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")
def test_what_could_not_be_removed_is_exit_5(place: Path) -> None:
    tree = place / "cache/staged" / ("a" * 32)
    tree.mkdir(parents=True)
    mount("tmpfs", str(tree), "tmpfs")
    try:
        done = call("cache", "prune", "--keep-days", "0", "--cache", place / "cache")
        assert done.returncode == 5 and b"stays" in done.stderr and b"[io.busy]" in done.stderr
    finally:
        umount(str(tree))
