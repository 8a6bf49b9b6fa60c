"""An archive or layout folder opened in place: the image's layers in order, without a copy of them where that can be.

A plain tar is read by its headers alone, and a layer is a range of it. A compressed archive is one stream: layers that
come in order after the documents (ours do) are passed on as they come, the others are put aside in a scratch file.
Either way the judge of archives says what the image is; nothing here believes a document.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from oci_builder.judge.path import is_folder, layout_members, open_member
from oci_builder.model.errors import read_error
from oci_builder.transports.opened_members import OpenedMembers
from oci_builder.transports.opened_stream import Stream
from oci_builder.transports.wanted import Chunks, WantedLayer
from oci_builder.wire.compress import Options, decode_chunks, sniff
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import TarReader


class ImageFile(OpenedMembers):
    """The image in an archive. Use ``with``.

    Raises (``layers`` and ``open``):
        SpecError: ``spec.path``, ``spec.image``, ``spec.digest``.
        FormatError, PolicyError, IntegrityError: what ``verify`` would find in the documents; of the archive's own tar
            and compression; ``archive.duplicate``, ``archive.member``, ``limit.members``, ``platform.ambiguous``.
        OSError: from the disk.
    """

    def __enter__(self) -> ImageFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()

    def layers(self) -> Iterator[tuple[WantedLayer, Chunks]]:
        """Each layer with its blob's bytes, not verified. Read one to its end before asking for the next."""
        source = self.open()
        if source is not None:
            yield from Stream(self, self._decoded(source)).layers()
            return
        for layer in self.found().layers:
            yield layer, self._counted(self.parts.get(layer.name).chunks())

    def open(self) -> FileRange | None:
        """Find the members of a folder or plain tar; a compressed one is only opened and given back."""
        if is_folder(self.path):
            self._read_folder()
            return None
        try:
            source = self._keep(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except PermissionError as error:
            # Said here: whoever opened us may be writing too, and would think that this is about that.
            raise read_error(error, f"reading {self.path.name}") from None
        self.size = source.size
        if sniff(source.pread(8, 0)) != "identity":
            return source
        self._read_tar(source)
        return None

    def _decoded(self, source: FileRange) -> Chunks:
        how = Options(self.options.limits, self.path.name, self.options.threads, bound="image_size")
        return decode_chunks(self._counted(source.chunks()), sniff(source.pread(8, 0)), how)

    def _counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.options.read(len(chunk))
            yield chunk

    def _keep(self, fd: int) -> FileRange:
        self.files.callback(os.close, fd)
        return FileRange(fd, 0, os.fstat(fd).st_size)

    def _read_folder(self) -> None:
        for name in layout_members(self.path, self.options.limits)[0]:
            self.note(name, self._keep(open_member(self.path / name, name)))

    def _read_tar(self, source: FileRange) -> None:
        reader = TarReader(source, limits=self.options.limits, where=self.path.name, warn=self.unusual)
        for entry in reader:
            name = self.admit(entry, sparse=reader.sparse)
            if name:
                self.note(name, FileRange(source.fd, reader.tar_size, entry.size))
