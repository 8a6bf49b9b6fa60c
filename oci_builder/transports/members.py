"""The members of an archive or layout folder, brought into the store in one pass."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from oci_builder.model.digest import Digest
from oci_builder.model.errors import FormatError, PolicyError, SpecError, disk_error, show
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.store.blobs import DirStore
from oci_builder.transports.wanted import link_target
from oci_builder.wire.compress import Options, decode_chunks, sniff
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import Kind, TarEntry, TarReader

_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{64})\Z")


@dataclass(slots=True)
class Members:
    """What an archive holds, by member name.

    Attributes:
        blobs: name to digest of its content, which is in the store.
        links: name of a symbolic link to the member it names (docker save writes those for repeated layers).
    """

    store: DirStore
    where: str
    blobs: dict[str, Digest] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def digest(self, name: str) -> Digest:
        """Digest of a member.

        Raises:
            FormatError: ``archive.missing``.
        """
        found = self.blobs.get(self.links.get(name, name))
        if found is None:
            raise FormatError(
                "archive.missing", f"{self.where}: there is no member {show(name)}", where=self.where, expected=name
            )
        return found

    def document(self, name: str, limit: int) -> bytes:
        """Content of a small member.

        Raises:
            FormatError: ``archive.missing``.
            PolicyError: ``limit.document``.
        """
        digest = self.digest(name)
        if self.store.size(digest) > limit:
            raise PolicyError("limit.document", f"{self.where}: {show(name)} is over {limit} bytes", where=self.where)
        return self.store.read(digest, limit)


def read_members(path: Path, store: DirStore, limits: Limits = DEFAULT_LIMITS) -> Members:
    """Bring every member of an archive (tar, plain or compressed) or layout folder into the store.

    Raises:
        SpecError: ``spec.path`` when there is nothing to read.
        FormatError: ``tar.*``, ``archive.*``, the compression's codes.
        IntegrityError: ``blob.digest`` when a member is not what its name says.
        TransportError: ``io.*``.
    """
    members = Members(store, str(path))
    try:
        if path.is_dir():
            _read_folder(path, members)
        elif path.is_file():
            _read_tar(path, members, limits)
        else:
            raise SpecError("spec.path", f"no such archive or layout folder: {show(str(path))}", where=str(path))
    except OSError as error:
        raise disk_error(error, f"reading {path.name}") from None
    return members


def _read_folder(path: Path, members: Members) -> None:
    documents = [path / name for name in ("oci-layout", "index.json", "manifest.json")]
    blobs = sorted((path / "blobs" / "sha256").glob("*"))
    for file in [d for d in documents if d.exists()] + blobs:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            name = str(file.relative_to(path))
            members.blobs[name] = _ingest(name, FileRange(fd, 0, os.fstat(fd).st_size).chunks(), members.store)
        finally:
            os.close(fd)


def _read_tar(path: Path, members: Members, limits: Limits) -> None:
    with open(path, "rb", buffering=0) as file:
        source = FileRange(file.fileno(), 0, path.stat().st_size)
        chunks: Iterator[bytes | memoryview] = source.chunks()
        compression = sniff(source.pread(8, 0))
        if compression != "identity":
            chunks = decode_chunks(chunks, compression, Options(limits, members.where, 2))
        reader = TarReader(chunks, limits=limits, where=members.where)
        for entry in reader:
            _admit_member(entry, reader, members, limits)


def _admit_member(entry: TarEntry, reader: TarReader, members: Members, limits: Limits) -> None:
    name = entry.name.decode("utf-8", "backslashreplace")
    if name in members.blobs or name in members.links:
        raise FormatError("archive.duplicate", f"{members.where}: {show(name)} stands twice", where=members.where)
    if len(members.blobs) > limits.archive_members:
        raise PolicyError(
            "limit.members", f"{members.where}: over {limits.archive_members} members", where=members.where
        )
    if entry.kind is Kind.FILE:
        members.blobs[name] = _ingest(name, reader.data(), members.store)
    elif entry.kind is Kind.SYMLINK:
        members.links[name] = link_target(name, entry.link)
    elif entry.kind is not Kind.DIR:
        raise FormatError("archive.member", f"{members.where}: {show(name)} is a {entry.kind}", where=members.where)


def _ingest(name: str, chunks: Iterator[bytes | memoryview], store: DirStore) -> Digest:
    match = _BLOB.match(name)
    expected = Digest.from_hex(match.group(1)) if match else None
    with contextlib.ExitStack() as stack:
        ingest = stack.enter_context(store.ingest("member", expected))
        if ingest.present and expected is not None:
            return expected
        if ingest.offset:
            ingest.truncate()
        hashed = hashlib.sha256()
        for chunk in chunks:
            if expected is None:
                hashed.update(chunk)
            ingest.write(chunk)
        return ingest.commit(None if expected else Digest.from_hex(hashed.hexdigest()))
