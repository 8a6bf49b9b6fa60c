"""The acceptance scan of a relocated tree: every way in which it could still hang on the place where it was made."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from oci_builder.model.errors import disk_error, show
from oci_builder.model.report import Finding
from oci_builder.payload.elf import MAGIC
from oci_builder.payload.relocate import SYSTEM_FOLDERS, read_facts, walk
from oci_builder.payload.relocate_rules import WORD

_PIECE = 4 << 20
_BATCH = 1024


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """What to look for.

    Attributes:
        needles: absolute paths that no file may hold: build prefixes, scratch and cache folders.
        external: patterns of absolute link targets that whoever runs the tree has: a base's interpreter.
        allowed: patterns of paths below the root that may hold a needle or a strange search path, with the reason.
        threads: how many files are read at once.
    """

    needles: tuple[str, ...] = ()
    external: tuple[str, ...] = ()
    allowed: tuple[tuple[str, str], ...] = ()
    threads: int = 2


def audit(root: Path, options: AuditOptions) -> tuple[Finding, ...]:
    """All findings, sorted by path; an allowed one is a warning with its reason. Each inode is read once.

    Codes: ``payload.prefix`` (a file or link holds a needle), ``payload.link`` (absolute, leaves the root, or leads
    nowhere), ``payload.runpath`` (a library looks in a folder of some build machine), ``payload.special``.

    Raises:
        TransportError: ``io.*``.
    """
    top = os.fsencode(root)
    needles = [os.fsencode(needle).rstrip(b"/") for needle in options.needles]
    findings: list[Finding] = []
    # What lstat says is not kept: 300,000 entries of it are 200 MiB.
    names: dict[tuple[int, int], list[bytes]] = {}
    try:
        for path, found in walk(top):
            findings += _entry(top, path, found, options)
            if stat.S_ISREG(found.st_mode) and found.st_size:
                names.setdefault((found.st_dev, found.st_ino), []).append(path)
        files = iter(names.values())
        with ThreadPoolExecutor(options.threads) as pool:
            while batch := list(islice(files, _BATCH)):
                for paths, problems in zip(batch, pool.map(lambda p: _file(top, p[0], needles), batch), strict=True):
                    findings += [_finding(code, path, what, options) for path in paths for code, what in problems]
    except OSError as error:
        raise disk_error(error, "auditing") from None
    return tuple(sorted(findings, key=lambda f: (f.where, f.code, f.actual)))


def _entry(top: bytes, path: bytes, found: os.stat_result, options: AuditOptions) -> Iterator[Finding]:
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(os.path.join(top, path))
        wrong = _link(top, path, target, options)
        if wrong:
            yield _finding("payload.link", path, f"{show(target)} {wrong}", options)
    elif not stat.S_ISREG(found.st_mode):
        yield _finding("payload.special", path, "a device, fifo or socket", options)


def _link(top: bytes, path: bytes, target: bytes, options: AuditOptions) -> str:
    if target.startswith(b"/"):
        text = target.decode("utf-8", "backslashreplace")
        return "" if any(fnmatchcase(text, pattern) for pattern in options.external) else "is absolute"
    lands = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if lands == b".." or lands.startswith(b"../"):
        return "leaves the tree"
    # Links on the way count: a lexical answer alone could be led outside by another link.
    real_top = os.path.realpath(top)
    try:
        real = os.path.realpath(os.path.join(top, path), strict=True)
    except OSError:
        return "leads nowhere"
    inside = real == real_top or real.startswith(real_top + b"/")
    return "" if inside or _via_external(top, lands, options) else "leaves the tree by another link"


def _via_external(top: bytes, path: bytes, options: AuditOptions) -> bool:
    """Does the chain of links that starts at a path end at an external target?"""
    for _ in range(40):
        place = os.path.join(top, path)
        if not os.path.islink(place):
            return False
        target = os.readlink(place)
        if target.startswith(b"/"):
            return not _link(top, path, target, options)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return False


def _file(top: bytes, path: bytes, needles: Sequence[bytes]) -> list[tuple[str, str]]:
    """(code, what) of everything wrong with a file's content."""
    with open(os.path.join(top, path), "rb", buffering=0) as file:
        prefixes = [("payload.prefix", f"holds {show(needle)} at byte {at}") for needle, at in held(file, needles)]
        elf = os.pread(file.fileno(), len(MAGIC), 0) == MAGIC
        return prefixes + (list(_strays(file.fileno(), os.fstat(file.fileno()).st_size)) if elf else [])


def held(file: BinaryIO, needles: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Each needle that stands in a file, and where first; libraries of gigabytes pass through in pieces."""
    found: dict[bytes, int] = {}
    keep, start, data = max(map(len, needles), default=0), 0, b""
    while len(found) < len(needles):
        piece = file.read(_PIECE)
        # A needle at the very end is found again with what follows it, and with nothing when nothing follows.
        tail = data[-keep:] if keep else b""
        start += len(data) - len(tail)
        data = tail + piece
        for needle in needles:
            at = -1 if needle in found else _find(data, needle, last=not piece)
            if at >= 0:
                found[needle] = start + at
        if not piece:
            break
    return [(needle, found[needle]) for needle in needles if needle in found]


def _find(data: bytes, needle: bytes, *, last: bool) -> int:
    """Where a path begins that is the needle or below it; -1 when nowhere. ``/build2`` is not below ``/build``."""
    at = data.find(needle)
    while at >= 0:
        end = at + len(needle)
        if data[end : end + 1] not in WORD and (last or end < len(data)):
            return at
        at = data.find(needle, at + 1)
    return -1


def _strays(fd: int, size: int) -> Iterator[tuple[str, str]]:
    facts = read_facts(fd, size)
    for entry in facts.runpath or facts.rpath if facts else ():
        if not entry.startswith(("$ORIGIN", "${ORIGIN}")) and entry.rstrip("/") not in SYSTEM_FOLDERS:
            yield "payload.runpath", f"searches {show(entry)}"


def _finding(code: str, path: bytes, what: str, options: AuditOptions) -> Finding:
    text = path.decode("utf-8", "backslashreplace")
    reason = next((why for pattern, why in options.allowed if fnmatchcase(text, pattern)), None)
    message = f"{show(path)}: {what}" + (f" (allowed: {reason})" if reason is not None else "")
    severity, status = ("error", 1) if reason is None else ("warning", 0)
    return Finding(code, severity, text, actual=what, message=message, exit_status=status)
