"""What an image's layers hold, read in one pass over an archive: for ``inspect`` and ``diff``, which keep no bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oci_builder.judge.contents import Member
from oci_builder.judge.image import ImageView
from oci_builder.judge.names import REF_NAME
from oci_builder.judge.options import JudgeOptions
from oci_builder.judge.whole import read_image
from oci_builder.model import media
from oci_builder.model.events import Emit, silent
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.tree_model import TreeModel
from oci_builder.rootfs.tree_nodes import File, Folder, Leaf, Link
from oci_builder.wire.tar import Kind, TarEntry, TarReader

_TIER = re.compile(rb"(?:.*/)?envs/([^/]+)(?:/|\Z)")
_LAYER_NAME = re.compile(r"oci-builder: (.*)\Z")


@dataclass(slots=True)
class Item:
    """An entry of a layer; ``value`` is equal for entries with equal metadata and content, empty where nobody asked."""

    path: bytes
    kind: str
    size: int
    link: bytes
    value: bytes


@dataclass(slots=True)
class LayerContents:
    """One layer and its entries by path."""

    digest: str
    media_type: str
    size: int
    diff_id: str
    tar_size: int
    entries: dict[bytes, Item]
    name: str = ""


@dataclass(slots=True)
class ImageContents:
    """One image: layers, lowest first, and settings of its config."""

    about: dict[str, Any]
    settings: dict[str, Any]
    layers: list[LayerContents] = field(default_factory=list)
    limits: Limits = DEFAULT_LIMITS

    def tier_of(self, path: bytes) -> str:
        """The tier whose environment a path is in, or ``""``."""
        match = _TIER.match(path)
        return match.group(1).decode("utf-8", "replace") if match else ""

    def tree(self) -> dict[bytes, Item]:
        """The final tree: upper layers win, whiteouts hide what is below (image-spec layer.md)."""
        model = _ItemTree("image", self.limits)
        for layer in self.layers:
            model.apply_items(layer.entries.values())
        return model.items()


class _ItemTree(TreeModel):
    """The tree as ``unpack`` makes it, with what stands at each path."""

    def __init__(self, where: str, limits: Limits) -> None:
        super().__init__(where, limits)
        self._folders: dict[Folder, Item] = {}
        self._item = Item(b"", "", 0, b"", b"")

    def apply_items(self, items: Iterable[Item]) -> None:
        """Apply a layer that the judge let pass."""
        self.apply(self._entries(items))

    def items(self) -> dict[bytes, Item]:
        """By path, links on the way to it resolved; folders that no layer lists are left out."""
        out, waiting = {}, [(b"", self.root)]
        if self.root in self._folders:
            out[b""] = self._folders[self.root]
        while waiting:
            above, folder = waiting.pop()
            for name, node in folder.children.items():
                path = above + name
                if isinstance(node, Folder):
                    waiting.append((path + b"/", node))
                item = self._folders.get(node) if isinstance(node, Folder) else getattr(node, "item", None)
                if item is not None:
                    out[path] = item
        return out

    def _entries(self, items: Iterable[Item]) -> Iterator[TarEntry]:
        for self._item in items:
            item = self._item
            yield TarEntry(item.path, Kind(item.kind), size=item.size, link=item.link)

    def _node(self, entry: TarEntry) -> Leaf:
        return _ItemLink(self._layer, self._item) if entry.kind is Kind.SYMLINK else _ItemFile(self._layer, self._item)

    def _again(self, node: Leaf) -> Leaf:
        return type(node)(self._layer, node.item) if isinstance(node, _ItemFile | _ItemLink) else node

    def _folder(self, entry: TarEntry) -> None:
        super()._folder(entry)
        self._folders[self._walk(entry.name, create=True)] = self._item


class _ItemFile(File):
    __slots__ = ("item",)

    def __init__(self, layer: int, item: Item) -> None:
        super().__init__(layer)
        self.item = item


class _ItemLink(Link):
    __slots__ = ("item",)

    def __init__(self, layer: int, item: Item) -> None:
        super().__init__(layer, item.link)
        self.item = item


def read_contents(
    path: Path,
    *,
    platform: str = "linux/amd64",
    image: str = "",
    limits: Limits = DEFAULT_LIMITS,
    emit: Emit = silent,
    hashes: bool = False,
) -> ImageContents:
    """Read an OCI archive or layout, or a Docker archive, compressed outside or not, as ``verify`` reads it.

    Args:
        image: name or digest of the one that is meant, where there are several.
        hashes: hash each file's content, so that ``Item.value`` compares it. Sparse files compare with their holes.

    Raises:
        SpecError: ``spec.path``. FormatError, PolicyError, IntegrityError: the most telling of what ``verify`` finds;
            ``platform.ambiguous`` for several images. TransportError: ``io.*``.
    """
    items = _Items(hashes)
    options = JudgeOptions(
        platform=platform, image=image, limits=limits, emit=emit, task="read", entries=items.take
    )
    return _contents(path, read_image(path, options), items, limits)


def _contents(path: Path, image: ImageView, items: _Items, limits: Limits) -> ImageContents:
    notes = (image.manifest.annotations if image.manifest else None) or {}
    about = {
        "path": str(path), "tags": [notes[REF_NAME]] if REF_NAME in notes else sorted(image.names),
        "manifest": image.manifest.digest if image.manifest else "", "config": image.config_member.digest,
        "platform": f"{image.config.os}/{image.config.architecture}",
    }  # fmt: skip
    steps = [step.created_by or "" for step in image.config.history or () if not step.empty_layer]
    layers = [
        _layer(member, steps[number] if number < len(steps) else "", items)
        for number, member in enumerate(image.layers)
        if member is not None
    ]
    settings = load_json(image.config_member.data or b"", "config", limits)
    return ImageContents(about, settings, layers, limits)


def _layer(member: Member, step: str, items: _Items) -> LayerContents:
    facts = member.layer
    if facts is None or facts.diff_id is None:
        raise AssertionError("the judge reads every layer of an image that it lets pass")
    found = _LAYER_NAME.match(step)
    name = found.group(1).replace(" and ", "+") if found else ""
    entries = items.of.get(member.name, {})
    kind = media.oci_layer(facts.compression)
    return LayerContents(member.digest, kind, member.size, facts.diff_id, facts.tar_size, entries, name)


class _Items:
    """The entries of all members that are read as layers."""

    def __init__(self, hashes: bool) -> None:
        self._hashes = hashes
        self.of: dict[str, dict[bytes, Item]] = {}

    def take(self, member: str, entry: TarEntry, reader: TarReader) -> None:
        """Note an entry; its content is hashed on the way where that is asked for."""
        value = self._value(entry, reader) if self._hashes else b""
        self.of.setdefault(member, {})[entry.name] = Item(entry.name, str(entry.kind), entry.size, entry.link, value)

    @staticmethod
    def _value(entry: TarEntry, reader: TarReader) -> bytes:
        content = b""
        if entry.kind is Kind.FILE:
            hashed = hashlib.sha256()
            for part in reader.pieces():
                # A hole counts by its length: to hash its zeros would take what an archive pays nothing for.
                hashed.update(b"hole %d" % part if isinstance(part, int) else part)
            content = hashed.digest()
        metadata = (
            entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.link, entry.major, entry.minor,
            tuple(sorted(entry.xattrs.items())), entry.size, content,
        )  # fmt: skip
        return hashlib.sha256(repr(metadata).encode()).digest()
