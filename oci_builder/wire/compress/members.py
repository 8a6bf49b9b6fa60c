"""Where the members of one of our gzip layers lie, found without inflating anything."""

from __future__ import annotations

from collections.abc import Iterator

from oci_builder.model.errors import FormatError
from oci_builder.wire.compress.encode import Member
from oci_builder.wire.compress.gzipframe import MEMBER_OVERHEAD, TRAILER_SIZE, parse_header
from oci_builder.wire.source import FileRange

_HEAD = 64


def gzip_members(blob: FileRange, where: str) -> Iterator[Member]:
    """The members of ``blob``, by the length field of each: two small reads a member.

    Sizes are what the members say about themselves; whoever needs the truth decodes. The members cover the blob
    without gaps, or an error is raised.

    Raises:
        FormatError: ``gzip.header`` (not a member, or none of ours), ``gzip.truncated``.
    """
    at = tar_at = 0
    while at < blob.size:
        header = parse_header(blob.pread(_HEAD, at), at, where)
        size = header.member_size if header else None
        if size is None or size < MEMBER_OVERHEAD:
            raise FormatError("gzip.header", f"{where}: member at byte {at} has no length field of ours", where=where)
        if at + size > blob.size:
            raise FormatError("gzip.truncated", f"{where}: ends inside the member at byte {at}", where=where)
        tar_size = int.from_bytes(blob.pread(4, at + size - TRAILER_SIZE + 4), "little")
        yield Member(tar_at, tar_size, at, size)
        at, tar_at = at + size, tar_at + tar_size
