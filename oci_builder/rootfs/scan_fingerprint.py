"""The identity of a whole tree from ``lstat`` alone: answers "has anything changed?" without reading a file.

Any write to a file changes its ctime, which no program can set; renames and removals change the directory's.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from oci_builder.rootfs.scan import input_failure

# File times move in kernel ticks, at most 10 ms: a file that changed less than two ticks ago can change again
# without any of its times telling (git's "racy clean" entries).
SETTLE_NS = 20_000_000


def fingerprint(root: Path, exclude: Sequence[str] = ()) -> str:
    """SHA-256 (hex) over name, type, mode, owner, size, times, inode and link count of everything below ``root``.

    What ``exclude`` names (``ScanPolicy.exclude``) is not looked into: /proc of a running machine never stands still.

    A tree that was being written until a moment ago is looked at twice; one with times in the future never gives the
    same answer again, so that nothing stale is trusted.

    Raises:
        SpecError: ``scan.changed`` when something vanishes meanwhile, or the root is no folder.
        TransportError: ``io.error``, ``io.readonly``.
    """
    started = time.time_ns()
    value, newest = _walk(root, exclude)
    if newest < started - SETTLE_NS:
        return value
    time.sleep(SETTLE_NS / 1e9)
    started = time.time_ns()
    value, newest = _walk(root, exclude)
    return value if newest < started - SETTLE_NS else f"{value}-{started}"


def _walk(root: Path, exclude: Sequence[str]) -> tuple[str, int]:
    """The digest and the newest ctime in nanoseconds."""
    digest = hashlib.sha256()
    newest = 0
    top = os.fsencode(root.resolve())
    pending = [top]
    while pending:
        place = pending.pop()
        try:
            record, folders, changed = _folder(place, len(top.rstrip(b"/")) + 1, exclude)
        except OSError as error:
            raise input_failure(error, place) from None
        digest.update(record)
        newest = max(newest, changed)
        pending += folders
    return digest.hexdigest(), newest


def _folder(place: bytes, above: int, exclude: Sequence[str]) -> tuple[bytes, list[bytes], int]:
    """One folder's record, the folders in it, and the newest ctime; paths begin after ``above`` bytes."""
    top = Path(os.fsdecode(place)).lstat()
    newest = top.st_ctime_ns
    lines = [f"{top.st_mode} {top.st_uid} {top.st_gid} {top.st_ino} {top.st_dev} {top.st_mtime_ns} {newest}"]
    folders = []
    with os.scandir(os.fsdecode(place)) as found:
        children = sorted(found, key=_name)
    for child in children:
        if exclude and _excluded(os.fsdecode(os.fsencode(child.path)[above:]), exclude):
            continue
        st = child.stat(follow_symlinks=False)
        ctime = st.st_ctime_ns
        lines.append(
            f"{child.name}\0{st.st_mode} {st.st_uid} {st.st_gid} {st.st_size} {st.st_mtime_ns} {ctime} "
            f"{st.st_ino} {st.st_dev} {st.st_nlink}"
        )
        newest = max(newest, ctime)
        if stat.S_ISDIR(st.st_mode):
            folders.append(os.fsencode(child.path))
    return os.fsencode("\0".join(lines) + "\0\n"), folders, newest


def _excluded(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _name(child: os.DirEntry[str]) -> str:
    return child.name
