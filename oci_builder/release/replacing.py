"""The last part of a repack: the new build takes the old one's place, in the output folder and in the release folder.

It is many renames. What they are to be is written down first, with the signed receipt, so that a run that was killed
in between is finished by the next one; every step may be done twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from oci_builder.model.errors import ConflictError, show
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.model.receipts import PORTABLE, Closed, Sha256, ShortText, Time, parse_closed
from oci_builder.release.files import create_exclusively, io_error, read_file
from oci_builder.release.folder import SUPERSEDED, ReleaseFolder, pretty

STAGING, BUILD = ".repack-", "build"  # .DIST.repack-XXXX/build is the new build until it has its place
RECORDS = ("portable.json", "container.json")


class Journal(Closed):
    """What is to replace what: sha256 of the portable archives, what holds the new build, and the signed receipt."""

    old: Sha256
    new: Sha256
    staging: ShortText
    at: Time
    name: ShortText
    envelope: str


@dataclass(frozen=True, slots=True)
class Replacing:
    """A replacement that is under way.

    Attributes:
        dist: the output folder.
        folder: the release folder.
        journal: what is to be done.
    """

    dist: Path
    folder: ReleaseFolder
    journal: Journal

    @property
    def previous(self) -> Path:
        """Where the old build is kept."""
        return self.dist.with_name(f"{self.dist.name}.{self.journal.old[:12]}")

    @property
    def superseded(self) -> ReleaseFolder:
        """Where the old records are kept."""
        return ReleaseFolder(self.folder.root / "superseded" / self.journal.old[:12])

    @property
    def receipt(self) -> Path:
        """The receipt of the repack."""
        return self.folder.receipts / self.journal.name

    def begin(self) -> None:
        """Write the journal.

        Raises:
            ConflictError: ``repack.busy``: another repack of this folder is under way; ``release.exists``: the place
                where the old build is to be kept is taken.
            TransportError: ``io.*``.
        """
        if self.previous.exists() or self.previous.is_symlink():
            raise ConflictError(
                "release.exists", f"{show(str(self.previous))} exists; move it away", where=str(self.previous)
            )
        data = pretty(self.journal.model_dump(mode="json"))
        create_exclusively(_journal(self.dist), data, code="repack.busy")

    def finish(self, after: Callable[[], None]) -> None:
        """Do what the journal says, from wherever it was left; ``after`` runs once the new records are there.

        Raises:
            TransportError: ``io.*``: the builds are as before where the records could not be moved. What ``after``
                raises: the next run goes on there.
        """
        try:
            self._builds()
            try:
                self._records()
            except BaseException:
                self._back()
                raise
            self.folder.create()
        except OSError as error:
            raise io_error(error, self.dist) from None
        for name in RECORDS:
            _add(self.folder.root / name, read_file(self.dist / name, DEFAULT_LIMITS.document))
        _add(self.receipt, self.journal.envelope.encode())
        after()

    def end(self) -> None:
        """The journal has been done."""
        try:
            staging = self.dist.with_name(self.journal.staging)
            if staging.is_dir() and not any(staging.iterdir()):
                staging.rmdir()
            _journal(self.dist).unlink(missing_ok=True)
        except OSError as error:
            raise io_error(error, self.dist) from None

    def _builds(self) -> None:
        staging = self.dist.with_name(self.journal.staging) / BUILD
        if not staging.is_dir():
            return  # it is in its place already
        if self.dist.exists():
            self.dist.rename(self.previous)
        try:
            staging.rename(self.dist)
        except OSError:
            self.previous.rename(self.dist)
            self.end()
            raise

    def _back(self) -> None:
        """Builds and records must tell of the same archives."""
        if self.folder.root.is_dir() and self.folder.subjects()[PORTABLE] == self.journal.old:
            self.dist.rename(self.dist.with_name(self.journal.staging) / BUILD)
            self.previous.rename(self.dist)
            (self.folder.root / SUPERSEDED).unlink(missing_ok=True)
            if (self._fresh / "superseded").is_dir():
                (self._fresh / "superseded").rename(self.folder.root / "superseded")
            self.end()

    @property
    def _fresh(self) -> Path:
        return self.folder.root.with_name(f".{self.folder.root.name}.{self.journal.new[:12]}")

    def _records(self) -> None:
        """Move the release folder's content under ``superseded/<digest>``, say by what, and begin anew."""
        root, fresh = self.folder.root, self._fresh
        if root.is_dir() and self.superseded.root.exists():
            return
        if root.is_dir():
            value = {"by": self.journal.new, "at": self.journal.at, "why": "repack"}
            _add(root / SUPERSEDED, pretty(value))
            fresh.mkdir(exist_ok=True)
            kept = fresh / "superseded"
            if (root / "superseded").is_dir() and not kept.exists():
                (root / "superseded").rename(kept)
            kept.mkdir(exist_ok=True)
            root.rename(kept / self.journal.old[:12])
        fresh.rename(root)


def _add(path: Path, data: bytes) -> None:
    with suppress(ConflictError):
        create_exclusively(path, data)


def _journal(dist: Path) -> Path:
    return dist.with_name(f".{dist.name}.repack.json")


def left_behind(dist: Path, folder: ReleaseFolder) -> Replacing | None:
    """The replacement that a run which was killed did not finish.

    Raises:
        FormatError: ``json.*``. TransportError: ``io.*``.
    """
    path = _journal(dist)
    if not path.is_file():
        return None
    data = read_file(path, 4 * DEFAULT_LIMITS.document)
    found = parse_closed(Journal, data, str(path))
    wrong = not found.staging.startswith(f".{dist.name}{STAGING}") or {"/", "\0"} & {*found.staging, *found.name}
    if wrong:
        raise ConflictError("repack.busy", f"{show(str(path))} is none of ours; move it away", where=str(path))
    return Replacing(dist, folder, found)
