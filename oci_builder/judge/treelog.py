"""The names of one layer in order, kept small, so that the tree they make can be judged when all layers are known.

An archive gives its layers in any order and once. Whether a name leads through a link or a file of a lower layer can
only be said in the layers' own order; almost always no name does, which comparing two sets of keys shows.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from oci_builder.model.errors import OciBuilderError, PolicyError
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.apply_common import require_few
from oci_builder.rootfs.tree_model import TreeModel
from oci_builder.wire.tar import FolderLedger, KeySet, Kind, NameLedger, TarEntry, name_key

_BATCH = 1000
_PIECE = 1 << 18
# Compressed names that are remembered, of one layer and of all; the biggest real layer's take 2 MB.
MOST_LOGGED = 64 << 20
# Bytes that a tree in memory may take, and what a file, a folder, and a link's target take of them.
_MOST_MODELLED = 160 << 20
_FILE, _FOLDER, _LINK = 104, 330, 80
_LETTERS = {Kind.FILE: b"f", Kind.DIR: b"d", Kind.SYMLINK: b"s", Kind.HARDLINK: b"h", Kind.CHAR: b"c"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_DATA = b"F"  # a file that is not empty, which no whiteout may be


class TreeLog:
    """What a tree needs to know of a layer's entries.

    Attributes:
        folders: those of its names.
        size: compressed bytes held.
        cost: about the bytes of memory that a tree of it takes.

    Raises (``add``):
        PolicyError: ``limit.folders``.
    """

    __slots__ = ("_cost", "_open", "_packed", "_packer", "folders", "size")

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.folders = FolderLedger(limits)
        self.size = self._cost = 0
        self._packer = zlib.compressobj(1)
        self._packed: list[bytes] = []
        self._open: list[bytes] = []

    def add(self, entry: TarEntry) -> None:
        """Take the next entry."""
        letter = _DATA if entry.kind is Kind.FILE and entry.size else _LETTERS.get(entry.kind, b"c")
        self._open += (letter + entry.name, entry.link)
        if len(self._open) >= _BATCH:
            self._pack()
        self.folders.note(entry)
        self._cost += _FILE + len(entry.name) - entry.name.rfind(b"/")
        if entry.kind is Kind.SYMLINK:
            self._cost += _LINK + len(entry.link)

    @property
    def cost(self) -> int:
        """See the class."""
        return self._cost + _FOLDER * self.folders.count

    def entries(self) -> Iterator[TarEntry]:
        """The entries again: names, kinds and links.

        Raises:
            PolicyError: ``limit.entries``: their names were more than is remembered.
        """
        if self.size > MOST_LOGGED:
            raise PolicyError("limit.entries", "more names than are remembered to judge links among them")
        self._pack()
        fields = _fields(zlib.decompressobj(), [*self._packed, self._packer.copy().flush()])
        for first, link in zip(fields, fields, strict=True):
            kind = Kind.FILE if first[:1] == _DATA else _KINDS[first[:1]]
            yield TarEntry(first[1:], kind, size=int(first[:1] == _DATA), link=link)

    def forget(self) -> None:
        """Remember no names."""
        self._packed.clear()
        self.size = MOST_LOGGED + 1

    def _pack(self) -> None:
        if self._open and self.size <= MOST_LOGGED:
            data = self._packer.compress(b"\0".join(self._open) + b"\0")
            self._packed.append(data)
            self.size += len(data)
        self._open.clear()


@dataclass(slots=True)
class LateLinks:
    """Hard links of a layer that come before their target, or whose target is in no entry of it at all."""

    _names: KeySet = field(default_factory=KeySet)
    _targets: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, entry: TarEntry) -> None:
        """Take one.

        Raises:
            PolicyError: ``limit.entries``.
        """
        self._names.add(name_key(entry.name))
        self._targets.append(name_key(entry.link))
        require_few(len(self._targets))

    def has(self, name: bytes) -> bool:
        """Whether a name is one of these links: what links to it must wait too."""
        return len(self._names) > 0 and name_key(name) in self._names

    def are_plain(self, names: NameLedger) -> bool:
        """Whether each has its target in the layer, and that is no such link itself: order does not matter then."""
        return all(names.knows_key(key) and key not in self._names for key in self._targets)


@dataclass(frozen=True, slots=True)
class LayerTree:
    """What ``judge_tree`` needs to know of a layer: its entries, its names, its late links."""

    log: TreeLog
    names: NameLedger
    late: LateLinks


def _fields(unpacker: zlib._Decompress, packed: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for data in packed:
        while data:
            text = rest + unpacker.decompress(data, _PIECE)
            data = unpacker.unconsumed_tail
            *whole, rest = text.split(b"\0")
            yield from whole


def judge_tree(layers: list[LayerTree], where: str, limits: Limits) -> OciBuilderError | None:
    """What an unpacking of these layers, lowest first, would refuse because of the tree; None when it would not."""
    if all(layer.late.are_plain(layer.names) for layer in layers) and not _meet(layers):
        return None
    if sum(layer.log.cost for layer in layers) > _MOST_MODELLED:
        message = f"{where}: names lead through links, or hard links cross layers, among too many names to judge"
        return PolicyError("limit.entries", message, where=where)
    model = TreeModel(where, limits)
    try:
        for layer in layers:
            model.apply(layer.log.entries())
    except OciBuilderError as error:
        return error
    return None


def _meet(layers: list[LayerTree]) -> bool:
    """Whether any name leads through something that this layer or a lower one has as no folder."""
    needed = KeySet()
    for layer in reversed(layers):
        needed.update(layer.log.folders.keys)
        if layer.names.has_other_than_folders(needed):
            return True
    return False
