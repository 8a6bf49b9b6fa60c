"""What an archive holds, whatever its outer form: its members, hashed and read once, in the order of its bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from oci_builder.judge.hashing import Hashers
from oci_builder.judge.layer import LayerFacts, read_layer
from oci_builder.judge.options import Findings, JudgeOptions
from oci_builder.model.digest import Digest
from oci_builder.model.errors import OciBuilderError, PolicyError
from oci_builder.model.limits import Limits
from oci_builder.wire.compress import Compression

# Members kept in memory together: a document is at most 4 MiB, an archive has a handful.
MOST_KEPT = 64 << 20
_TINY = 64 << 10
_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{64})\Z")


@dataclass(slots=True)
class Member:
    """One file of an archive.

    Attributes:
        name: clean path in the archive.
        size, digest: of its bytes.
        data: the bytes, kept when it may be a document.
        layer: what it is as a layer, read on the fly when it is no document.
        range: (offset, size) in the archive's file where that is not compressed.
        shared: True when its bytes are, compressed, those of a layer of the first archive.
    """

    name: str
    size: int
    digest: Digest
    data: bytes | None = None
    layer: LayerFacts | None = None
    range: tuple[int, int] | None = None
    shared: bool = False


@dataclass(slots=True)
class Contents:
    """One archive.

    Attributes:
        path: as given.
        outer: how the members are stored (``identity`` for a folder too).
        size, digest: of the archive file; None for a folder.
        members: by name.
        links: names that stand for another member, as classic ``docker save`` writes repeated layers.
        folders: names of folders.
        complete: False when the archive could not be read to its end.
        written_by_us: True when a gzip member of the archive file is one of ours.
        foreign_members: member name (``""`` for what lies between members) to the offset of the first gzip member in
            it whose header is not as we write it.
        pressed_members: the same for gzip members of ours whose data is compressed: of ours, only layers' are.
    """

    path: Path
    outer: Compression
    size: int = 0
    digest: Digest | None = None
    members: dict[str, Member] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    is_folder: bool = False
    complete: bool = True
    written_by_us: bool = False
    foreign_members: dict[str, int] = field(default_factory=dict)
    pressed_members: dict[str, int] = field(default_factory=dict)

    def get(self, name: str) -> Member | None:
        """The member of that name; one link is followed."""
        return self.members.get(self.links.get(name, name))

    def blob(self, digest: Digest) -> Member | None:
        """The member that an OCI layout keeps a blob in."""
        return self.members.get(digest.blob_path)


class Intake:
    """Reads members into a ``Contents``."""

    __slots__ = ("_kept", "_logged", "_names", "contents", "findings", "hashers", "options")

    def __init__(self, contents: Contents, options: JudgeOptions, findings: Findings, hashers: Hashers) -> None:
        self.contents, self.options, self.findings, self.hashers = contents, options, findings, hashers
        self._kept = self._logged = self._names = 0

    def member(self, name: str, size: int, chunks: Iterator[bytes | memoryview]) -> Member:
        """Read one member to its end."""
        outer = _Outer(chunks)
        head, chunks = _head(iter(outer))
        where = f"{self.findings.where}: {name}"
        blob_hash = self.hashers.new("blob")
        member = Member(name, size, Digest.of(b""))
        if self._kept + size <= MOST_KEPT and is_document(head, size, self.options.limits):
            self._kept += size
            member.data = b"".join(blob_hash.tee(chunks))
        else:
            member.layer = read_layer(chunks, where, self.options, self.hashers, blob_hash, name)
        member.size, member.digest = blob_hash.size, blob_hash.digest()
        if outer.error:
            raise outer.error
        if member.layer is not None:
            self.remember(member.layer)
        self.contents.members[name] = member
        return member

    def remember(self, facts: LayerFacts) -> None:
        """Keep what is remembered of all layers together within bounds.

        Raises:
            PolicyError: ``limit.entries``.
        """
        self._names += facts.names.size
        most, where = self.options.limits.archive_entries, self.findings.where
        if self._names > most:
            message = f"{where}: more than {most} entries in all its layers; limits.archive_entries can be raised"
            raise PolicyError("limit.entries", message, where=where, expected=f"<= {most}")
        self._logged += facts.log.size
        if self._logged > self.options.limits.logged_names:
            facts.log.forget()

    def layer_facts(self, member: Member) -> LayerFacts:
        """The member read as a layer, now if it was kept as a document.

        Raises:
            PolicyError: as ``remember``.
        """
        if member.layer is None:
            where = f"{self.findings.where}: {member.name}"
            blob_hash = self.hashers.new("blob")
            member.layer = read_layer(
                [member.data or b""], where, self.options, self.hashers, blob_hash, member.name
            )
            self.remember(member.layer)
        return member.layer


def is_document(head: bytes, size: int, limits: Limits) -> bool:
    """Whether a member of this size that begins so may be a document, and not only a layer."""
    return size <= limits.document and (size <= _TINY or head.lstrip()[:1] in (b"{", b"["))


class _Outer:
    """A member's bytes; a fault of the archive around it ends them, and is not taken for one of the layer in it."""

    __slots__ = ("_chunks", "error")

    def __init__(self, chunks: Iterator[bytes | memoryview]) -> None:
        self._chunks = chunks
        self.error: OciBuilderError | None = None

    def __iter__(self) -> Iterator[bytes | memoryview]:
        try:
            yield from self._chunks
        except OciBuilderError as error:
            self.error = error


def _head(chunks: Iterator[bytes | memoryview]) -> tuple[bytes, Iterator[bytes | memoryview]]:
    taken: list[bytes | memoryview] = []
    size = 0
    for chunk in chunks:
        taken.append(chunk)
        size += len(chunk)
        if size >= 64:
            break
    head = b"".join(bytes(chunk[:64]) for chunk in taken)[:64]
    return head, chain(taken, chunks)


def blob_name(name: str) -> str | None:
    """The hex digest when ``name`` is a blob of an OCI layout."""
    found = _BLOB.match(name)
    return found.group(1) if found else None


def link_target(name: str, link: bytes) -> str:
    """Where a link inside the archive leads, as a member's name; outside or absolute targets lead nowhere."""
    target = link.decode("utf-8", "surrogateescape")
    if target.startswith("/"):
        return "/"
    joined = os.path.normpath(os.path.join(os.path.dirname(name), target))
    return "/" if joined.startswith("..") else joined
