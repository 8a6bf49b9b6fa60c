"""The identity of a tree by ``lstat`` alone; also a program of its own, so that several trees are looked at at once.

Standard library only, as a program: ``python -I -S scan_quick.py ROOT [linked]`` prints the identity. A process for
each tree because threads would wait for each other: half of the time is Python's own.
"""

from __future__ import annotations

import fnmatch
import hashlib
import marshal
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence

# File times move in kernel ticks, at most 10 ms: a file that changed less than two ticks ago can change again
# without any of its times telling (git's "racy clean" entries).
SETTLE_NS = 20_000_000

Facts = tuple[bytes, int, int, int, int, int, int, int, int, int]
Look = Callable[[bytes, os.stat_result], Facts]


def identity(root: bytes, exclude: Sequence[str] = (), linked: bool = False) -> str:
    """SHA-256 (hex) of what ``lstat`` says of everything below a real path; see ``scan_fingerprint.fingerprint``.

    Args:
        linked: the tree's files are hard links that others give and take: what that alone changes does not count.

    Raises:
        OSError: with the path in ``filename``.
    """
    facts = _linked_facts if linked else _facts
    started = time.time_ns()
    value, newest = _walk(root, exclude, facts)
    if newest < started - SETTLE_NS:
        return value
    time.sleep(SETTLE_NS / 1e9)
    started = time.time_ns()
    value, newest = _walk(root, exclude, facts)
    return value if newest < started - SETTLE_NS else f"{value}-{started}"


def _walk(root: bytes, exclude: Sequence[str], facts: Look) -> tuple[str, int]:
    """The digest and the newest ctime in nanoseconds."""
    digest = hashlib.sha256()
    top = os.lstat(root)
    # marshal gives every value bytes of its own at a fifth of what formatting costs (no strings: whether one was
    # interned shows; version 2: no back references).
    digest.update(marshal.dumps(facts(b"", top), 2))
    newest = top.st_ctime_ns
    root = root.rstrip(b"/")
    above = len(root) + 1
    pending = [root]
    while pending:
        place = pending.pop()
        try:
            rows, folders = _folder(place, above, exclude, facts)
        except OSError as error:
            error.filename = place
            raise
        rows.sort()
        folders.sort()
        digest.update(marshal.dumps(rows, 2))
        newest = max(newest, *(row[-1] for row in rows)) if rows else newest
        pending += folders
    return digest.hexdigest(), newest


def _folder(
    place: bytes, above: int, exclude: Sequence[str], facts: Look
) -> tuple[list[Facts], list[bytes]]:
    """What is in a folder, and the folders in it; paths begin after ``above`` bytes."""
    rows, folders = [], []
    # By descriptor the kernel looks up one name for each entry, and not a whole path: a quarter of the time.
    descriptor = os.open(place or b"/", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.scandir(descriptor) as found:
            for child in found:
                name = os.fsencode(child.name)
                if exclude and _excluded(os.fsdecode((place + b"/" + name)[above:]), exclude):
                    continue
                status = child.stat(follow_symlinks=False)
                rows.append(facts(name, status))
                if stat.S_ISDIR(status.st_mode):
                    folders.append(place + b"/" + name)
    finally:
        os.close(descriptor)
    return rows, folders


def _facts(name: bytes, s: os.stat_result) -> Facts:
    """All that tells of a change; writing to a file, its attributes or its name's link sets ctime, which comes last."""
    return (
        name, s.st_mode, s.st_uid, s.st_gid, s.st_size, s.st_ino, s.st_dev, s.st_nlink, s.st_mtime_ns, s.st_ctime_ns
    )  # fmt: skip


def _linked_facts(name: bytes, s: os.stat_result) -> Facts:
    """As ``_facts``, but that a file got or lost a name elsewhere does not tell; writing to it still sets its mtime."""
    if not stat.S_ISREG(s.st_mode):
        return _facts(name, s)
    return (name, s.st_mode, s.st_uid, s.st_gid, s.st_size, s.st_ino, s.st_dev, 0, s.st_mtime_ns, s.st_mtime_ns)


def _excluded(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


if __name__ == "__main__":
    print(identity(os.fsencode(sys.argv[1]), linked=sys.argv[2:] == ["linked"]))
