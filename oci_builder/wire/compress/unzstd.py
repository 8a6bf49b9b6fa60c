"""Zstandard, frame by frame and block by block (RFC 8878).

libzstd's streaming interface reports neither a truncated frame nor how much it will put out. Walking the block headers
gives both: where a frame ends, and at most 128 KiB of output for each block fed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial

from oci_builder.model.errors import FormatError, OciBuilderError, show
from oci_builder.model.limits import Limits
from oci_builder.wire.compress.codecs import ZstdError, ZstdFrame, ZstdInflater, zstd_header
from oci_builder.wire.compress.pull import Pull
from oci_builder.wire.compress.within import PACKED_UNIT, UNIT, Budget, Units, decode_units

MAGIC_BYTES = b"\x28\xb5\x2f\xfd"
_HEAD = 18
_BLOCK_MAX = 128 << 10
_FED = UNIT // 4 // _BLOCK_MAX  # blocks fed at once: at most 1 MiB of output
_RLE, _COMPRESSED = 1, 2  # block types; 0 is raw, 3 is reserved


def is_skippable(head: bytes | memoryview) -> bool:
    """True when a skippable frame starts with these four bytes."""
    return len(head) >= 4 and head[0] & 0xF0 == 0x50 and bytes(head[1:4]) == b"\x2a\x4d\x18"


def unzstd(pull: Pull, budget: Budget, threads: int) -> Generator[bytes | memoryview, None, None]:
    """All frames until the end of ``pull``; see ``decode.decode_chunks``."""
    if not pull.peek(1):
        raise _fault("truncated", "an empty stream", pull.offset, budget.where)
    if threads > 1:
        units = Units(_next_unit, partial(_decode_unit, limits=budget.limits), lambda _packed: (False, False))
        yield from decode_units(pull, budget, threads, units)
    while pull.peek(1):
        if is_skippable(pull.peek(4)):
            _skip(pull, budget.where)
        else:
            yield from _frame(pull, budget)


def _skip(pull: Pull, where: str) -> None:
    start = pull.offset
    left = int.from_bytes(bytes(pull.take(8))[4:8], "little")
    if pull.offset - start < 8:
        raise _fault("truncated", "the stream ends in a skippable frame", start, where)
    while left:
        piece = pull.some(min(left, UNIT))
        if not piece:
            raise _fault("truncated", "the stream ends in a skippable frame", start, where)
        left -= len(piece)


def _check_magic(magic: bytes, start: int, where: str) -> None:
    if magic == MAGIC_BYTES:
        return
    rest = b"\x2a\x4d\x18"
    cut = len(magic) < 4 and (MAGIC_BYTES.startswith(magic) or (magic[0] & 0xF0 == 0x50 and rest.startswith(magic[1:])))
    code = "truncated" if cut else "trailing" if start else "header"
    raise _fault(code, f"no frame starts with {show(magic)}", start, where)


def _header(pull: Pull, budget: Budget) -> ZstdFrame:
    head, start, where = bytes(pull.peek(_HEAD)), pull.offset, budget.where
    _check_magic(head[:4], start, where)
    try:
        frame = zstd_header(head)
    except ZstdError as error:
        code = "truncated" if len(head) < _HEAD else "header"
        raise _fault(code, f"bad frame header ({error})", start, where) from None
    if frame.dictionary:
        raise _fault("dictionary", f"needs dictionary {frame.dictionary}; layers may not use one", start, where)
    most = budget.limits.zstd_window
    if frame.window > most:
        raise _fault(
            "window", f"asks for a window of {frame.window} bytes, the limit is {most}", start, where,
            expected=f"<= {most}", actual=frame.window,
        )  # fmt: skip
    return frame


def _frame(pull: Pull, budget: Budget) -> Iterator[bytes]:
    start, data_start, frame = pull.offset, budget.spent, _header(pull, budget)
    inflater, size = ZstdInflater(max(frame.window, 1 << 10)), 0
    for packed in _pieces(pull, frame, start, budget.where):
        try:
            data = inflater.decompress(packed)
        except ZstdError as error:
            raise _fault("data", f"corrupt ({error})", start, budget.where) from None
        size += len(data)
        budget.spend(len(data))
        if size > UNIT:
            budget.check_ratio(pull.offset)
        if data:
            yield data
    if not inflater.eof:
        raise _fault("data", "corrupt: the last block does not end the frame", start, budget.where)
    budget.check_ratio(pull.offset)
    budget.seen(start, data_start, False, False)


def _pieces(pull: Pull, frame: ZstdFrame, start: int, where: str) -> Iterator[bytes]:
    """The frame's bytes: its header, then groups of whole blocks, the checksum with the last group."""
    yield bytes(pull.take(frame.header_size))
    last = False
    while not last:
        group = []
        for _ in range(_FED):
            block, last = _block(pull, start, where)
            group.append(block)
            if last:
                break
        if last and frame.checksum:
            group.append(pull.take(4))
            if len(group[-1]) < 4:
                raise _fault("truncated", "the stream ends in a checksum", start, where)
        yield b"".join(group)


def _block(pull: Pull, start: int, where: str) -> tuple[memoryview, bool]:
    head = int.from_bytes(pull.peek(3), "little")
    kind, size = head >> 1 & 3, head >> 3
    if len(pull.peek(3)) < 3:
        raise _fault("truncated", "the stream ends in a block header", start, where)
    if kind > _COMPRESSED or size > _BLOCK_MAX:
        raise _fault("data", f"a block of type {kind} and size {size}", start, where)
    length = 3 + (1 if kind == _RLE else size)
    block = pull.take(length)
    if len(block) < length:
        raise _fault("truncated", "the stream ends inside a block", start, where)
    return block, bool(head & 1)


def _next_unit(pull: Pull, budget: Budget) -> int:
    """Bytes of the frame that starts here, 0 when it is not one for the pool."""
    head = pull.peek(_HEAD)
    if bytes(head[:4]) != MAGIC_BYTES:
        return 0
    try:
        frame = _header(pull, budget)
    except FormatError:
        return 0
    if frame.content_size is None or frame.content_size > UNIT:
        return 0
    at = frame.header_size
    while True:
        block = bytes(pull.peek(at + 3)[at:])
        head_bits = int.from_bytes(block, "little")
        kind, size = head_bits >> 1 & 3, head_bits >> 3
        at += 3 + (1 if kind == _RLE else size)
        if len(block) < 3 or kind > _COMPRESSED or size > _BLOCK_MAX or at > PACKED_UNIT:
            return 0
        if head_bits & 1:
            at += 4 * frame.checksum
            return at if len(pull.peek(at)) == at else 0


def _decode_unit(packed: memoryview, limits: Limits) -> bytes | None:
    parts: list[bytes] = []
    try:
        for data in _frame(Pull([packed]), Budget(limits, "")):
            parts.append(data)
            if sum(map(len, parts)) > UNIT:
                return None
    except OciBuilderError:
        return None
    return b"".join(parts)


def _fault(code: str, what: str, at: int, where: str, **fields: object) -> FormatError:
    return FormatError(f"zstd.{code}", f"{where}: zstd frame at byte {at}: {what}", where=where, offset=at, **fields)
