"""Chosen files of an image, taken from its layers without unpacking it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from oci_builder.model.digest import Digest
from oci_builder.model.errors import PolicyError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Layer
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.layers_base import BaseStore
from oci_builder.rootfs.layers_plan import parents
from oci_builder.rootfs.whiteout import OPAQUE, hidden_by
from oci_builder.wire.compress import Compression, decode
from oci_builder.wire.tar import Kind, TarEntry, TarReader

Choose = Callable[[bytes], bool]


def extract_files(
    layers: Sequence[Layer],
    store: BaseStore,
    choose: Choose,
    target: Path,
    *,
    limits: Limits = DEFAULT_LIMITS,
    threads: int = 2,
    emit: Emit = silent,
) -> frozenset[bytes]:
    """Write the regular files that ``choose`` says yes to, below ``target``, as the layers together have them.

    Links, devices and whatever a higher layer hides are not written. A file gets 0755 where its owner may execute it,
    else 0644.

    Args:
        layers: lowest first.
        choose: asked with clean paths of the image.
        target: an empty folder; whatever an image says, nothing outside it is touched.

    Returns:
        Clean paths of what was written.

    Raises:
        FormatError, PolicyError: what is wrong with a layer (``tar.*``, ``gzip.*``, ``entry.whiteout``, ``limit.*``);
            ``entry.link_target`` for a link to nothing, ``entry.parent`` for a file with something below it.
        IntegrityError: ``blob.missing``, ``blob.digest``.
        OSError: the disk.
    """
    merge = _Merge(choose, target)
    for number, layer in reversed(list(enumerate(layers, 1))):
        where = f"base layer {number}"
        task = f"take files from {where}"
        emit(Event("start", task, total=layer.tar_size))
        merge.layer(partial(_read, layer, store, where, limits, threads), where)
        emit(Event("done", task))
    merge.finish()
    return frozenset(merge.written)


def _read(layer: Layer, store: BaseStore, where: str, limits: Limits, threads: int) -> TarReader:
    compression: Compression = layer.compression  # type: ignore[assignment]
    blob = store.open(Digest.parse(layer.descriptor.digest))
    return TarReader(decode(blob, compression, limits=limits, where=where, threads=threads), limits=limits, where=where)


class _Merge:
    """Goes through layers from the highest down: what was seen first wins."""

    def __init__(self, choose: Choose, target: Path) -> None:
        self.choose = choose
        self.target = target
        self.written: set[bytes] = set()
        self.fresh: set[bytes] = set()  # written from the layer at hand
        self.linked: dict[bytes, list[bytes]] = {}  # file whose content is still to come -> names that it also has
        self.gone: set[bytes] = set()  # with all below them
        self.emptied: set[bytes] = set()  # all below them
        self.folders: set[bytes] = set()

    def layer(self, read: Callable[[], TarReader], where: str) -> None:
        """Apply one layer, below those so far."""
        inherited, self.linked = self.linked, {}
        self.fresh = set()
        gone, emptied, folders = set[bytes](), set[bytes](), set[bytes]()
        reader = read()
        for entry in reader:
            hidden = hidden_by(entry, where)
            if hidden is not None:
                folder, name = hidden
                (emptied if name == OPAQUE else gone).add(b"/".join(filter(None, (folder, name))))
                continue
            (folders if entry.kind is Kind.DIR else gone).add(entry.name)
            self._entry(reader, entry, inherited)
        self.gone |= gone
        self.emptied |= emptied
        self.folders |= folders
        if self.linked.keys() & gone:
            self._again(read())
        for name, names in inherited.items():
            self.linked.setdefault(name, []).extend(names)

    def finish(self) -> None:
        """All layers have been seen.

        Raises:
            PolicyError: ``entry.link_target``.
        """
        for target, names in self.linked.items():
            raise PolicyError(
                "entry.link_target", f"{show(names[0])} is a hard link to {show(target)}, which no layer has",
                where=show(names[0]),
            )  # fmt: skip

    def _entry(self, reader: TarReader, entry: TarEntry, inherited: dict[bytes, list[bytes]]) -> None:
        names = list(inherited.get(entry.name, ()))
        if self.choose(entry.name) and self._visible(entry.name):
            names.insert(0, entry.name)
        if entry.kind is Kind.FILE and names:
            self._write(reader, entry, names)
            inherited.pop(entry.name, None)
        elif entry.kind is Kind.HARDLINK and names and entry.link in self.fresh:
            self._copy(self.target / os.fsdecode(entry.link), names)
        elif entry.kind is Kind.HARDLINK and names:
            self.linked.setdefault(entry.link, []).extend(names)

    def _again(self, reader: TarReader) -> None:
        """A second time through a layer for hard links to files that nobody chose."""
        for entry in reader:
            if entry.kind is Kind.FILE and entry.name in self.linked:
                self._write(reader, entry, self.linked.pop(entry.name))

    def _visible(self, name: bytes) -> bool:
        above = list(parents(name))
        hidden = name in self.gone or name in self.folders or b"" in self.emptied
        return not hidden and not any(folder in self.gone or folder in self.emptied for folder in above)

    def _write(self, reader: TarReader, entry: TarEntry, names: list[bytes]) -> None:
        first = self.target / os.fsdecode(names[0])
        with _no_conflict(names[0]):
            first.parent.mkdir(parents=True, exist_ok=True)
            with first.open("wb") as file:
                for chunk in reader.data():
                    file.write(chunk)
            first.chmod(0o755 if entry.mode & 0o100 else 0o644)
        self._copy(first, names[1:])
        self.written.add(names[0])
        self.fresh.add(names[0])

    def _copy(self, source: Path, names: list[bytes]) -> None:
        for name in names:
            place = self.target / os.fsdecode(name)
            with _no_conflict(name):
                place.parent.mkdir(parents=True, exist_ok=True)
                if place != source:
                    shutil.copy(source, place)
            self.written.add(name)
            self.fresh.add(name)


@contextmanager
def _no_conflict(name: bytes) -> Iterator[None]:
    try:
        yield
    except (NotADirectoryError, IsADirectoryError, FileExistsError):
        raise PolicyError(
            "entry.parent", f"{show(name)}: a file of the image has something below it", where=show(name)
        ) from None
