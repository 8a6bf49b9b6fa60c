"""What was seen of an archive's members, and the image that its documents say these are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from oci_builder.judge.contents import MOST_KEPT, Member, link_target
from oci_builder.judge.options import JudgeOptions
from oci_builder.judge.path import tree_hint
from oci_builder.judge.survey import sight, sight_layer, survey
from oci_builder.model.errors import FormatError, PolicyError, show
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.report import Finding
from oci_builder.transports.wanted import Parts, WantedImage, wanted_image
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import Kind, TarEntry

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


class OpenedMembers:
    """The members of one archive, as they are found.

    Attributes:
        image: what the documents say. Known before the first layer, save of a compressed archive: then when its layers
            have ended, and nothing is to be believed before.
        warnings: what is unusual in the documents, as ``verify`` would say.
        size: bytes of the archive; of a folder, 0.
        members: what was seen, for the judge, by name.
        parts: the members' places.
        files: what is open as long as the archive is.
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

    def found(self) -> WantedImage:
        """What the documents say, now that all members are known.

        Raises:
            FormatError, PolicyError, IntegrityError: what ``verify`` would find in the documents.
            SpecError: ``spec.image``, ``spec.digest``.
        """
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
        """Take a warning of the archive's own tar: what stands between members may not be anything.

        Raises:
            FormatError: ``tar.padding``.
        """
        if code == "tar.padding":
            raise FormatError(code, message, where=self.path.name)

    def admit(self, entry: TarEntry, *, sparse: bool) -> str:
        """Check a member; its name when it is a file, else empty.

        Raises:
            FormatError: ``archive.duplicate``, ``archive.member``.
            PolicyError: ``limit.members``.
        """
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
