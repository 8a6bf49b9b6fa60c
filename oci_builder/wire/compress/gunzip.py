"""gzip, member by member (RFC 1952), serially or in parallel with the same outcome."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from oci_builder.model.errors import FormatError, show
from oci_builder.wire.compress.codecs import DeflateError, Inflater, crc32, inflate_member
from oci_builder.wire.compress.gzipframe import MAX_HEADER, MEMBER_OVERHEAD, GzipHeader, is_stored, parse_header
from oci_builder.wire.compress.pull import Pull
from oci_builder.wire.compress.within import PACKED_UNIT, UNIT, Budget, Units, Warn, decode_units

# The first piece of a member is small: of a stream of tiny members, little is handed to an inflater in vain.
_FIRST_PIECE = 4 << 10
_PIECE = 64 << 10
_HEAD = 64


def gunzip(
    pull: Pull, budget: Budget, threads: int, strict: bool, warn: Warn
) -> Generator[bytes | memoryview, None, None]:
    """All members until the end of ``pull``; see ``decode.decode_chunks``."""
    if not pull.peek(1):
        raise _fault("truncated", "an empty stream", pull.offset, budget.where)
    if threads > 1:
        yield from decode_units(pull, budget, threads, Units(_next_unit, _decode_unit, _form))
    while _another(pull, budget.where, strict, warn):
        yield from _member(pull, budget)


def _another(pull: Pull, where: str, strict: bool, warn: Warn) -> bool:
    """True at a further member; False at a clean end, or at NUL padding up to the end."""
    head = bytes(pull.peek(2))
    if not head:
        return False
    if pull.offset == 0 or (head[0] == 0x1F and head[1:] in (b"", b"\x8b")):
        return True
    start, zeros = pull.offset, 0
    while piece := pull.some(_PIECE):
        rest = bytes(piece).lstrip(b"\0")
        zeros += len(piece) - len(rest)
        if rest or strict:
            what = f"{show(rest[:8])} after {zeros} NULs" if rest else "NUL padding"
            raise _fault("trailing", f"no further member but {what}", start, where)
    warn("gzip.trailing", f"{where}: {zeros} NUL bytes after the last gzip member, at byte {start}")
    return False


def _member(pull: Pull, budget: Budget) -> Iterator[bytes]:
    """The data of the member that starts here; afterwards the stream stands behind its trailer."""
    start, data_start = pull.offset, budget.spent
    header = _header(pull, budget.where)
    stored = _will_be_stored(pull, header)
    pull.take(header.size)
    inflater, crc, size = Inflater(), 0, 0
    for data in _inflate(inflater, pull, start, budget.where):
        crc, size = crc32(data, crc), size + len(data)
        budget.spend(len(data))
        if size > UNIT:
            budget.check_ratio(pull.offset)
        yield data
    pull.push_back(inflater.unused_data)
    trailer = bytes(pull.take(8))
    if len(trailer) < 8:
        raise _fault("truncated", "the stream ends in the trailer", start, budget.where)
    _compare("crc", "CRC-32", trailer[:4], crc, start, budget.where)
    _compare("size", "length modulo 2**32", trailer[4:], size & 0xFFFFFFFF, start, budget.where)
    budget.check_ratio(pull.offset)
    ours = header.canonical and header.member_size == pull.offset - start
    budget.seen(start, data_start, ours, ours and stored)


def _header(pull: Pull, where: str) -> GzipHeader:
    for want in (_HEAD, MAX_HEADER + 1):
        header = parse_header(pull.peek(want), pull.offset, where)
        if header:
            return header
    raise _fault("truncated", "the stream ends in a member header", pull.offset, where)


def _inflate(inflater: Inflater, pull: Pull, start: int, where: str) -> Iterator[bytes]:
    most = _FIRST_PIECE
    while not inflater.eof:
        needs = inflater.needs_input
        piece: bytes | memoryview = pull.some(most) if needs else b""
        most = _PIECE
        if needs and not piece:
            raise _fault("truncated", "the stream ends inside a member; fetch it again", start, where)
        try:
            data = inflater.decompress(piece, UNIT // 4)
        except DeflateError as error:
            raise _fault("data", f"not deflate data ({error})", start, where) from None
        if data:
            yield data


def _next_unit(pull: Pull, budget: Budget) -> int:
    try:
        header = parse_header(pull.peek(_HEAD), pull.offset, budget.where)
    except FormatError:
        return 0
    size = header.member_size if header else None
    if size is None or not MEMBER_OVERHEAD <= size <= PACKED_UNIT:
        return 0
    return size if len(pull.peek(size)) == size else 0


def _decode_unit(packed: memoryview) -> bytes | None:
    header = parse_header(packed[:_HEAD], 0, "")
    return inflate_member(packed, header.size, UNIT) if header else None


def _form(packed: memoryview) -> tuple[bool, bool]:
    header = parse_header(packed[:_HEAD], 0, "")
    ours = header is not None and header.canonical
    return ours, ours and is_stored(packed)


def _will_be_stored(pull: Pull, header: GzipHeader) -> bool:
    """Of the member that starts here, should it be good; only one that begins so is looked at whole."""
    size = header.member_size or 0
    if not header.canonical or not MEMBER_OVERHEAD < size <= PACKED_UNIT:
        return False
    head = pull.peek(header.size + 1)
    return len(head) > header.size and head[-1] in (0, 1) and is_stored(pull.peek(size))


def _compare(code: str, what: str, stored: bytes, computed: int, start: int, where: str) -> None:
    got = int.from_bytes(stored, "little")
    if got != computed:
        raise _fault(
            code, f"{what} in the trailer is 0x{got:08x}, computed 0x{computed:08x}", start, where,
            expected=f"0x{got:08x}", actual=f"0x{computed:08x}",
        )  # fmt: skip


def _fault(code: str, what: str, at: int, where: str, **fields: object) -> FormatError:
    return FormatError(f"gzip.{code}", f"{where}: gzip member at byte {at}: {what}", where=where, offset=at, **fields)
