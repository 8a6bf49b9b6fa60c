"""The names of one layer in order, kept small, so that the tree they make can be judged when all layers are known.

An archive gives its layers in any order and once. Whether a name leads through a link or a file of a lower layer can
only be said in the layers' own order; almost always no name does, which comparing two sets of keys shows.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from oci_builder.model.errors import OciBuilderError, PolicyError
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.apply_common import require_few
from oci_builder.rootfs.tree_model import TreeModel
from oci_builder.wire.tar import FolderLedger, KeySet, Kind, NameLedger, TarEntry, name_key

_BATCH = 1000
_PIECE = 1 << 18
# Bytes of a tree in memory that a file, a folder, and a link's target take.
_FILE, _FOLDER, _LINK = 104, 330, 80
_LETTERS = {Kind.FILE: b"f", Kind.DIR: b"d", Kind.SYMLINK: b"s", Kind.HARDLINK: b"h", Kind.CHAR: b"c"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_DATA = b"F"  # a file that is not empty, which no whiteout may be


class TreeLog:
    """What a tree needs to know of a layer's entries.

    Args:
        before: folders of other layers of the image.
        keep: False where nobody is going to ask for the entries again, only for what they would take.

    Attributes:
        folders: those of its names.
        size: compressed bytes held.
        cost: about the bytes of memory that a tree of it takes.

    Raises (``add``):
        PolicyError: ``limit.folders``.
    """

    __slots__ = ("_cost", "_keep", "_most", "_open", "_packed", "_packer", "folders", "size")

    def __init__(self, limits: Limits = DEFAULT_LIMITS, before: int = 0, *, keep: bool = True) -> None:
        self.folders = FolderLedger(limits, before)
        self._keep, self._most = keep, limits.logged_names
        self.size = self._cost = 0
        # Most layers of an archive full of them are small, and this takes 260 KB.
        self._packer: zlib._Compress | None = None
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
        return self._cost + _FOLDER * self.folders.own

    def entries(self) -> Iterator[TarEntry]:
        """The entries again: names, kinds and links.

        Raises:
            PolicyError: ``limit.entries``: their names were more than is remembered.
        """
        if self.size > self._most or not self._keep:
            raise PolicyError("limit.entries", "more names than are remembered to judge links among them")
        rest = [self._packer.copy().flush()] if self._packer is not None else []
        fields = chain(_fields(zlib.decompressobj(), [*self._packed, *rest]), self._open)
        for first, link in zip(fields, fields, strict=True):
            kind = Kind.FILE if first[:1] == _DATA else _KINDS[first[:1]]
            yield TarEntry(first[1:], kind, size=int(first[:1] == _DATA), link=link)

    def forget(self) -> None:
        """Remember no names."""
        self._packed.clear()
        self._packer = None
        self.size = self._most + 1

    def _pack(self) -> None:
        if self._open and self.size <= self._most:
            self._packer = self._packer or zlib.compressobj(1)
            data = self._packer.compress(b"\0".join(self._open) + b"\0")
            if self._keep:
                self._packed.append(data)
            self.size += len(data)
        self._open.clear()


@dataclass(slots=True)
class LateLinks:
    """Hard links of a layer that come before their target, or whose target is in no entry of it at all."""

    limits: Limits = DEFAULT_LIMITS
    _names: KeySet = field(default_factory=KeySet)
    _targets: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, entry: TarEntry) -> None:
        """Take one.

        Raises:
            PolicyError: ``limit.entries``.
        """
        self._names.add(name_key(entry.name))
        self._targets.append(name_key(entry.link))
        require_few(len(self._targets), self.limits)

    def has(self, name: bytes) -> bool:
        """Whether a name is one of these links: what links to it must wait too."""
        return len(self._names) > 0 and name_key(name) in self._names

    def are_plain(self, names: NameLedger) -> bool:
        """Whether each has its target in the layer, and that is no such link itself: order does not matter then."""
        return all(names.knows_key(key) and key not in self._names for key in self._targets)


@dataclass(frozen=True, slots=True)
class LayerTree:
    """What ``judge_tree`` needs to know of a layer: its entries, its names, its late links."""

    log: TreeLog = field(default_factory=TreeLog)
    names: NameLedger = field(default_factory=NameLedger)
    late: LateLinks = field(default_factory=LateLinks)

    @classmethod
    def within(cls, limits: Limits, before: int = 0, *, keep: bool = True) -> LayerTree:
        """An empty one under these limits; the rest is ``TreeLog``'s."""
        return cls(TreeLog(limits, before, keep=keep), late=LateLinks(limits))

    def note(self, entry: TarEntry) -> str | None:
        """Take the next entry; returns as ``NameLedger.note``.

        Raises:
            PolicyError: ``limit.folders``, ``limit.entries``.
        """
        self.log.add(entry)
        code = self.names.note(entry)
        if entry.kind is Kind.HARDLINK and (code == "entry.link_target" or self.late.has(entry.link)):
            self.late.add(entry)
        return code


def _fields(unpacker: zlib._Decompress, packed: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for data in packed:
        while data:
            text = rest + unpacker.decompress(data, _PIECE)
            data = unpacker.unconsumed_tail
            *whole, rest = text.split(b"\0")
            yield from whole


def judge_tree(
    layers: list[LayerTree], where: str, limits: Limits, replaced: Callable[[bytes], None] = lambda _path: None
) -> OciBuilderError | None:
    """What an unpacking of these layers, lowest first, would refuse because of the tree; None when it would not.

    Args:
        replaced: told each path below something that is no folder and would make way for one.
    """
    if not _needs_model(layers):
        return None
    model = TreeModel(where, limits, replaced)
    try:
        _require_room(layers, where, limits)
        for layer in layers:
            model.apply(layer.log.entries())
    except OciBuilderError as error:
        return error
    return None


def require_judgeable(layers: list[LayerTree], where: str, limits: Limits) -> None:
    """Refuse, for who needs no tree in memory, what ``judge_tree`` refuses because there is no room for one.

    Raises:
        PolicyError: ``limit.entries``.
    """
    try:
        _require_room(layers, where, limits)
    except PolicyError:
        if _needs_model(layers):
            raise


def _require_room(layers: list[LayerTree], where: str, limits: Limits) -> None:
    logs = [layer.log for layer in layers]
    if sum(log.cost for log in logs) > limits.tree_memory or sum(log.size for log in logs) > limits.logged_names:
        message = (
            f"{where}: names lead through links, or hard links cross layers, among too many names to judge; "
            "limits.tree_memory and limits.logged_names can be raised"
        )
        raise PolicyError("limit.entries", message, where=where)


def _needs_model(layers: list[LayerTree]) -> bool:
    return not all(layer.late.are_plain(layer.names) for layer in layers) or _meet(layers)


def _meet(layers: list[LayerTree]) -> bool:
    """Whether any name leads through something that this layer or a lower one has as no folder."""
    needed = KeySet()
    for layer in reversed(layers):
        needed.update(layer.log.folders.keys)
        if layer.names.has_other_than_folders(needed):
            return True
    return False
