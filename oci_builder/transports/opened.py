"""An archive or layout folder opened in place: the image's layers in order, without a copy of them where that can be.

A plain tar is read by its headers alone, and a layer is a range of it. A compressed archive is one stream: layers that
come in order after the documents (ours do) are passed on as they come, the others are put aside in a scratch file.
Either way the judge of archives says what the image is; nothing here believes a document.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from oci_builder.judge.contents import MOST_KEPT, Member, link_target
from oci_builder.judge.options import JudgeOptions
from oci_builder.judge.path import is_folder, layout_members, open_member, tree_hint
from oci_builder.judge.survey import sight, sight_layer, survey
from oci_builder.model.errors import FormatError, PolicyError, read_error, show
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.report import Finding
from oci_builder.transports.opened_stream import Stream
from oci_builder.transports.wanted import Chunks, Parts, WantedImage, WantedLayer, wanted_image
from oci_builder.wire.compress import Options, decode_chunks, sniff
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import Kind, TarEntry, TarReader

_OF_DOCUMENTS = ("archive.", "config.", "media.", "platform.")


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to open.

    Attributes:
        platform: which image of an index.
        threads: for a compressed archive.
        scratch: folder for what a compressed archive has out of order.
        read: told the number of bytes of the archive as they are read.
        image: name or digest of the one that is meant, where there are several.
    """

    platform: str = "linux/amd64"
    limits: Limits = DEFAULT_LIMITS
    threads: int = 1
    scratch: Path = Path("/var/tmp")
    read: Callable[[int], None] = lambda _bytes: None
    image: str = ""


class ImageFile:
    """The image in an archive. Use ``with``.

    Attributes:
        image: what the documents say. Known before the first layer, save of a compressed archive: then when ``layers``
            has ended, and nothing is to be believed before.
        warnings: what is unusual in the documents, as ``verify`` would say.
        size: bytes of the archive; of a folder, 0.
        members: what was seen, for the judge, by name.
        parts: the members' places.

    Raises (``layers`` and ``open``):
        SpecError: ``spec.path``, ``spec.image``, ``spec.digest``.
        FormatError, PolicyError, IntegrityError: what ``verify`` would find in the documents; of the archive's own tar
            and compression; ``archive.duplicate``, ``archive.member``, ``limit.members``, ``platform.ambiguous``.
        OSError: from the disk.
    """

    def __init__(self, path: Path, options: OpenOptions | None = None) -> None:
        self.path = path
        self.options = options or OpenOptions()
        self.image: WantedImage | None = None
        self.warnings: tuple[Finding, ...] = ()
        self.size = 0
        self.parts = Parts(path.name)
        self.members: dict[str, Member] = {}
        self.files = ExitStack()
        self._kept = 0
        self._judging = JudgeOptions(
            platform=self.options.platform, image=self.options.image, limits=self.options.limits, threads=1
        )

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

    def found(self) -> WantedImage:
        """What the documents say, now that all members are known."""
        judged, findings = survey(self.path, self.members, self.parts.links, self._judging)
        # Whoever reads the layers hears of what is unusual in them.
        self.warnings = tuple(
            finding
            for finding in findings.found
            if finding.severity == "warning" and finding.code.startswith(_OF_DOCUMENTS)
        )
        self.image = wanted_image(judged)
        return self.image

    def note(self, name: str, place: FileRange) -> None:
        """Take a member and where it lies."""
        self.parts.ranges[name] = place
        read = place.pread
        if self._kept + place.size > MOST_KEPT:
            self.members[name] = sight_layer(name, place.size, read(64, 0))
            return
        seen = self.members[name] = sight(name, place.size, read(64, 0), lambda: read(place.size, 0), self._judging)
        self._kept += len(seen.data or b"")

    def unusual(self, code: str, message: str) -> None:
        """Take a warning of the archive's own tar: what stands between members may not be anything."""
        if code == "tar.padding":
            raise FormatError(code, message, where=self.path.name)

    def admit(self, entry: TarEntry, *, sparse: bool) -> str:
        """Check a member; its name when it is a file, else empty."""
        parts = self.parts
        name = entry.name.decode("utf-8", "surrogateescape")
        if name in parts.ranges or name in parts.links or (entry.kind is not Kind.DIR and name in parts.folders):
            raise FormatError("archive.duplicate", f"{parts.where}: {show(entry.name)} stands twice", where=parts.where)
        if entry.kind is Kind.DIR:
            parts.folders.add(name)
            return ""
        if len(parts.ranges) >= self.options.limits.archive_members:
            raise PolicyError(
                "limit.members", f"{parts.where}: over {self.options.limits.archive_members} members", where=parts.where
            )
        if entry.kind is Kind.SYMLINK:
            parts.links[name] = link_target(name, entry.link)
            return ""
        if entry.kind is not Kind.FILE or sparse:
            what = "sparse" if sparse else f"a {entry.kind}{tree_hint(name)}"
            raise FormatError("archive.member", f"{parts.where}: {show(entry.name)} is {what}", where=parts.where)
        return name

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
