"""Staging: the unpacked tree of an image, on local disk, used again only while nothing has touched it.

A staged tree lies in ``CACHE/<key>/rootfs`` with a record beside it. The key is the content that was asked for (the
archive's SHA-256, or the bytes of a layout's index.json) and all that changes how it is unpacked. The record holds the
tree's fingerprint, taken when it was unpacked; a tree with another one is removed and unpacked again.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chroot_exec.errors import RunnerError
from chroot_exec.teardown import remove_tree
from oci_builder.execution.companions import container_record, unpacked_size
from oci_builder.execution.hashes import file_sha256, read_record, require_unchanged, write_record
from oci_builder.model.digest import Digest
from oci_builder.model.documents import ImageConfig, parse_document
from oci_builder.model.errors import OciBuilderError, SpecError, TransportError, disk_code, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.jsontext import dump_json
from oci_builder.rootfs.scan_fingerprint import fingerprint

# Part of every key: a change in how trees are unpacked makes old ones unfit.
_FORMAT = 1
_RECORD = "staged.json"
_ROOT = "rootfs"


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What an unpacker answers: the manifest's digest, and the image config's bytes as the image has them."""

    manifest: Digest
    config: bytes


# Verifies every blob while it fills the (empty) folder with the image's file system.
Unpack = Callable[[Path, Path], Unpacked]


@dataclass(frozen=True, slots=True)
class Staged:
    """A tree that is ready to run.

    Attributes:
        root: the unpacked file system.
        config: the image config's ``config`` object (Env, User, …); empty for a plain folder.
        sha256: of the archive file, hex; empty for a folder.
        manifest, config_digest: of the image; empty for a plain folder.
        reused: whether the tree was there already.
    """

    root: Path
    config: Mapping[str, Any]
    sha256: str = ""
    manifest: str = ""
    config_digest: str = ""
    reused: bool = False


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
        content = sha256 or hashlib.sha256((source / "index.json").read_bytes()).hexdigest()
        key = hashlib.sha256(dump_json([_FORMAT, content, *which, os.geteuid()])).hexdigest()[:32]
        with _locked(cache / f"{key}.lock"):
            found = _reuse(cache / key, sha256)
            if found:
                return found
            recorded = unpacked_size(container_record(source, sha256))
            _require_space(cache, needed or recorded or _size(source, info))
            return _unpack(source, cache / key, unpack, sha256, emit)
    except OSError as error:
        raise _failure(error, source) from None


def is_tree(path: Path) -> bool:
    """Whether a path is a folder that holds a file system, and no OCI layout."""
    names = ("oci-layout", "blobs")
    return path.is_dir() and not ((path / "index.json").is_file() and any((path / n).exists() for n in names))


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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
    partial = folder.with_name(folder.name + ".partial")
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


def discard(folder: Path) -> None:
    """Remove a staged tree; absent is fine. Follows no link and crosses no mount.

    Raises:
        TransportError: ``io.busy``: something is mounted at or below it; nothing was removed.
    """
    if not os.path.lexists(folder):
        return
    try:
        remove_tree(str(folder))
    except RunnerError as error:
        raise TransportError("io.busy", error.message, where=str(folder)) from None
