"""A base's file tree, by name, from its layers: what planning must not run over."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from oci_builder.model.digest import Digest
from oci_builder.model.errors import FormatError
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Layer
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.layers_plan import NO_BASE, BaseTree, parents
from oci_builder.rootfs.scan import SourceEntry
from oci_builder.wire.compress import Compression, decode
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import Kind, TarEntry, TarReader

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"


class BaseStore(Protocol):
    """What reading a base needs of a blob store."""

    def open(self, digest: Digest) -> FileRange:
        """The blob, verified."""

    def recall(self, digest: Digest, key: str) -> Any:
        """A record kept beside a blob."""

    def remember(self, digest: Digest, key: str, value: Any) -> None:
        """Keep a record beside a blob."""


def read_base(
    layers: Sequence[Layer],
    store: BaseStore,
    *,
    limits: Limits = DEFAULT_LIMITS,
    threads: int = 2,
    emit: Emit = silent,
) -> BaseTree:
    """What these layers hold together, lowest first; read once, then recalled from the store.

    Raises:
        FormatError, PolicyError: what is wrong with a layer (``tar.*``, ``gzip.*``, ``limit.*``, ...).
        IntegrityError: ``blob.missing``, ``blob.digest``.
    """
    if not layers:
        return NO_BASE
    top = Digest.parse(layers[-1].descriptor.digest)
    key = "base-" + hashlib.sha256("".join(layer.diff_id for layer in layers).encode()).hexdigest()[:16]
    try:
        return base_from_json(store.recall(top, key))
    except FormatError:
        pass
    collector = BaseCollector()
    for number, layer in enumerate(layers):
        task = f"read base layer {number + 1}"
        emit(Event("start", task, total=layer.tar_size))
        compression: Compression = layer.compression  # type: ignore[assignment]
        chunks = decode(
            store.open(Digest.parse(layer.descriptor.digest)), compression, limits=limits, where=task, threads=threads
        )
        collector.apply(TarReader(chunks, limits=limits, where=task))
        emit(Event("done", task))
    tree = collector.tree()
    store.remember(top, key, base_to_json(tree))
    return tree


class BaseCollector:
    """Applies layers, lowest first, to an empty tree of names (image-spec layer.md)."""

    def __init__(self) -> None:
        self._folders: dict[bytes, SourceEntry] = {}
        self._symlinks: dict[bytes, bytes] = {}
        self._files: dict[bytes, set[bytes]] = {}
        # What the three tables know directly below a folder: a deletion must not look at every name of the base.
        self._below: dict[bytes, set[bytes]] = {}

    def apply(self, entries: Iterable[TarEntry]) -> None:
        """Apply one layer. Whiteouts hide lower layers only, wherever in the layer they stand."""
        added: dict[bytes, TarEntry] = {}
        for entry in entries:
            folder, _, name = entry.name.rpartition(b"/")
            if name == _OPAQUE:
                self._remove(folder, keep=True)
            elif name.startswith(_WHITEOUT):
                self._remove(folder + b"/" + name[4:] if folder else name[4:])
            else:
                added[entry.name] = entry
        for entry in added.values():
            if entry.name:
                self._add(entry)

    def _add(self, entry: TarEntry) -> None:
        name = entry.name
        folder, _, last = name.rpartition(b"/")
        if entry.kind is not Kind.DIR and (name in self._folders or name in self._files):
            self._remove(name)
        beside = self._beside(folder)
        self._symlinks.pop(name, None)
        if entry.kind in (Kind.DIR, Kind.SYMLINK):
            beside.discard(last)
        else:
            beside.add(last)
        if entry.kind is Kind.SYMLINK:
            self._symlinks[name] = entry.link
            self._note(name)
        elif entry.kind is Kind.DIR:
            self._folders[name] = _folder(entry)
            self._note(name)

    def _beside(self, folder: bytes) -> set[bytes]:
        known = self._files.get(folder)
        if known is None:
            known = self._files[folder] = set()
            self._note(folder)
        return known

    def _note(self, path: bytes) -> None:
        """Let every folder above know of it."""
        while path:
            above, _, _ = path.rpartition(b"/")
            beside = self._below.setdefault(above, set())
            if path in beside:
                return
            beside.add(path)
            path = above

    def _remove(self, path: bytes, keep: bool = False) -> None:
        pending = list(self._below.pop(path, ()))
        while pending:
            one = pending.pop()
            pending += self._below.pop(one, ())
            self._forget(one)
        if keep:
            self._files.pop(path, None)
            return
        self._forget(path)
        folder, _, last = path.rpartition(b"/")
        self._below.get(folder, set()).discard(path)
        self._files.get(folder, set()).discard(last)

    def _forget(self, path: bytes) -> None:
        self._folders.pop(path, None)
        self._symlinks.pop(path, None)
        self._files.pop(path, None)

    def tree(self) -> BaseTree:
        """What has come of it."""
        files = {folder: tuple(sorted(names)) for folder, names in self._files.items()}
        for name in [*self._folders, *self._files]:
            for folder in [*parents(name), name]:
                files.setdefault(folder, ())
        return BaseTree(dict(self._folders), dict(self._symlinks), files)


def _folder(entry: TarEntry) -> SourceEntry:
    xattrs = tuple(sorted(entry.xattrs.items()))
    return SourceEntry(
        entry.name, Kind.DIR, entry.mode, entry.uid, entry.gid, 0, entry.mtime_ns, 0, 0, 0, 2, b"", xattrs
    )


def base_to_json(tree: BaseTree) -> dict[str, Any]:
    """A JSON form, so that a base's layers are read for this once; paths in Latin-1, which every byte survives."""
    folders = {
        name.decode("latin-1"): [
            e.mode, e.uid, e.gid, e.mtime_ns, {k.decode("latin-1"): v.decode("latin-1") for k, v in e.xattrs}
        ]
        for name, e in tree.folders.items()
    }  # fmt: skip
    links = {name.decode("latin-1"): target.decode("latin-1") for name, target in tree.symlinks.items()}
    files = {name.decode("latin-1"): [n.decode("latin-1") for n in names] for name, names in tree.files.items()}
    return {"folders": folders, "symlinks": links, "files": files}


def base_from_json(value: Mapping[str, Any]) -> BaseTree:
    """The inverse of ``base_to_json``.

    Raises:
        FormatError: ``json.shape`` when the value is not one that ``base_to_json`` gave.
    """
    try:
        folders = {}
        for text, (mode, uid, gid, mtime_ns, attributes) in value["folders"].items():
            name = text.encode("latin-1")
            xattrs = {key.encode("latin-1"): item.encode("latin-1") for key, item in attributes.items()}
            folders[name] = _folder(
                TarEntry(name, Kind.DIR, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns, xattrs=xattrs)
            )
        links = {name.encode("latin-1"): target.encode("latin-1") for name, target in value["symlinks"].items()}
        files = {
            name.encode("latin-1"): tuple(one.encode("latin-1") for one in names)
            for name, names in value["files"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise FormatError("json.shape", "a record of a base's folders is not readable") from None
    return BaseTree(folders, links, files)
