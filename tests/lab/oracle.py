"""Judges of an outcome: what a tree is, and that a victim beside it came to no harm."""

from __future__ import annotations

import hashlib
import os
import resource
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

SECRET = b"the victim's secret: no archive may see or change this\n"


@dataclass(frozen=True, order=True)
class Node:
    """One entry of a tree, as plainly as the system tells it."""

    path: bytes
    kind: str
    mode: int
    owner: tuple[int, int]
    mtime: int
    value: bytes
    links: tuple[bytes, ...] = ()
    xattrs: tuple[tuple[str, bytes], ...] = ()


_KINDS = {
    stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink", stat.S_IFCHR: "char", stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket",
}  # fmt: skip


def tree(root: Path) -> dict[bytes, Node]:
    """Every entry below ``root`` (the root is ``b""``), with content hashes, hard-link groups and attributes."""
    top = os.fsencode(root)
    found: dict[bytes, Node] = {}
    inodes: dict[int, list[bytes]] = {}
    for folder, folders, files in os.walk(top):
        for name in [b"", *folders, *files] if folder == top else [*folders, *files]:
            full = os.path.join(folder, name) if name else folder
            path = os.path.relpath(full, top) if name else b""
            found[path] = _node(full, path)
            status = os.lstat(full)
            if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
                inodes.setdefault(status.st_ino, []).append(path)
    for group in inodes.values():
        for path in group:
            found[path] = _with_links(found[path], tuple(sorted(group)))
    return found


def _with_links(node: Node, links: tuple[bytes, ...]) -> Node:
    return Node(node.path, node.kind, node.mode, node.owner, node.mtime, node.value, links, node.xattrs)


def _node(full: bytes, path: bytes) -> Node:
    status = os.lstat(full)
    kind = _KINDS[stat.S_IFMT(status.st_mode)]
    value = b""
    if kind == "file":
        with open(full, "rb") as file:
            value = hashlib.file_digest(file, "sha256").digest()
    elif kind == "symlink":
        value = os.readlink(full)
    elif kind in ("char", "block"):
        value = b"%d:%d" % (os.major(status.st_rdev), os.minor(status.st_rdev))
    xattrs = tuple((name, os.getxattr(full, name, follow_symlinks=False)) for name in sorted(
        os.listxattr(full, follow_symlinks=False)))  # fmt: skip
    return Node(path, kind, stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid), status.st_mtime_ns, value,
                xattrs=xattrs)  # fmt: skip


def differences(one: dict[bytes, Node], two: dict[bytes, Node]) -> list[str]:
    """What differs between two trees, one line an entry."""
    out = []
    for path in sorted(one.keys() | two.keys()):
        if one.get(path) != two.get(path):
            out.append(f"{path!r}: {one.get(path)} | {two.get(path)}")
    return out


@dataclass
class Victim:
    """A secret beside a destination; ``check`` says that it is untouched and was not copied.

    Attributes:
        folder: where victim and destination stand.
        dest: the destination, not made.
    """

    folder: Path
    dest: Path = field(init=False)

    def __post_init__(self) -> None:
        self.secret = self.folder / "victim" / "secret"
        self.secret.parent.mkdir(parents=True)
        self.secret.write_bytes(SECRET)
        self.dest = self.folder / "dest"
        self._before = self._state()

    def _state(self) -> list[tuple[str, int, int, int, int]]:
        return [
            (str(p), s.st_mode, s.st_uid, s.st_mtime_ns, s.st_nlink)
            for p in sorted([self.secret.parent, *self.secret.parent.iterdir()])
            for s in [p.lstat()]
        ]

    def check(self) -> None:
        """The oracle."""
        assert self._state() == self._before, "the victim was touched"
        assert self.secret.read_bytes() == SECRET
        for path in self._files():
            assert SECRET not in path.read_bytes(), f"the secret leaked into {path}"
        beside = {p.name for p in self.folder.iterdir()} - {"victim", "dest", "archive.tar", "made"}
        assert not beside, f"left beside the destination: {beside}"

    def _files(self) -> Iterator[Path]:
        if self.dest.is_dir():
            for folder, _, names in os.walk(self.dest):
                for name in names:
                    path = Path(folder, name)
                    if stat.S_ISREG(path.lstat().st_mode):
                        yield path


def peak_memory() -> int:
    """This process's peak of resident memory so far, KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _forget_peak() -> None:
    """Let the peak begin anew at what is resident now (proc_pid_clear_refs(5)); where that is not allowed, it stays."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def work() -> float:
    """CPU seconds of this process and its children so far: what others do on the machine meanwhile is no slowness."""
    return sum(os.times()[:4])


# CPU seconds of the loop below where the tests' bounds come from.
_LOOP_SECONDS = 0.0096


def slowness() -> float:
    """How many times more CPU time Python takes here and now than where the bounds come from; at least 1."""
    took = [1.0]
    for _ in range(5):
        start, number = time.process_time(), 0
        for step in range(200_000):
            number = (number * 31 + step) % 1_000_003
        took.append((time.process_time() - start) / _LOOP_SECONDS)
    return max(took)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """At most so much CPU time; as many times more as this machine is slower than where the number comes from."""
    start = work()
    yield
    took = work() - start
    assert took < seconds or took < seconds * slowness(), f"took {took:.1f} s of CPU"


@contextmanager
def bounded(seconds: float = 2.0, mib: int = 64) -> Iterator[None]:
    """CPU time as in ``within``, and growth of this process's peak memory."""
    _forget_peak()
    before = peak_memory()
    with within(seconds):
        yield
    grown = peak_memory() - before
    assert grown < mib << 10, f"memory grew by {grown >> 10} MiB"
