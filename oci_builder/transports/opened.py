"""An archive or layout folder opened in place: the image's layers in order, without a copy of them where that can be.

A plain tar is read by its headers alone, and a layer is a range of it. A compressed archive is one stream: layers that
come in order after the documents (ours do) are passed on as they come, the others are put aside in a scratch file.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from oci_builder.model.errors import FormatError, OciBuilderError, PolicyError, SpecError, show
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.transports.wanted import Parts, WantedImage, WantedLayer, find_image, link_target
from oci_builder.wire.compress import Options, decode_chunks, sniff
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import Kind, TarEntry, TarReader

_LAYOUT = ("oci-layout", "index.json", "manifest.json")
# How often a stream's documents are tried before its end: they may come one by one, each trial parses them all.
_TRIALS = 8

Chunks = Iterator[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to open.

    Attributes:
        platform: which image of an index.
        threads: for a compressed archive.
        scratch: folder for what a compressed archive has out of order.
        read: told the number of bytes of the archive as they are read.
    """

    platform: str = "linux/amd64"
    limits: Limits = DEFAULT_LIMITS
    threads: int = 1
    scratch: Path = Path("/var/tmp")
    read: Callable[[int], None] = lambda _bytes: None


class ImageFile:
    """The image in an archive. Use ``with``.

    Attributes:
        image: what the documents say; set once ``layers`` has given the first layer, or has ended.
        size: bytes of the archive; of a folder, 0.

    Raises (``layers``, and entering):
        SpecError: ``spec.path``.
        FormatError, PolicyError, IntegrityError: as ``find_image`` and the tar reader; ``archive.duplicate``,
            ``archive.member``, ``limit.members``.
        OSError: from the disk.
    """

    def __init__(self, path: Path, options: OpenOptions | None = None) -> None:
        self.path = path
        self.options = options or OpenOptions()
        self.image: WantedImage | None = None
        self.size = 0
        self._parts = Parts(path.name)
        self._files = ExitStack()

    def __enter__(self) -> ImageFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def layers(self) -> Iterator[tuple[WantedLayer, Chunks]]:
        """Each layer with its blob's bytes, not verified. Read one to its end before asking for the next."""
        if self.path.is_dir():
            self._read_folder()
        elif not self.path.exists():
            raise SpecError("spec.path", f"no such archive: {show(str(self.path))}", where=str(self.path))
        else:
            source = self._open(self.path, 0)
            self.size = source.size
            compression = sniff(source.pread(8, 0))
            if compression != "identity":
                how = Options(self.options.limits, self.path.name, self.options.threads)
                yield from _Stream(self, decode_chunks(self._counted(source.chunks()), compression, how)).layers()
                return
            self._read_tar(source)
        image = self.found()
        for layer in image.layers:
            yield layer, self._counted(self._parts.get(layer.name).chunks())

    def found(self) -> WantedImage:
        """What the documents say, now that all are there."""
        self.image = find_image(self._parts, self.options.platform, self.options.limits)
        return self.image

    def _counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.options.read(len(chunk))
            yield chunk

    def _open(self, path: Path, flags: int) -> FileRange:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
        self._files.callback(os.close, fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("archive.member", f"{show(str(path))} is not a file", where=str(path))
        return FileRange(fd, 0, status.st_size)

    def _read_folder(self) -> None:
        blobs = self.path / "blobs" / "sha256"
        names = [blobs / name for name in sorted(os.listdir(blobs))] if blobs.is_dir() else []
        for file in [self.path / name for name in _LAYOUT if os.path.lexists(self.path / name)] + names:
            if file.is_symlink():
                raise FormatError(
                    "archive.member", f"{show(str(file))} is a symbolic link; a layout's files are files",
                    where=str(file),
                )  # fmt: skip
            self._parts.ranges[file.relative_to(self.path).as_posix()] = self._open(file, os.O_NOFOLLOW)

    def _read_tar(self, source: FileRange) -> None:
        reader = TarReader(source, limits=self.options.limits, where=self.path.name)
        for entry in reader:
            name = self.admit(entry, reader)
            if name:
                self._parts.ranges[name] = FileRange(source.fd, reader.tar_size, entry.size)

    def admit(self, entry: TarEntry, reader: TarReader) -> str:
        """Check a member; its name when it is a file, else empty."""
        parts = self._parts
        name = entry.name.decode("utf-8", "backslashreplace")
        if entry.kind is Kind.DIR:
            return ""
        if name in parts.ranges or name in parts.links:
            raise FormatError("archive.duplicate", f"{parts.where}: {show(name)} stands twice", where=parts.where)
        if len(parts.ranges) + len(parts.links) >= self.options.limits.archive_members:
            raise PolicyError(
                "limit.members", f"{parts.where}: over {self.options.limits.archive_members} members", where=parts.where
            )
        if entry.kind is Kind.SYMLINK:
            parts.links[name] = link_target(name, entry.link)
            return ""
        if entry.kind is not Kind.FILE or reader.sparse:
            what = "sparse" if reader.sparse else f"a {entry.kind}"
            raise FormatError("archive.member", f"{parts.where}: {show(name)} is {what}", where=parts.where)
        return name


class _Stream:
    """A compressed archive: its members as they come."""

    def __init__(self, file: ImageFile, chunks: Chunks) -> None:
        self._file = file
        self._parts = file._parts
        self._reader = TarReader(chunks, limits=file.options.limits, where=file.path.name)
        self._spool = file._files.enter_context(tempfile.TemporaryFile(dir=file.options.scratch, buffering=0))
        self._spooled = 0
        self._trials = _TRIALS
        self._waiting: list[WantedLayer] = []

    def layers(self) -> Iterator[tuple[WantedLayer, Chunks]]:
        for entry in self._reader:
            name = self._file.admit(entry, self._reader)
            if not name:
                continue
            self._try()
            if self._is_next(name):
                # Its place is taken, so that a second member of the name is a duplicate.
                self._parts.ranges[name] = FileRange(self._spool.fileno(), 0, 0)
                yield self._waiting.pop(0), self._reader.data()
            else:
                self._put_aside(name)
            yield from self._ready()
        if self._file.image is None:
            self._waiting = list(self._file.found().layers)
        while self._waiting:
            layer = self._waiting.pop(0)
            yield layer, self._parts.get(layer.name).chunks()

    def _try(self) -> None:
        """Find out about the image before the archive's end, if all its documents are there."""
        if self._file.image is None and self._trials and {"index.json", "oci-layout"} <= self._parts.ranges.keys():
            self._trials -= 1
            try:
                self._waiting = list(self._file.found().layers)
            except OciBuilderError:
                return

    def _is_next(self, name: str) -> bool:
        names = [layer.name for layer in self._waiting]
        return names[:1] == [name] and names.count(name) == 1

    def _ready(self) -> Iterator[tuple[WantedLayer, Chunks]]:
        while self._waiting and self._parts.real(self._waiting[0].name) in self._parts.ranges:
            layer = self._waiting.pop(0)
            yield layer, self._parts.get(layer.name).chunks()

    def _put_aside(self, name: str) -> None:
        start = self._spooled
        for part in self._reader.data():
            view = memoryview(part)
            while len(view):
                view = view[self._spool.write(view) :]
            self._spooled += len(part)
        self._parts.ranges[name] = FileRange(self._spool.fileno(), start, self._spooled - start)
