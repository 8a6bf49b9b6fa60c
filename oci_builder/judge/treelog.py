"""The names of one layer in order, kept small, so that the tree they make can be judged when all layers are known.

An archive gives its layers in any order and once. Whether a name leads through a link or a file of a lower layer can
only be said in the layers' own order; almost always no name does, which comparing two sets of hashes shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from oci_builder.model.errors import OciBuilderError, PolicyError
from oci_builder.model.limits import Limits
from oci_builder.rootfs.tree_model import TreeModel
from oci_builder.wire.tar import Kind, NameLedger, TarEntry

_BATCH = 1000
_PIECE = 1 << 18
# The biggest real layer's names take 2 MB so.
_MOST = 64 << 20
_LETTERS = {Kind.FILE: b"f", Kind.DIR: b"d", Kind.SYMLINK: b"s", Kind.HARDLINK: b"h", Kind.CHAR: b"c"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_DATA = b"F"  # a file that is not empty, which no whiteout may be


class TreeLog:
    """What a tree needs to know of a layer's entries.

    Attributes:
        needed: keys (``NameLedger.key``) of all folders that names and link targets lead through.
        size: compressed bytes held.
    """

    __slots__ = ("_last", "_open", "_packed", "_packer", "needed", "size")

    def __init__(self) -> None:
        self.needed: set[bytes] = set()
        self.size = 0
        self._packer = zlib.compressobj(1)
        self._packed: list[bytes] = []
        self._open: list[bytes] = []
        self._last = b""

    def add(self, entry: TarEntry) -> None:
        """Take the next entry."""
        letter = _DATA if entry.kind is Kind.FILE and entry.size else _LETTERS.get(entry.kind, b"c")
        self._open += (letter + entry.name, entry.link)
        if len(self._open) >= _BATCH:
            self._pack()
        self._need(entry.name)
        if entry.kind is Kind.HARDLINK:
            self._need(entry.link)

    def entries(self) -> Iterator[TarEntry]:
        """The entries again: names, kinds and links.

        Raises:
            PolicyError: ``limit.entries``: their names were more than is remembered.
        """
        if self.size > _MOST:
            raise PolicyError("limit.entries", "more names than are remembered to judge links among them")
        self._pack()
        fields = _fields(zlib.decompressobj(), [*self._packed, self._packer.copy().flush()])
        for first, link in zip(fields, fields, strict=True):
            kind = Kind.FILE if first[:1] == _DATA else _KINDS[first[:1]]
            yield TarEntry(first[1:], kind, size=int(first[:1] == _DATA), link=link)

    def _pack(self) -> None:
        if self._open and self.size <= _MOST:
            data = self._packer.compress(b"\0".join(self._open) + b"\0")
            self._packed.append(data)
            self.size += len(data)
        self._open.clear()

    def _need(self, name: bytes) -> None:
        above = name.rpartition(b"/")[0]
        if above == self._last:
            return
        self._last = above
        while above:
            key = NameLedger.key(above)
            if key in self.needed:
                return
            self.needed.add(key)
            above = above.rpartition(b"/")[0]


def _fields(unpacker: zlib._Decompress, packed: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for data in packed:
        while data:
            text = rest + unpacker.decompress(data, _PIECE)
            data = unpacker.unconsumed_tail
            *whole, rest = text.split(b"\0")
            yield from whole


def judge_tree(layers: list[tuple[TreeLog, NameLedger, bool]], where: str, limits: Limits) -> OciBuilderError | None:
    """What an unpacking of these layers, lowest first, would refuse because of the tree; None when it would not.

    Args:
        layers: log, names, and whether it has hard links whose target is not in it (yet).
    """
    if not any(links for _, _, links in layers) and not _meet(layers):
        return None
    model = TreeModel(where, limits)
    try:
        for log, _, _ in layers:
            model.apply(log.entries())
    except OciBuilderError as error:
        return error
    return None


def _meet(layers: list[tuple[TreeLog, NameLedger, bool]]) -> bool:
    """Whether any name leads through something that this layer or a lower one has as no folder."""
    needed: set[bytes] = set()
    for log, names, _ in reversed(layers):
        needed |= log.needed
        if names.has_other_than_folders(needed):
            return True
    return False
