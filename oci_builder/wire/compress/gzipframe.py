"""gzip member framing: the header and trailer around one deflate stream (RFC 1952).

Ours carry an FEXTRA subfield ``OB``: the length of the whole member, so that a reader of ours finds the next member
without inflating this one. To every other reader it is ordinary gzip. The field is a hint and never trusted.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass

from oci_builder.model.errors import FormatError, show

MAGIC = b"\x1f\x8b"
TRAILER_SIZE = 8
# mtime 0, XFL 0, OS 255 "unknown": bytes that a second run, another level or another host must not change.
_FIXED = MAGIC + b"\x08\x04" + bytes(4) + b"\x00\xff" + b"\x08\x00" + b"OB\x04\x00"
HEADER_SIZE = len(_FIXED) + 4
MEMBER_OVERHEAD = HEADER_SIZE + TRAILER_SIZE

# The most bytes of one stored block.
_STORED = 0xFFFF
_FHCRC, _FEXTRA, _FNAME, _FCOMMENT, _RESERVED = 2, 4, 8, 16, 0xE0
# The longest name or comment, its NUL counted, that Go's reader takes: it refuses the whole stream for a longer one.
_MOST_TEXT = 512
# The longest header accepted: FEXTRA's own bound plus room for a name and a comment.
MAX_HEADER = 128 << 10


@dataclass(frozen=True, slots=True)
class GzipHeader:
    """A parsed member header.

    Attributes:
        size: bytes of the header; deflate data starts there.
        member_size: what the ``OB`` field says the whole member has, or None.
        canonical: True when every other byte is as ours are.
    """

    size: int
    member_size: int | None
    canonical: bool


def encode_member(deflated: bytes | bytearray, crc: int, size: int) -> bytes:
    """One finished member around ``deflated``, whose ``size`` uncompressed bytes (below 2**32) have this CRC-32."""
    length = len(deflated) + MEMBER_OVERHEAD
    trailer = crc.to_bytes(4, "little") + size.to_bytes(4, "little")
    return b"".join((_FIXED, length.to_bytes(4, "little"), deflated, trailer))


def encode_stored(data: bytes) -> bytes:
    """A member of ours whose ``data`` is stored and not compressed: each of its bits follows from the data alone.

    Deflate leaves bits to chance (the padding of the last byte, codes that nothing uses); stored blocks do not, and no
    library's version shows in them (RFC 1951, 3.2.4).
    """
    blocks = bytearray()
    for at in range(0, max(1, len(data)), _STORED):
        piece = data[at : at + _STORED]
        size = len(piece).to_bytes(2, "little")
        blocks += bytes([at + _STORED >= len(data)]) + size + bytes(byte ^ 0xFF for byte in size) + piece
    return encode_member(blocks, binascii.crc32(data), len(data))


def is_stored(member: bytes | memoryview) -> bool:
    """Whether a good member of ours is of the form that ``encode_stored`` gives."""
    at, last = HEADER_SIZE, len(member) - TRAILER_SIZE
    while at + 5 <= last:
        size = int.from_bytes(member[at + 1 : at + 3], "little")
        final, end = member[at], at + 5 + size
        if final not in (0, 1) or bool(final) != (end == last) or (not final and size != _STORED):
            return False
        at = end
    return at == last


def parse_header(head: bytes | memoryview, at: int, where: str) -> GzipHeader | None:
    """Parse a member header at the start of ``head``; None when ``head`` ends inside it.

    Args:
        head: bytes from the start of the member.
        at: offset of ``head`` in the compressed stream, for messages.
        where: what is read, for messages.

    Raises:
        FormatError: ``gzip.header`` (magic, method, reserved flags, header CRC, a name or comment over 511 bytes).
    """
    head = bytes(head[: MAX_HEADER + 1])
    if not MAGIC.startswith(head[:2]):
        raise _bad(f"no gzip magic, found {show(head[:4])}", at, where)
    if len(head) < 10:
        return None
    method, flags = head[2], head[3]
    if method != 8:
        raise _bad(f"compression method {method}, only 8 (deflate) exists", at, where)
    if flags & _RESERVED:
        raise _bad(f"reserved flag bits are set (flags 0x{flags:02x})", at, where)
    size, member = 10, None
    if flags & _FEXTRA:
        end = size + 2 + int.from_bytes(head[size : size + 2], "little")
        if len(head) < size + 2 or len(head) < end:
            return None
        size, member = end, _own_field(head[size + 2 : end])
    return _finish(head, size, flags, member, at, where)


def is_our_member(head: bytes | memoryview) -> bool:
    """Whether a member of ours seems to start here; ``head`` needs 20 bytes."""
    return len(head) >= HEADER_SIZE and bytes(head[: len(_FIXED)]) == _FIXED


def _finish(head: bytes, size: int, flags: int, member: int | None, at: int, where: str) -> GzipHeader | None:
    for flag in (_FNAME, _FCOMMENT):
        if flags & flag:
            end = head.find(b"\0", size, size + _MOST_TEXT)
            if end < 0:
                if len(head) >= size + _MOST_TEXT:
                    raise _bad(f"a name or comment of {_MOST_TEXT} bytes or more, which Go refuses", at, where)
                return None
            size = end + 1
    if flags & _FHCRC:
        if len(head) < size + 2:
            return None
        want = binascii.crc32(head[:size]) & 0xFFFF
        got = int.from_bytes(head[size : size + 2], "little")
        if want != got:
            raise _bad(f"header CRC is 0x{got:04x}, computed 0x{want:04x}", at, where)
        size += 2
    return GzipHeader(size, member, size == HEADER_SIZE and head.startswith(_FIXED))


def _own_field(extra: bytes) -> int | None:
    at = 0
    while at + 4 <= len(extra):
        end = at + 4 + int.from_bytes(extra[at + 2 : at + 4], "little")
        if extra[at : at + 2] == b"OB" and end == at + 8 <= len(extra):
            return int.from_bytes(extra[at + 4 : end], "little")
        at = end
    return None


def _bad(what: str, at: int, where: str) -> FormatError:
    return FormatError("gzip.header", f"{where}: gzip member at byte {at}: {what}", where=where, offset=at)
