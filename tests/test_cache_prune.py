"""``cache prune``: what nobody uses goes, what somebody uses stays, and the next build gives the same bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from oci_builder import cache as module
from oci_builder.build import FILES, BuildOptions, BuildResult, build
from oci_builder.cache import DAY, PruneOptions, prune_cache, show_cache
from oci_builder.execution.staging import Staged, Unpacked, stage
from oci_builder.model.digest import Digest
from oci_builder.model.errors import SpecError, TransportError
from oci_builder.payload.tidy import LOCK
from oci_builder.payload.tidy import in_use as in_use_by_a_build
from oci_builder.store.locks import alone, in_use
from tests.chroot.lab import mount, umount
from tests.test_cli import call

ALL = PruneOptions(keep_days=0)
CONFIG = b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}'
ROOT = Path(__file__).resolve().parent.parent
_PRELUDE = """
import json, os, sys, time
from pathlib import Path
from oci_builder import cache as module
from oci_builder.build import BuildOptions, build
from oci_builder.cache import PruneOptions, prune_cache
place = Path(sys.argv[1])
def prune(days):
    print(json.dumps(prune_cache(place, PruneOptions(keep_days=days)).to_json()), flush=True)
"""


def python(code: str, argument: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own; ``place`` is its argument, ``prune(days)`` prunes it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-c", _PRELUDE + code, str(argument)]
    return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120, check=False, cwd="/")


def building(place: Path, *, out: str = "out") -> subprocess.Popen[bytes]:
    """A real build in a process of its own, with many small blocks to do."""
    argv = [sys.executable, "-c", "from oci_builder.cli import main; main()", "build", place / "spec.json", "--out", place / out]
    argv += ["--cache", place / "cache", "--jobs", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(6000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to be")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A spec of one staged tier on a root file system."""
    for name, size in (("tier/a.bin", 3 << 20), ("tier/b.txt", 5), ("root/etc/os-release", 20)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(os.urandom(size))
    write_spec(tmp_path, "spec.json")
    return tmp_path


def write_spec(place: Path, name: str, tag: str = "t", tier: str = "tier") -> Path:
    value = {"name": "n", "tag": tag, "epoch": 0, "base": {"rootfs": "root"}, "prefix": "/opt/rt", "tiers": {"base": {"path": tier}}}
    (place / name).write_text(json.dumps(value))
    return place / name


def built(place: Path, spec: str = "spec.json", out: str = "out") -> BuildResult:
    return build(place / spec, place / out, BuildOptions(place / "cache", 1))


def hashes(out: Path) -> dict[str, str]:
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in FILES}


def age(cache: Path, days: float) -> None:
    """All blobs and what is known of them were last used so long ago."""
    then = time.time() - days * DAY
    for path in [*cache.glob("store/records/*"), *cache.glob("store/blobs/sha256/*"), cache / "build.sqlite"]:
        os.utime(path, (then, then))


def staged_tree(place: Path) -> Staged:
    archive = place / "image.tar"
    archive.write_bytes(b"archive")

    def unpack(_source: Path, folder: Path) -> Unpacked:
        (folder / "file").write_bytes(bytes(100_000))
        return Unpacked(Digest.of(b"manifest"), CONFIG)

    return stage(archive, place / "cache/staged", unpack)


# ---- what goes, and what the next build makes of it


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


class BlobsOf:
    """Digests of the layers of a built image, hex; on leaving, all of them are in the store."""

    def __init__(self, place: Path, out: str) -> None:
        self.store = place / "cache/store/blobs/sha256"
        layers = json.loads((place / out / "container.json").read_bytes())["layers"]
        self.named = {layer["digest"].removeprefix("sha256:") for layer in layers}

    def __enter__(self) -> BlobsOf:
        assert self.named
        return self

    def __exit__(self, *_: object) -> None:
        assert self.named <= {path.name for path in self.store.iterdir()}


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


# ---- builds, sandboxes and prunes at the same time


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
    process = subprocess.Popen([sys.executable, "-c", _PRELUDE + code, place], env=env)
    wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    return process


def test_a_paused_build_loses_nothing_and_ends_well(place: Path) -> None:
    built(place, out="first")
    (place / "tier/c.bin").write_bytes(os.urandom(70_000))
    process = paused_build(place)
    done = prune_cache(place / "cache", ALL)
    assert done.removed == [] and {one.kind for one in done.in_use} == {"blob", "record", "partial download"}
    process.send_signal(signal.SIGCONT)
    assert process.wait(120) == 0
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
        ended.append(building(place, out="meanwhile").wait(120))
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
    assert process.wait(120) == 0
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


@pytest.mark.parametrize("refused", ["mkdir", "rename", "open"])
def test_a_disk_that_takes_nothing_more_can_be_pruned(
    place: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Full to the last block, or (rename) an overlay that moves no folders of its lower layers."""
    built(place)
    (place / "cache/tiers" / f"base-{'1' * 20}/base").mkdir(parents=True)
    really = getattr(Path, refused)

    def refuse(path: Path, *words: Any, **more: Any) -> Any:
        fresh = not path.exists() if refused == "mkdir" else refused == "rename" or path.name in (".prune.lock", ".uses.json.lock")
        if fresh and "cache" in path.parts and path.name != LOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return really(path, *words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, refused, refuse)
        done = prune_cache(place / "cache", ALL)
    assert done.failed == [] and {one.kind for one in done.removed} == {"blob", "environment", "record"}
    assert show_cache(place / "cache").size == 0
    built(place, out="again")
    assert hashes(place / "again") == hashes(place / "out")


def test_two_prunes_take_turns(place: Path) -> None:
    built(place)
    code = "time.sleep(0); prune(0)"
    with alone(place / "cache/.prune.lock"):
        with pytest.raises(subprocess.TimeoutExpired):
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run([sys.executable, "-c", _PRELUDE + code, place / "cache"], env=env, timeout=2, check=False)
        assert prune_cache(place / "cache", PruneOptions(keep_days=0, dry_run=True)).removed
    assert json.loads(python(code, place / "cache").stdout)["size"] == 0


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

    really = module.payload_held
    monkeypatch.setattr(module, "payload_held", look)
    assert show_cache(place / "cache").size > 0 and len(looks) == 3
    monkeypatch.setattr(module, "payload_held", lambda work: os.stat(work / "absent"))
    with pytest.raises(TransportError):
        show_cache(place / "cache")


def test_nobodys_lock_is_held_afterwards(place: Path) -> None:
    built(place)
    prune_cache(place / "cache", ALL)
    assert not in_use(place / "cache/tiers" / LOCK) and not in_use(place / "cache/.prune.lock")


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
