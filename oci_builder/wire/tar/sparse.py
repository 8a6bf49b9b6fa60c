"""Sparse files of foreign archives (GNU type ``S``; PAX 0.0, 0.1, 1.0), expanded to plain content.

Source: GNU tar manual, "Storing Sparse Files". We never write one: Docker cannot read type ``S`` (docker/cli#6153).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from oci_builder.model.errors import FormatError
from oci_builder.wire.source import ChunkReader
from oci_builder.wire.tar.header import BLOCK, RawHeader, parse_number
from oci_builder.wire.tar.names import Where
from oci_builder.wire.tar.pax import Records

_ZEROS = memoryview(bytes(1 << 18))
_DIGITS = 19  # the longest decimals that fit 64 bits, whatever they are


@dataclass(slots=True)
class SparseMap:
    """Where the stored bytes belong.

    Attributes:
        size: bytes of the expanded file.
        parts: (offset, length) of the stored pieces, ascending.
        used: bytes of the entry's data area that the map itself took (format 1.0).
    """

    size: int
    parts: list[tuple[int, int]]
    used: int = 0

    def pieces(self, data: Iterator[memoryview]) -> Iterator[memoryview | int]:
        """The file's content: stored pieces, and the lengths of the holes between them."""
        at = 0
        view = memoryview(b"")
        for offset, length in self.parts:
            if offset > at:
                yield offset - at
            at = offset + length
            while length:
                if not len(view):
                    view = next(data)
                part, view = view[:length], view[length:]
                length -= len(part)
                yield part
        if self.size > at:
            yield self.size - at

    def expand(self, data: Iterator[memoryview]) -> Iterator[memoryview]:
        """The file's content with zeros for its holes."""
        for piece in self.pieces(data):
            if isinstance(piece, int):
                yield from _zeros(piece)
            else:
                yield piece


def _zeros(n: int) -> Iterator[memoryview]:
    while n > 0:
        part = _ZEROS[:n]
        n -= len(part)
        yield part


def old_gnu_map(raw: RawHeader, reader: ChunkReader, limit: int, where: Where) -> SparseMap:
    """The map of a type ``S`` header and its extension blocks.

    Raises:
        FormatError: ``entry.sparse``, ``tar.truncated``.
    """
    block = raw.block
    if raw.magic != "gnu":
        raise sparse_error(where, "GNU's type S in a header of another format")
    size = parse_number(block[483:495])
    pairs = _pairs(block[386:482], where)
    more = block[482]
    taken = 0
    while more:
        block = reader.read_exact(BLOCK)
        taken += BLOCK
        if len(block) < BLOCK:
            raise FormatError("tar.truncated", f"{where}: the archive ends within a sparse map", where=where)
        if taken > limit:
            raise sparse_error(where, f"a map of over {limit} bytes")
        pairs += _pairs(block[:504], where)
        more = block[504]
    if size is None:
        raise sparse_error(where, "no file size")
    return checked(size, pairs, raw.size, where)


def _pairs(area: bytes, where: Where) -> list[tuple[int, int]]:
    out = []
    for at in range(0, len(area), 24):
        if not any(area[at : at + 24]):
            break
        offset, length = parse_number(area[at : at + 12]), parse_number(area[at + 12 : at + 24])
        if offset is None or length is None:
            raise sparse_error(where, "a map with something that is no number")
        out.append((offset, length))
    return out


def pax_map(records: Records, stored: int, reader: ChunkReader, limit: int, where: Where) -> SparseMap | None:
    """The map that PAX records describe; ``None`` when the entry is not sparse.

    Raises:
        FormatError: ``entry.sparse``, ``tar.truncated``.
    """
    values = records.values
    size_text = values.get(b"GNU.sparse.size") or values.get(b"GNU.sparse.realsize") or b""
    if values.get(b"GNU.sparse.realsize", size_text) != size_text:
        raise sparse_error(where, "two sizes")
    if values.get(b"GNU.sparse.major") == b"1" and values.get(b"GNU.sparse.minor") == b"0":
        size = _decimal(size_text, where)
        pairs, used = _inline_map(reader, min(stored, limit), where)
        sparse = checked(size, pairs, stored - used, where)
        sparse.used = used
        return sparse
    if b"GNU.sparse.map" in values and records.sparse_pairs:
        raise sparse_error(where, "two maps")
    if b"GNU.sparse.map" in values:
        numbers = _decimals(values[b"GNU.sparse.map"].split(b","), where)
    elif records.sparse_pairs:
        if [key for key, _ in records.sparse_pairs[::2]] != [b"GNU.sparse.offset"] * (len(records.sparse_pairs) // 2):
            raise sparse_error(where, "offsets and lengths that do not alternate")
        numbers = _decimals([value for _, value in records.sparse_pairs], where)
    elif any(key.startswith(b"GNU.sparse.") for key in values):
        raise sparse_error(where, "sparse records of an unknown version")
    else:
        return None
    if len(numbers) % 2:
        raise sparse_error(where, "an odd number of numbers")
    # Go and GNU tar make room for so many pieces, and take no others.
    said = values.get(b"GNU.sparse.numblocks")
    if said is not None and _decimal(said, where) != len(numbers) // 2:
        raise sparse_error(where, f"a map of {len(numbers) // 2} pieces where another number is said")
    size = _decimal(size_text, where)
    return checked(size, zip(numbers[::2], numbers[1::2], strict=True), stored, where)


def _inline_map(reader: ChunkReader, bound: int, where: Where) -> tuple[Iterator[tuple[int, int]], int]:
    """The pairs of format 1.0, in time and memory of the map's own size, and the bytes it takes."""
    numbers = array("Q")
    rest = b""
    used = 0
    while not numbers or len(numbers) <= 2 * numbers[0]:
        if used >= bound:
            raise sparse_error(where, "a map that does not end within the data")
        block = reader.read_exact(BLOCK)
        used += BLOCK
        if len(block) < BLOCK:
            raise FormatError("tar.truncated", f"{where}: the archive ends within a sparse map", where=where)
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > BLOCK:
            raise sparse_error(where, f"{rest[:30]!r} is not a number")
        if not numbers and lines:
            numbers.append(_decimal(lines.pop(0), where))
        # What follows the last number fills its block, with anything.
        wanted = 1 + 2 * numbers[0] - len(numbers) if numbers else 0
        numbers.extend(_decimals(lines[:wanted], where))
    return zip(numbers[1::2], numbers[2::2], strict=True), used


def _decimals(texts: list[bytes], where: Where) -> list[int]:
    if not all(map(bytes.isdigit, texts)) or max(map(len, texts), default=0) > _DIGITS:
        for text in texts:
            _decimal(text, where)
    return list(map(int, texts))


def _decimal(text: bytes, where: Where) -> int:
    if not text.isdigit() or len(text) > _DIGITS:
        raise sparse_error(where, f"{text[:30]!r} is not a number")
    return int(text)


def checked(size: int, pairs: Iterable[tuple[int, int]], stored: int, where: Where) -> SparseMap:
    """A map whose pieces are in order, inside the file, and as long as what is stored. Empty ones are not kept.

    Raises:
        FormatError: ``entry.sparse``.
    """
    at = total = 0
    parts = []
    for offset, length in pairs:
        if offset < at or length < 0:
            raise sparse_error(where, f"a piece at {offset} that overlaps or goes backwards")
        at = offset + length
        if length:
            parts.append((offset, length))
            total += length
    if at > size or size < 0:
        raise sparse_error(where, f"a piece up to {at} in a file of {size} bytes")
    if total != stored:
        raise sparse_error(where, f"{stored} bytes are stored and the map wants {total}")
    return SparseMap(size, parts)


def sparse_error(where: Where, what: str) -> FormatError:
    """``entry.sparse`` with its place."""
    return FormatError("entry.sparse", f"{where}: a malformed sparse file: {what}", where=where, actual=what)
