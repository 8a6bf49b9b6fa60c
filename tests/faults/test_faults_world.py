"""Disks that are full or read-only, clocks that go backwards, files that change, others at the same work."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oci_builder.build import FILES, BuildOptions, build
from oci_builder.model.digest import Digest
from oci_builder.model.errors import ConflictError, OciBuilderError, SpecError
from oci_builder.unpack import unpack_image
from tests.conftest import Built, build_small, small_tiers, write_spec
from tests.faults.lab import Zygote
from tests.faults.work import Bench, Work
from tests.lab.oracle import differences, tree

WRITING = ("build", "unpack", "pull")


@contextmanager
def disk(place: Path, size: str) -> Iterator[None]:
    """A tmpfs of that size; as root only."""
    place.mkdir(exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", place], check=True)


def below(work: Work, folder: Path) -> Work:
    """The same work in another folder."""
    folder.mkdir(exist_ok=True)
    work.folder = folder
    return work


@pytest.mark.parametrize("size", ["16k", "40k", "64k", "256k"])
@pytest.mark.parametrize("verb", WRITING)
def test_a_small_disk_fills_up(bench: Bench, zygote: Zygote, verb: str, size: str, tmp_path: Path) -> None:
    """As the run needs more than there is: it says so, leaves nothing unfinished, and works once there is space."""
    model = bench.work(verb)
    model.finish(zygote)
    with disk(tmp_path / "small", size):
        work = below(bench.work(verb), tmp_path / "small" / "work")
        work.good = model.good
        ran = zygote.run(*work.argv)
        assert "Traceback" not in ran.text
        assert ran.status in (0, 5), ran.text
        if ran.status:
            assert "io.space" in ran.text and "free space" in ran.text
        work.never_partial()
        remount(tmp_path / "small", "size=64m")
        work.unmake_whole()
        work.finish(zygote)
    assert ran.status == 5 or size == "256k" or verb == "pull", f"{verb} does with {size}: the test tests nothing"


@pytest.mark.parametrize("verb", WRITING)
def test_a_read_only_disk(bench: Bench, zygote: Zygote, verb: str, tmp_path: Path) -> None:
    model = bench.work(verb)
    model.finish(zygote)
    with disk(tmp_path / "still", "16m"):
        work = below(bench.work(verb), tmp_path / "still" / "work")
        work.good = model.good
        remount(tmp_path / "still", "ro")
        ran = zygote.run(*work.argv)
        assert (ran.status, "io.readonly" in ran.text, "Traceback" in ran.text) == (5, True, False), ran.text
        remount(tmp_path / "still", "rw")
        work.finish(zygote)


def digests(out: Path) -> dict[str, str]:
    return {name: Digest.of((out / name).read_bytes()) for name in FILES}


def test_a_clock_that_goes_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour back at each look: the same bytes, and a change is seen."""
    for name in ("good", "odd"):
        (tmp_path / name).mkdir()
    good = digests(build_small(tmp_path / "good").out)
    now = [time.time_ns()]

    def back() -> int:
        now[0] -= 3600 * 10**9
        return now[0]

    monkeypatch.setattr(time, "time_ns", back)
    monkeypatch.setattr(time, "time", lambda: back() / 1e9)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    built = build_small(tmp_path / "odd")
    assert digests(built.out) == good
    changed(built)


def changed(built: Built) -> None:
    """A rebuild after a change of one byte, with the file's old times put back, is another archive."""
    before = digests(built.out)
    path = built.spec.parent / "envs/one/lib/pkg/own.py"
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"one", b"two"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    build(built.spec, built.out, BuildOptions(built.cache, 1))
    assert digests(built.out)["runtime.oci.tar"] != before["runtime.oci.tar"]


def test_files_from_the_future(tmp_path: Path) -> None:
    """Times that have not been yet are clamped to the epoch, and vouch for nothing."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = build_small(tmp_path / "a"), tmp_path / "b"
    spec = write_spec(two, small_tiers(two))
    for path in (two / "envs").rglob("*"):
        os.utime(path, (4_000_000_000, 4_000_000_000), follow_symlinks=False)
    build(spec, two / "out", BuildOptions(two / "cache", 1))
    assert digests(two / "out") == digests(one.out)
    changed(Built(two / "out", spec, two / "cache", {}))


@pytest.mark.parametrize("how", ["another content", "longer", "gone", "a link", "a folder"])
def test_a_file_is_replaced_between_stat_and_read(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(tmp_path, small_tiers(tmp_path))
    path = tmp_path / "envs/one/lib/pkg/shared.bin"
    size, real, done = path.stat().st_size, os.open, []

    def swapped(name: object, *rest: object, **more: object) -> int:
        if not done and os.fsdecode(name).endswith("shared.bin"):  # type: ignore[arg-type]
            done.append(name)
            replace(path, how, size)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(SpecError) as error:
        build(spec, tmp_path / "out", BuildOptions(tmp_path / "cache", 1))
    assert done and error.value.code == "scan.changed"
    assert os.listdir(tmp_path / "out") == []


def replace(path: Path, how: str, size: int) -> None:
    path.unlink()
    match how:
        case "another content":
            path.write_bytes(b"x" * size)
        case "longer":
            path.write_bytes(b"x" * (size + 1))
        case "a link":
            path.symlink_to("own.py")
        case "a folder":
            path.mkdir()


def at_once(actions: list[Callable[[], object]]) -> list[object]:
    """Results, or the errors of ours, of things done at the same time."""
    found: list[object] = [None] * len(actions)
    gate = threading.Barrier(len(actions))

    def run(number: int) -> None:
        gate.wait()
        try:
            found[number] = actions[number]()
        except OciBuilderError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return found


def test_unpacks_into_one_folder(quick: Built, tmp_path: Path) -> None:
    """One of four wins; the others say that the folder is taken; the tree is whole."""
    unpack_image(quick.oci, tmp_path / "alone")
    found = at_once([lambda: unpack_image(quick.oci, tmp_path / "dest")] * 4)
    errors = [one for one in found if isinstance(one, ConflictError)]
    assert [error.code for error in errors] == ["unpack.not_empty"] * 3
    assert differences(tree(tmp_path / "alone"), tree(tmp_path / "dest")) == []
    assert sorted(os.listdir(tmp_path)) == ["alone", "dest"]


def test_builds_into_one_folder_in_two_processes(bench: Bench, zygote: Zygote, tmp_path: Path) -> None:
    model = bench.work("build")
    model.finish(zygote)
    work = bench.work("build")
    work.good = model.good
    command = [sys.executable, "-c", "from oci_builder.cli import main; main()", *map(str, work.argv)]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in both:
        _, text = process.communicate(timeout=300)
        assert process.returncode in (0, 6) and "Traceback" not in text, text
    work.never_partial()
    work.finish(zygote)


def test_what_the_dead_left_goes_and_what_the_living_hold_stays(bench: Bench, zygote: Zygote) -> None:
    """Locks are the kernel's: a dead process holds none, whatever files it left."""
    work = bench.work("build")
    out, ingest = work.folder / "out", work.folder / "cache" / "store" / "ingest"
    for folder in (out, ingest):
        folder.mkdir(parents=True)
    dead = out / ".staging-4194304-0"
    dead.mkdir()
    (dead / "runtime.oci.tar").write_bytes(b"half")
    (ingest / "layer-x-4194304-1.part").write_bytes(b"half")
    living = out / ".staging-4194304-1"
    living.mkdir()
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    ran = zygote.run(*work.argv)
    assert ran.status == 0, ran.text
    assert not dead.exists() and living.exists()
    assert os.listdir(ingest) == []
    os.close(held)
    shutil.rmtree(living)
    work.finish(zygote)


def test_an_unpack_clears_away_what_a_dead_one_left(bench: Bench, zygote: Zygote) -> None:
    work = bench.work("unpack")
    left = work.folder / ".dest.partial-0123456789ab"
    (left / "deep" / "er").mkdir(parents=True)
    (left / "deep" / "file").write_bytes(b"half")
    work.finish(zygote)
    assert not left.exists()
