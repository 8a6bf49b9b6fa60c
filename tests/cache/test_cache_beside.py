"""A cache that is pruned while builds, sandboxes and other prunes use it, or after one was killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from oci_builder.cache import DAY, PruneOptions, prune_cache, show_cache
from oci_builder.cache import contents as looking
from oci_builder.cache import removal as module
from oci_builder.model.errors import TransportError
from oci_builder.payload.tidy import LOCK
from oci_builder.payload.tidy import in_use as in_use_by_a_build
from oci_builder.store import locks
from oci_builder.store.locks import alone, in_use
from tests.cache.lab import (
    ALL,
    PRELUDE,
    ROOT,
    BlobsOf,
    age,
    building,
    built,
    hashes,
    python,
    staged_tree,
)
from tests.lab.waits import until


def paused_build(place: Path) -> subprocess.Popen[bytes]:
    """A build that has stopped itself at the first bytes of a layer."""
    code = """
import signal
from oci_builder.store.ingest import Ingest
stops = [signal.SIGSTOP]
def write(self, data):
    really(self, data)
    while stops:
        os.kill(os.getpid(), stops.pop())
really, Ingest.write = Ingest.write, write
build(place / "spec.json", place / "out", BuildOptions(place / "cache", 1))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", PRELUDE + code, place], env=env)
    until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    return process


def test_a_paused_build_loses_nothing_and_ends_well(place: Path) -> None:
    built(place, out="first")
    (place / "tier/c.bin").write_bytes(os.urandom(70_000))
    process = paused_build(place)
    done = prune_cache(place / "cache", ALL)
    assert done.removed == [] and {one.kind for one in done.in_use} == {"blob", "record", "partial download"}
    process.send_signal(signal.SIGCONT)
    assert process.wait(300) == 0
    whole = hashes(place / "out")
    prune_cache(place / "cache", ALL)
    built(place, out="again")
    assert hashes(place / "again") == whole


def test_what_a_killed_build_left_goes_and_the_next_one_works(place: Path) -> None:
    process = paused_build(place)
    process.kill()
    process.wait()
    done = prune_cache(place / "cache", ALL)
    assert "partial download" in {one.kind for one in done.removed} and done.in_use == []
    assert not list((place / "cache/store/ingest").iterdir())
    assert not built(place).unchanged


def test_a_build_that_starts_while_a_prune_removes_is_not_held_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(place)
    before = hashes(place / "out")
    (place / "cache/tiers" / f"base-{'1' * 20}").mkdir()
    ended: list[int] = []

    def remove(path: Path) -> None:
        ended.append(building(place, out="meanwhile").wait(300))
        remove_really(path)

    remove_really = module._remove
    monkeypatch.setattr(module, "_remove", remove)
    done = prune_cache(place / "cache", ALL)
    assert ended == [0] and hashes(place / "meanwhile") == before
    assert {one.kind for one in done.removed} == {"blob", "environment", "record"}
    assert built(place, out="meanwhile").unchanged


def test_a_build_waits_while_a_prune_decides(place: Path) -> None:
    built(place)
    with alone(place / "cache/tiers" / LOCK):
        process = building(place, out="meanwhile")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        for blob in (place / "cache/store/blobs/sha256").iterdir():
            blob.unlink()
    assert process.wait(300) == 0
    assert hashes(place / "meanwhile") == hashes(place / "out")


def test_what_a_build_used_since_the_prune_decided_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(place)
    age(place / "cache", 40)
    sweep = module._sweep

    def build_meanwhile(cache: Path) -> list[Any]:
        built(place, out="meanwhile")
        return sweep(cache)

    monkeypatch.setattr(module, "_sweep", build_meanwhile)
    with BlobsOf(place, "out"):
        done = prune_cache(place / "cache", PruneOptions(keep_days=30))
    assert done.before.holdings[0].used < time.time() - 30 * DAY
    assert done.removed == [] and done.failed == []


def test_a_build_that_began_since_the_prune_decided_loses_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(place)
    with ExitStack() as running:

        def begin(cache: Path) -> list[Any]:
            running.enter_context(in_use_by_a_build(cache / "tiers"))
            return []

        monkeypatch.setattr(module, "_sweep", begin)
        with BlobsOf(place, "out"):
            done = prune_cache(place / "cache", ALL)
        assert done.removed == [] and {one.kind for one in done.in_use} == {"blob", "record"}


def test_what_a_killed_prune_moved_aside_goes_with_the_next(place: Path) -> None:
    built(place)
    before = hashes(place / "out")
    for digit in "12":
        folder = place / "cache/tiers" / f"base-{digit * 20}/base"
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(1000))
    killed = python("module._remove = lambda place: os._exit(9)\nprune(0)", place / "cache")
    assert killed.returncode == 9
    assert len(list((place / "cache/tiers").glob(".pruned*/*"))) == 2
    assert not list((place / "cache/tiers").glob("base-*"))
    built(place, out="again")
    assert hashes(place / "again") == before
    assert prune_cache(place / "cache", PruneOptions(keep_days=1)).before.foreign == []
    assert not list((place / "cache/tiers").glob(".pruned*"))


@pytest.mark.parametrize("refused", ["mkdir", "rename", "lock_file"])
def test_a_disk_that_takes_nothing_more_can_be_pruned(
    place: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Full to the last block, or (rename) an overlay that moves no folders of its lower layers."""
    built(place)
    (place / "cache/tiers" / f"base-{'1' * 20}/base").mkdir(parents=True)
    owner = locks if refused == "lock_file" else Path
    really = getattr(owner, refused)

    def refuse(path: Path, *words: Any, **more: Any) -> Any:
        fresh = not path.exists() if refused == "mkdir" else refused == "rename" or path.name in (".prune.lock", ".uses.json.lock")
        if fresh and "cache" in path.parts and path.name != LOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return really(path, *words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, refused, refuse)
        done = prune_cache(place / "cache", ALL)
    assert done.failed == [] and {one.kind for one in done.removed} == {"blob", "environment", "record"}
    assert show_cache(place / "cache").size == 0
    built(place, out="again")
    assert hashes(place / "again") == hashes(place / "out")


def test_two_prunes_take_turns(place: Path) -> None:
    built(place)
    with alone(place / "cache/.prune.lock"):
        with pytest.raises(subprocess.TimeoutExpired):
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run([sys.executable, "-c", PRELUDE + "prune(0)", place / "cache"], env=env, timeout=2, check=False)
        assert prune_cache(place / "cache", PruneOptions(keep_days=0, dry_run=True)).removed
    assert json.loads(python("prune(0)", place / "cache").stdout)["size"] == 0


def test_a_tree_that_somebody_runs_in_stays_until_it_ends(place: Path) -> None:
    with staged_tree(place) as staged:
        done = prune_cache(place / "cache", ALL)
        assert [one.kind for one in done.in_use] == ["staged tree"] and (staged.root / "file").exists()
        assert [one.busy for one in show_cache(place / "cache").holdings] == [True]
    assert [one.kind for one in prune_cache(place / "cache", ALL).removed] == ["staged tree"]


def test_what_a_build_removes_while_a_cache_is_looked_at_is_looked_for_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(place)
    looks: list[Path] = []

    def look(work: Path) -> list[Any]:
        looks.append(work)
        if len(looks) < 3:
            raise FileNotFoundError(errno.ENOENT, "gone", str(work))
        return really(work)

    really = looking.payload_held
    monkeypatch.setattr(looking, "payload_held", look)
    assert show_cache(place / "cache").size > 0 and len(looks) == 3
    monkeypatch.setattr(looking, "payload_held", lambda work: os.stat(work / "absent"))
    with pytest.raises(TransportError):
        show_cache(place / "cache")


def test_nobodys_lock_is_held_afterwards(place: Path) -> None:
    built(place)
    prune_cache(place / "cache", ALL)
    assert not in_use(place / "cache/tiers" / LOCK) and not in_use(place / "cache/.prune.lock")
