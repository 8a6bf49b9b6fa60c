"""Whether a build has anything to do: the identity of all inputs, and of the files that they gave last time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.errors import SpecError, show
from oci_builder.model.jsontext import dump_json
from oci_builder.model.spec import DockerBase, HostBase, OciBase, RootfsBase, Spec
from oci_builder.rootfs.host import host_plan
from oci_builder.rootfs.layers import layer_keys
from oci_builder.rootfs.scan_fingerprint import fingerprint, fingerprints
from oci_builder.store.cache import BuildCache
from oci_builder.store.locks import alone_in
from oci_builder.store.writeback import sync

# No tier can have this name.
_FILES = "files/"


def input_key(
    spec: Spec, folder: Path, tiers: Mapping[str, Path], codec: Mapping[str, Any], version: str,
    linked: Collection[Path] = (),
) -> bytes | None:  # fmt: skip
    """A digest over everything that the outputs depend on, by stat identity; ``None`` when it cannot be known.

    Args:
        linked: those of the tiers' folders that the cache's own environments share their files with.
    """
    parts: list[Any] = [spec.canonical().decode(), str(folder), version, dict(codec)]
    match spec.base:
        case HostBase():
            host = _host_identity(spec)
            if host is None:
                return None
            parts.append(host)
        case RootfsBase() as base:
            parts.append(identity(folder / base.rootfs, base.exclude))
        case OciBase() as base:
            parts.append(identity(folder / base.oci))
        case DockerBase() as base:
            parts.append(identity(folder / base.docker))
    trees = dict(sorted(tiers.items()))
    if spec.files is not None:
        trees[_FILES] = folder / spec.files
        if not trees[_FILES].is_dir():
            raise SpecError("spec.path", f"files: there is no folder {show(str(trees[_FILES]))}", where="files")
    parts += zip(trees, fingerprints(list(trees.values()), linked), strict=True)
    return hashlib.sha256(b"inputs" + dump_json(parts)).digest()


def identity(path: Path, exclude: Sequence[str] = ()) -> Any:
    """A file's identity by its stat, a folder's by that of everything in it.

    Raises:
        SpecError: ``spec.path``: nothing is there.
    """
    path = path.resolve()
    if path.is_dir():
        return fingerprint(path, exclude)
    try:
        return _stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise SpecError("spec.path", f"no such base: {show(str(path))}", where=str(path)) from None


def _host_identity(spec: Spec) -> str | None:
    """Of all that the running machine gives. Which files those are is found out anew: any of them may lead to others.

    Raises:
        SpecError: as ``host_plan``.
    """
    key, _ = layer_keys(host_plan(epoch=spec.epoch, limits=spec.effective_limits), b"")
    return None if key is None else key.hex()


def _stat(path: Path) -> list[int]:
    found = os.stat(path)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


class Outputs:
    """The files of an output folder, as a build left them."""

    def __init__(self, out: Path, names: Sequence[str], cache: BuildCache) -> None:
        self.out, self.names, self.cache = out, names, cache

    def known(self, key: bytes) -> dict[str, Any] | None:
        """The JSON records, when these inputs gave exactly the files that lie here."""
        record = self.cache.record(self._key(key))
        try:
            if record is None or record["files"] != self._state():
                return None
            return {n: json.loads((self.out / n).read_bytes()) for n in self.names if n.endswith(".json")}
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def blobs(self, key: bytes) -> list[Digest]:
        """What these inputs were made into, as ``publish`` was told."""
        record = self.cache.record(self._key(key))
        named = record.get("blobs") if isinstance(record, dict) else None
        return [Digest.parse(text) for text in named] if isinstance(named, list) else []

    def remember(self, key: bytes, blobs: Iterable[Digest] = ()) -> None:
        """These inputs gave the files that lie here now."""
        self.cache.remember(self._key(key), {"files": self._state(), "blobs": sorted(blobs)})

    def publish(self, staging: Path, key: bytes | None = None, blobs: Iterable[Digest] = ()) -> None:
        """Move the files from ``staging`` here, and remember that ``key``'s inputs gave them.

        Old records go first and new ones come last, so that no record tells of other bytes. Builds that publish here at
        the same time wait for each other: the files that stay are all of one of them.

        Args:
            blobs: of the store, that the files were made of.

        Raises:
            OSError: from the disk.
        """
        records = [name for name in self.names if name.endswith(".json")]
        others = [name for name in self.names if name not in records]
        with alone_in(self.out) as folder:
            for name in records:
                (self.out / name).unlink(missing_ok=True)
            for name in (*others, *records):
                if name in records:  # an archive that a power cut damaged is found out by its SHA-256 there
                    sync(staging / name)
                self._move(staging / name, name)
            os.fsync(folder)
            if key is not None:
                self.remember(key, blobs)

    def _move(self, path: Path, name: str) -> None:
        try:
            os.replace(path, self.out / name)
        except IsADirectoryError as error:
            # Not the place in staging, which is gone when anybody reads of it.
            raise OSError(error.errno, error.strerror, str(self.out / name)) from None

    def _key(self, key: bytes) -> bytes:
        return hashlib.sha256(b"outputs" + key + os.fsencode(self.out.resolve())).digest()

    def _state(self) -> dict[str, list[int]]:
        return {name: _stat(self.out / name) for name in self.names}
