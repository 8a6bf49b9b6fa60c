"""Staging: the unpacked tree of an image, on local disk, used again only while nothing has touched it.

A staged tree lies in ``CACHE/<key>/rootfs`` with a record beside it. The key is the content that was asked for (the
archive's SHA-256, or the bytes of a layout's index.json) and all that changes how it is unpacked. The record holds the
tree's fingerprint, taken when it was unpacked; a tree with another one is removed and unpacked again.

Whoever runs something in a tree holds its record (``store.locks``) and nobody removes a tree whose record is held; one
that was touched meanwhile is left to those who are in it, and another is unpacked beside it, as ``CACHE/<key>-1``. What
becomes of a key is decided under ``CACHE/<key>.lock``. The record's time is when a run last took the tree.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from chroot_exec.errors import RunnerError
from chroot_exec.teardown import mounts_below, remove_tree
from oci_builder.execution.companions import container_record, unpacked_size
from oci_builder.execution.hashes import file_sha256, read_record, require_unchanged, write_record
from oci_builder.judge.path import is_layout, open_member
from oci_builder.model.digest import Digest
from oci_builder.model.documents import ImageConfig, parse_document
from oci_builder.model.errors import OciBuilderError, SpecError, TransportError, disk_code, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.jsontext import dump_json
from oci_builder.rootfs.scan_fingerprint import fingerprint
from oci_builder.store.locks import alone, alone_now, hold, in_use

# Part of every key: a change in how trees are unpacked makes old ones unfit.
_FORMAT = 1
_RECORD = "staged.json"
_ROOT = "rootfs"
_PARTIAL = ".partial"
_MOST_TWINS = 100
_TREE = re.compile(r"[0-9a-f]{32}(-[0-9]{1,2})?(\.partial)?")


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What an unpacker answers: the manifest's digest, and the image config's bytes as the image has them."""

    manifest: Digest
    config: bytes


# Verifies every blob while it fills the (empty) folder with the image's file system.
Unpack = Callable[[Path, Path], Unpacked]


@dataclass(frozen=True, slots=True)
class Staged:
    """A tree that is ready to run; as a context, its use, after which others may remove it.

    Attributes:
        root: the unpacked file system.
        config: the image config's ``config`` object (Env, User, …); empty for a plain folder.
        sha256: of the archive file, hex; empty for a folder.
        manifest, config_digest: of the image; empty for a plain folder.
        reused: whether the tree was there already.
        held: what keeps the tree in its place while it is open; None for a plain folder.
    """

    root: Path
    config: Mapping[str, Any]
    sha256: str = ""
    manifest: str = ""
    config_digest: str = ""
    reused: bool = False
    held: BinaryIO | None = field(default=None, compare=False, repr=False)

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_: object) -> None:
        if self.held is not None:
            self.held.close()


def stage(
    source: Path, cache: Path, unpack: Unpack, *, which: Sequence[str] = ("linux/amd64",), needed: int = 0,
    emit: Emit = silent,
) -> Staged:  # fmt: skip
    """The tree of an archive, an OCI layout folder, or (as it stands) an unpacked folder. Idempotent.

    Args:
        which: what ``unpack`` takes of an archive that holds several images.
        needed: bytes that the unpacked tree takes, if known; otherwise the build's record beside the archive is asked,
            and without one the archive's own size.

    Raises:
        SpecError: ``spec.path``: no such file, or a pipe, socket or device.
        FormatError: ``archive.member``: the index of a layout is no file.
        IntegrityError: ``archive.changed``: the file changed while it was staged.
        TransportError: ``io.space`` before anything is written, other ``io.*``.
        OciBuilderError: what ``unpack`` raises; nothing is left then.
    """
    info = _stat(source)
    if is_tree(source):
        return Staged(source.resolve(), {})
    if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
        raise SpecError("spec.path", f"{show(str(source))} is neither a file nor a folder", where=str(source))
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        sha256 = "" if stat.S_ISDIR(info.st_mode) else file_sha256(source, cache, emit)
        content = sha256 or hashlib.sha256(_documents(source)).hexdigest()
        key = hashlib.sha256(dump_json([_FORMAT, content, *which, os.geteuid()])).hexdigest()[:32]
        with alone(_lock(cache / key)):
            folder, found = _place(cache / key, sha256)
            if found is None:
                recorded = unpacked_size(container_record(source, sha256))
                _require_space(cache, needed or recorded or _size(source, info))
                found = _unpack(source, folder, unpack, sha256, emit)
            return replace(found, held=_hold(folder))
    except OSError as error:
        raise _failure(error, source) from None


def is_tree(path: Path) -> bool:
    """Whether a path is a folder that holds a file system, and no layout, whole or half; raises TransportError."""
    return path.is_dir() and not is_layout(path)


def _documents(layout: Path) -> bytes:
    """What says which image a layout is; empty where nothing does, which the unpacker has the words for."""
    name = next((name for name in ("index.json", "manifest.json") if os.path.lexists(layout / name)), None)
    if name is None:
        return b""
    with open(open_member(layout / name, name), "rb") as file:
        return file.read()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise SpecError("spec.path", f"cannot read {show(str(path))}: {error.strerror}", where=str(path)) from None


def _failure(error: OSError, place: Path) -> TransportError:
    where = str(error.filename or place)
    return TransportError(
        disk_code(error), f"staging {show(str(place))}: {error.strerror} at {show(where)}", where=where
    )


def _size(source: Path, info: os.stat_result) -> int:
    if not stat.S_ISDIR(info.st_mode):
        return info.st_size
    return sum(p.stat().st_size for p in source.rglob("*") if p.is_file())


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    # A twentieth on top: blocks are not full, and folders take room.
    wanted = needed + needed // 20
    if free < wanted:
        raise TransportError(
            "io.space", f"{show(str(folder))} has {free} bytes free, the unpacked image takes about {wanted}",
            where=str(folder), expected=f">= {wanted}", actual=free,
        )  # fmt: skip


def _lock(folder: Path) -> Path:
    """What decides about all trees of a folder's key."""
    key, _, _ = folder.name.removesuffix(_PARTIAL).partition("-")
    return folder.with_name(f"{key}.lock")


def _place(first: Path, sha256: str) -> tuple[Path, Staged | None]:
    """Where a key's tree is or can be made, and the tree if it is there and fit. Under the key's lock."""
    twins = (first.with_name(f"{first.name}-{n}") for n in range(1, _MOST_TWINS))
    for folder in (first, *twins):
        found = _reuse(folder, sha256)
        if found or not in_use(folder / _RECORD):
            return folder, found
    raise TransportError("io.busy", f"{_MOST_TWINS} trees of this image are in use, and were changed", where=str(first))


def _hold(folder: Path) -> BinaryIO:
    record = folder / _RECORD
    held = hold(record)
    with suppress(OSError):
        os.utime(record)
    return held


def _reuse(folder: Path, sha256: str) -> Staged | None:
    record = read_record(folder / _RECORD)
    try:
        config = base64.b64decode(str(record.get("config", "")), validate=True)
        if not record or record.get("fingerprint") != fingerprint(folder / _ROOT):
            return None
        return _staged(folder, Unpacked(Digest.parse(record.get("manifest")), config), sha256, reused=True)
    except (OciBuilderError, ValueError):
        return None


def _staged(folder: Path, unpacked: Unpacked, sha256: str, reused: bool) -> Staged:
    document = parse_document(ImageConfig, unpacked.config, "config")
    config = document.config.model_dump(by_alias=True, exclude_none=True, mode="json") if document.config else {}
    return Staged(folder / _ROOT, config, sha256, unpacked.manifest, Digest.of(unpacked.config), reused)


def _unpack(source: Path, folder: Path, unpack: Unpack, sha256: str, emit: Emit) -> Staged:
    before = source.stat()
    discard(folder)
    partial = folder.with_name(folder.name + _PARTIAL)
    discard(partial)
    partial.mkdir(mode=0o700)
    try:
        (partial / _ROOT).mkdir(mode=0o755)
        unpacked = unpack(source, partial / _ROOT)
        require_unchanged(source, before)
        write_record(partial / _RECORD, _record(unpacked, partial / _ROOT))
        staged = _staged(folder, unpacked, sha256, reused=False)
        partial.rename(folder)
    except BaseException:
        discard(partial)
        raise
    emit(Event("note", "stage", message=f"unpacked to {folder / _ROOT}"))
    return staged


def _record(unpacked: Unpacked, root: Path) -> dict[str, Any]:
    config = base64.b64encode(unpacked.config).decode()
    return {"manifest": unpacked.manifest, "config": config, "fingerprint": fingerprint(root)}


def require_unmounted(folder: Path) -> None:
    """Raise TransportError ``io.busy`` where something is mounted at or below a folder."""
    standing = mounts_below(str(folder))
    if standing:
        told = f"{show(standing[-1])} is mounted; nothing below {show(str(folder))} was removed"
        raise TransportError("io.busy", told, where=str(folder))


def discard(folder: Path) -> None:
    """Remove a staged tree; absent is fine. Follows no link and crosses no mount.

    Raises:
        TransportError: ``io.busy``: something is mounted at or below it; nothing was removed.
    """
    if not os.path.lexists(folder):
        return
    require_unmounted(folder)
    try:
        remove_tree(str(folder))
    except RunnerError as error:
        raise TransportError("io.busy", error.message, where=str(folder)) from None


@dataclass(frozen=True, slots=True)
class StagedTree:
    """One tree in a cache, whole or left half unpacked by a run that died.

    Attributes:
        folder: it and its record.
        used: when a run last took it, seconds since 1970; of a half tree, when it was begun.
    """

    folder: Path
    used: float


def staged_trees(cache: Path) -> Iterator[StagedTree]:
    """The trees that ``stage`` has made in a cache; nothing else that lies there."""
    for folder in sorted(cache.glob("*/")) if cache.is_dir() else ():
        if not folder.is_symlink() and _TREE.fullmatch(folder.name):
            record = folder / _RECORD
            with suppress(FileNotFoundError):
                yield StagedTree(folder, _taken_at(record) or folder.lstat().st_ctime)


def _taken_at(record: Path) -> float:
    try:
        return record.stat().st_mtime
    except OSError:  # absent, or another user's
        return 0.0


def staged_in_use(tree: StagedTree) -> bool:
    """Whether somebody runs something in a tree; what cannot be asked is not."""
    with suppress(OSError):
        return in_use(tree.folder / _RECORD)
    return False


def remove_staged(tree: StagedTree) -> bool:
    """Remove a tree unless somebody uses it, or stages the same image just now; says whether it is gone. Idempotent.

    Raises:
        TransportError: ``io.busy``: something is mounted in it.
        OSError: the disk.
    """
    with alone_now(_lock(tree.folder)) as free:
        if not free or in_use(tree.folder / _RECORD):
            return False
        discard(tree.folder)
        return True
