"""Turn a planned layer into the blocks that are compressed one by one.

Where blocks end depends on the entries alone, never on how fast anything runs, and a change moves only the ends near
it, so that the blocks behind it stay the same bytes and need not be compressed again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from oci_builder.rootfs.layers_plan import LayerPlan, PlannedEntry
from oci_builder.rootfs.scan import changed, input_failure
from oci_builder.rootfs.scan_content import check_unchanged, open_source
from oci_builder.wire.compress import BLOCK
from oci_builder.wire.tar import END_OF_ARCHIVE, encode_header, padding

# Part of every cache key: change it whenever the rule below changes, or what header an entry has.
RULE = b"blocks 2"
# A run of small entries may end, once it is this long, before a name whose checksum says so: one in RESYNC names.
_ENOUGH = BLOCK // 4
_RESYNC = 64


@dataclass(slots=True)
class Piece:
    """Part of one entry in one block: its header, and ``size`` bytes of its content from ``start`` on. Never changed.

    Attributes:
        header: header bytes, empty when an earlier block has them.
        item: whose content, ``None`` when the piece has none.
        last: the content ends here and is padded to whole tar records.
    """

    # Not frozen: a frozen one takes twice as long to make, and each entry has one.
    header: bytes
    item: PlannedEntry | None = None
    start: int = 0
    size: int = 0
    last: bool = True


Recipe = tuple[Piece, ...]


def recipes(plan: LayerPlan) -> Iterator[Recipe]:
    """The blocks of a layer, described; nothing is read. The end marker is a block of its own, at the end.

    A file of ``BLOCK`` bytes and more begins blocks of its own, cut at multiples of ``BLOCK`` from its start.
    """
    run: list[Piece] = []
    length = 0
    for item in plan.items:
        entry = item.entry
        header, size = encode_header(entry), entry.size
        needed = len(header) + (size + 511 & ~511 if size < BLOCK else 0)
        if run and (length + needed > BLOCK or (length >= _ENOUGH and _resyncs(entry.name))):
            yield tuple(run)
            run, length = [], 0
        if size < BLOCK:
            run.append(Piece(header, item, 0, size) if size else Piece(header))
            length += needed
            continue
        run.append(Piece(header))
        yield tuple(run)
        run, length = [], 0
        for start in range(0, size, BLOCK):
            part = min(BLOCK, size - start)
            yield (Piece(b"", item, start, part, start + part == size),)
    if run:
        yield tuple(run)
    yield (Piece(END_OF_ARCHIVE),)


def _resyncs(name: bytes) -> bool:
    return zlib.crc32(name) % _RESYNC == 0


def layer_blocks(plan: LayerPlan) -> Iterator[bytes]:
    """The tar of a layer, block by block; the last one is the end marker.

    Raises:
        SpecError: ``scan.changed`` when a file is not what the scan saw (C8-13).
        TransportError: ``io.*``.
    """
    with Reader() as reader:
        for recipe in recipes(plan):
            yield reader.block(recipe)


class Reader:
    """Reads blocks from the source files, keeping a large file open from block to block."""

    def __init__(self) -> None:
        self._item: PlannedEntry | None = None
        self._descriptor = -1

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def block(self, recipe: Recipe) -> bytes:
        """The bytes of one block.

        Raises:
            SpecError: ``scan.changed``.
            TransportError: ``io.*``.
        """
        parts: list[bytes] = []
        for piece in recipe:
            if piece.header:
                parts.append(piece.header)
            if piece.item is not None:
                parts.append(self._content(piece.item, piece))
                if piece.last:
                    parts.append(padding(piece.item.carries))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _content(self, item: PlannedEntry, piece: Piece) -> bytes:
        if item.data is not None:
            return item.data[piece.start : piece.start + piece.size]
        place = item.place
        if self._item is not item:
            self._close()
            self._descriptor = open_source(place, item.source)
            self._item = item
            if not piece.last:
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        try:
            data = _read(self._descriptor, piece.start, piece.size)
        except OSError as error:
            raise input_failure(error, place) from None
        if len(data) != piece.size:
            raise changed(place, "shrank")
        if piece.last:
            check_unchanged(self._descriptor, place, item.source)
            self._close()
        return data

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._item, self._descriptor = None, -1


def _read(descriptor: int, start: int, size: int) -> bytes:
    data = os.pread(descriptor, size, start)
    while 0 < len(data) < size:
        more = os.pread(descriptor, size - len(data), start + len(data))
        if not more:
            break
        data += more
    return data
