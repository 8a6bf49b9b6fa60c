"""From bytes to a ``Delta``: one pass over a layer's tar, or over a folder on disk.

A file is read into memory up to ``IN_MEMORY``. A bigger one from a stream is copied to one unlinked scratch file, one
at a time, because an ELF file's section headers stand at its end: bounded memory, and no tree on disk.
"""

from __future__ import annotations

import os
import posixpath
import stat
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from oci_builder.model.errors import OciBuilderError, SpecError, TransportError, disk_error
from oci_builder.model.events import Emit, Event, silent
from oci_builder.payload.fatbin import MemorySource
from oci_builder.payload.readiness.facts import FileFacts, wanted, wants_path
from oci_builder.payload.readiness.tree import Delta, Node
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import Kind, TarEntry, TarReader

IN_MEMORY = 8 << 20
_BATCH = 256
_HEAD = 8
_KINDS = {Kind.FILE: "file", Kind.DIR: "dir", Kind.SYMLINK: "link"}


def tree_delta(reader: TarReader) -> Delta:
    """Read the tar of a layer, or of a whole tree, to its end.

    Raises:
        FormatError, PolicyError: as ``TarReader``.
        TransportError: ``io.space``, ``io.error`` of the scratch file.
    """
    delta = Delta()
    with Scratch() as scratch:
        for entry in reader:
            take(delta, entry, reader, scratch)
    return delta


def take(delta: Delta, entry: TarEntry, reader: TarReader, scratch: Scratch) -> None:
    """Add the reader's current entry."""
    if entry.kind == Kind.HARDLINK:
        delta.add_link(entry.name, entry.link)
    elif entry.name:
        facts = entry_facts(entry, reader, scratch) if entry.kind == Kind.FILE else None
        delta.add(entry.name, _node(entry, facts))


def _node(entry: TarEntry, facts: FileFacts | None) -> Node:
    link = entry.link if entry.kind == Kind.SYMLINK else b""
    return Node(_KINDS.get(entry.kind, "other"), entry.mode, entry.size, link, facts)


def entry_facts(entry: TarEntry, reader: TarReader, scratch: Scratch) -> FileFacts | None:
    """Facts of the reader's current entry, which is a file; reads no more of it than needed."""
    if not entry.size:
        return None
    data = reader.data()
    first = next(data, memoryview(b""))
    while len(first) < min(_HEAD, entry.size) and (more := next(data, None)):
        first = memoryview(bytes(first) + bytes(more))
    read = wanted(entry.name, bytes(first[:_HEAD]))
    if read is None:
        return None
    if entry.size <= IN_MEMORY:
        return read(entry.name, MemorySource(b"".join([first, *data])))
    return read(entry.name, scratch.fill(first, data, entry.size))


class Scratch:
    """One unlinked temporary file, made when first needed and used again for each big file."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def fill(self, first: memoryview, rest: Iterable[bytes | memoryview], size: int) -> FileRange:
        """Replace the content by ``first`` and ``rest``, ``size`` bytes together.

        Raises:
            TransportError: ``io.space``, ``io.error``; the stream's own errors pass through.
        """
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="oci-builder-readiness-", buffering=0)
            self._file.seek(0)
            for piece in chain([first], rest):
                _write_all(self._file, piece)
            self._file.truncate()
            return FileRange(self._file.fileno(), 0, size)
        except OSError as error:
            raise disk_error(error, f"unpacking a file into {tempfile.gettempdir()}") from None


def _write_all(file: BinaryIO, piece: bytes | memoryview) -> None:
    view = memoryview(piece)
    while view:
        view = view[file.write(view) :]


def io_error(error: OSError, where: str) -> OciBuilderError:
    """The error for a file or folder that cannot be read."""
    return TransportError("io.error", f"{where}: {error.strerror or error}", where=where)


def folder_delta(root: Path, *, threads: int = 1, emit: Emit = silent) -> Delta:
    """Read a folder as one layer; nothing outside it is followed, nothing but regular files is opened.

    Raises:
        SpecError: ``spec.path`` when ``root`` is no folder.
        TransportError: ``io.*`` when a file of interest cannot be read.
    """
    if not root.is_dir():
        raise SpecError("spec.path", f"{root} is no folder", where=str(root))
    delta = Delta()
    base = os.fsencode(root)
    emit(Event("start", f"read {root}", unit="B"))
    entries = _walk(base)
    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        # In batches, because a pool's map makes a task of every entry at once.
        while batch := list(islice(entries, _BATCH)):
            for path, node in pool.map(lambda e: _folder_node(base, *e), batch):
                delta.nodes[path] = node
            emit(Event("advance", f"read {root}", amount=sum(info.st_size for _, info in batch)))
    emit(Event("done", f"read {root}"))
    return delta


def _walk(root: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    stack = [b""]
    while stack:
        folder = stack.pop()
        try:
            with os.scandir(posixpath.join(root, folder)) as found:
                for item in sorted(found, key=lambda i: i.name):
                    path = posixpath.join(folder, item.name)
                    yield path, item.stat(follow_symlinks=False)
                    if item.is_dir(follow_symlinks=False):
                        stack.append(path)
        except OSError as error:
            raise io_error(error, os.fsdecode(posixpath.join(root, folder))) from None


def _folder_node(root: bytes, path: bytes, info: os.stat_result) -> tuple[bytes, Node]:
    full = posixpath.join(root, path)
    mode = stat.S_IMODE(info.st_mode)
    try:
        if stat.S_ISLNK(info.st_mode):
            return path, Node("link", mode, link=os.readlink(full))
        if stat.S_ISDIR(info.st_mode):
            return path, Node("dir", mode)
        if not stat.S_ISREG(info.st_mode):
            return path, Node("other", mode)
        return path, Node("file", mode, info.st_size, facts=_file_facts(full, path, info.st_size))
    except OSError as error:
        raise io_error(error, os.fsdecode(full)) from None


def _file_facts(full: bytes, path: bytes, size: int) -> FileFacts | None:
    # Sources and data are most of an environment's files: their names tell, and they are never opened.
    if path.endswith((b".py", b".pyc", b".json", b".h", b".cuh", b".hpp", b".txt")) and not wants_path(path):
        return None
    fd = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        head = os.pread(fd, _HEAD, 0)
        read = wanted(path, head)
        if read is None:
            return None
        if size <= IN_MEMORY:
            return read(path, MemorySource(os.pread(fd, size, 0)))
        return read(path, FileRange(fd, 0, size))
    finally:
        os.close(fd)
