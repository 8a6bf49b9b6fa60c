"""Every file of an image archive, a layout, a portable archive or a folder, one after the other, in one pass.

What an archive claims is proved on the way: a layer that a visitor saw is the layer that the manifest names.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from oci_builder.judge.path import is_layout, is_member_name, layout_members, open_member
from oci_builder.model.digest import Digest
from oci_builder.model.errors import FormatError, IntegrityError, SpecError, disk_error, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.transports.opened import ImageFile
from oci_builder.transports.opened_members import OpenOptions
from oci_builder.transports.wanted import WantedImage, WantedLayer
from oci_builder.wire.compress import Options, decode_chunks, sniff
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import Kind, TarEntry, TarReader
from oci_builder.wire.verified import VerifiedReader

Data = Callable[[], Iterable[bytes | memoryview]]
# A member, its content, and its extended headers as they stand there.
Listed = tuple[TarEntry, Iterable[bytes | memoryview], bytes]
# Called with an entry, its content (read at once or never), and the layer it stands in.
Visit = Callable[[TarEntry, Data, str], None]

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Walk:
    """How to walk.

    Attributes:
        platform: which image of an index.
        threads: for decompression.
        image: name or digest of the one that is meant, where there are several.
        seen: diff_ids of layers that need no second visit; those that were visited are added.
    """

    platform: str = "linux/amd64"
    limits: Limits = DEFAULT_LIMITS
    threads: int = 2
    emit: Emit = silent
    seen: set[Digest] = field(default_factory=set)
    image: str = ""


def walk(subject: Path, visit: Visit, how: Walk) -> WantedImage | None:
    """Visit every entry of every layer, lowest layer first; of a tar or folder, every entry.

    Returns: the image, or None for what is no image.

    Raises:
        SpecError: ``spec.path``. FormatError, PolicyError: what is wrong with the archive.
        IntegrityError: ``blob.*``, ``layer.diff_id``. TransportError: ``io.*``.
    """
    try:
        if subject.is_dir():
            if is_image(subject, how):
                return _image(subject, visit, how)
            _folder(subject, visit, how)
            return None
        if not subject.is_file():
            raise SpecError("spec.path", f"{show(str(subject))} is neither an archive nor a folder", where=str(subject))
        if is_image(subject, how):
            return _image(subject, visit, how)
        _tar(subject, visit, how)
        return None
    except OSError as error:
        raise disk_error(error, f"reading {subject.name}") from None


def is_image(subject: Path, how: Walk) -> bool:
    """Whether a folder is a layout, or a tar (compressed or not) begins with a member of an image archive.

    Raises:
        FormatError, PolicyError: it is no tar.
        OSError: from the disk.
    """
    if not subject.is_file():
        return is_layout(subject)
    with open(subject, "rb", buffering=0) as file:
        reader = _reader(FileRange(file.fileno(), 0, os.fstat(file.fileno()).st_size), subject.name, how)
        first = next((entry.name for entry in reader if entry.name), b"")
    return is_member_name(first)


def _reader(source: FileRange, where: str, how: Walk, task: str = "") -> TarReader:
    # One stream may hold a whole image: its bound is the image's, not one layer's.
    limits = replace(how.limits, layer_size=how.limits.image_size, entry_size=how.limits.image_size)
    read = _telling(source.chunks(), how.emit, task) if task else source.chunks()
    chunks = decode_chunks(read, sniff(source.pread(8, 0)), Options(limits, where, how.threads))
    return TarReader(chunks, limits=limits, where=where)


def _telling(chunks: Iterable[bytes], emit: Emit, task: str) -> Iterator[bytes]:
    for chunk in chunks:
        emit(Event("advance", task, len(chunk)))
        yield chunk


def _tar(subject: Path, visit: Visit, how: Walk) -> None:
    with open(subject, "rb", buffering=0) as file:
        source = FileRange(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        reader = _reader(source, subject.name, how)
        for entry in reader:
            visit(entry, reader.data, subject.name)


def members(subject: Path, how: Walk) -> Iterator[Listed]:
    """Every member of a tar (compressed or not) or layout with its content, in the order of its bytes.

    Raises:
        FormatError, PolicyError: of the archive around the members. OSError: from the disk.
    """
    task = f"read {subject.name}"
    how.emit(Event("start", task, total=subject.stat().st_size if subject.is_file() else 0))
    yield from _layout_files(subject, how) if subject.is_dir() else _tar_members(subject, how, task)
    how.emit(Event("done", task))


def _layout_files(subject: Path, how: Walk) -> Iterator[Listed]:
    for name in layout_members(subject, how.limits)[0]:
        fd = open_member(subject / name, name)
        try:
            size = os.fstat(fd).st_size
            yield TarEntry(os.fsencode(name), Kind.FILE, size), FileRange(fd, 0, size).chunks(), b""
        finally:
            os.close(fd)


def _tar_members(subject: Path, how: Walk, task: str) -> Iterator[Listed]:
    with open(subject, "rb", buffering=0) as file:
        reader = _reader(FileRange(file.fileno(), 0, os.fstat(file.fileno()).st_size), subject.name, how, task)
        for entry in reader:
            yield entry, reader.data(), reader.extended


def _folder(subject: Path, visit: Visit, how: Walk) -> None:
    """Files and links below a folder, in order, on its own file system only; other things hold no content."""
    root = os.fsencode(subject)
    device, start = os.stat(root).st_dev, len(os.path.join(root, b""))
    kinds = {stat.S_IFREG: Kind.FILE, stat.S_IFLNK: Kind.SYMLINK, stat.S_IFDIR: Kind.DIR}
    for parent, folders, files in os.walk(root, onerror=_raise):
        folders.sort()
        for name in sorted([*folders, *files]):
            place = os.path.join(parent, name)
            info = _status(place)
            if info is None:
                continue
            kind = kinds.get(stat.S_IFMT(info.st_mode))
            if kind is None or info.st_dev != device:
                continue
            size = info.st_size if kind is Kind.FILE else 0
            visit(TarEntry(place[start:], kind, size), partial(_content, place), subject.name)
        folders[:] = [f for f in folders if (i := _status(os.path.join(parent, f))) and i.st_dev == device]


def _status(place: bytes) -> os.stat_result | None:
    """None for what went away meanwhile: the tree may be a living one."""
    try:
        return os.lstat(place)
    except FileNotFoundError:
        return None


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _content(place: bytes) -> Iterator[bytes]:
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        while data := os.read(fd, _BLOCK):
            yield data
    finally:
        os.close(fd)


def _image(subject: Path, visit: Visit, how: Walk) -> WantedImage:
    task = f"read {subject.name}"
    total = subject.stat().st_size if subject.is_file() else 0
    options = OpenOptions(
        how.platform, how.limits, how.threads, read=lambda n: how.emit(Event("advance", task, n)),
        image=how.image,
    )  # fmt: skip
    how.emit(Event("start", task, total=total))
    with ImageFile(subject, options) as file:
        for number, (layer, chunks) in enumerate(file.layers()):
            _layer(layer, chunks, visit, how, f"{subject.name}: layer {number + 1}")
        image = file.image or file.found()
    how.emit(Event("done", task))
    return image


def _layer(
    layer: WantedLayer, chunks: Iterable[bytes | memoryview], visit: Visit, how: Walk, where: str
) -> None:  # fmt: skip
    known = layer.diff_id in how.seen
    stream = iter(chunks)
    head = next(stream, b"")
    compression = sniff(head)
    if layer.compression not in (None, compression):
        raise FormatError(
            "media.mismatch", f"{where}: declared as {layer.compression}, the bytes are {compression}", where=where,
            expected=layer.compression, actual=compression,
        )  # fmt: skip
    blob: Iterable[bytes | memoryview] = chain([head], stream)
    if layer.digest is not None and layer.size is not None:
        blob = VerifiedReader(blob, layer.digest, layer.size, where)
    hashed = hashlib.sha256()
    plain = hashing(decode_chunks(iter(blob), compression, Options(how.limits, where, how.threads)), hashed)
    if known:
        for _ in plain:
            pass
    else:
        reader = TarReader(plain, limits=how.limits, where=where)
        for entry in reader:
            visit(entry, reader.data, where)
    for _ in blob:
        pass
    actual = Digest.from_hex(hashed.hexdigest())
    if actual != layer.diff_id:
        raise IntegrityError(
            "layer.diff_id", f"{where}: its tar hashes to {actual}, the config says {layer.diff_id}", where=where,
            expected=layer.diff_id, actual=actual,
        )  # fmt: skip
    how.seen.add(layer.diff_id)


def hashing(chunks: Iterable[bytes | memoryview], into: Any) -> Iterator[bytes | memoryview]:
    """The chunks as they are; ``into`` (of ``hashlib``) takes each."""
    for chunk in chunks:
        into.update(chunk)
        yield chunk


__all__ = ["Data", "Visit", "Walk", "hashing", "is_image", "members", "walk"]
