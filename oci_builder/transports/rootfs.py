"""A base made of a root file system: a folder, or a tar of one. An image of one layer comes of it.

A folder is scanned and packed with its owners; a tar is a layer already and keeps its bytes, checked by our reader and
compressed where it is not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from oci_builder.judge.hashing import Hashers
from oci_builder.judge.layer import read_layer
from oci_builder.judge.options import Findings, JudgeOptions
from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import FormatError, OciBuilderError, PolicyError, SpecError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Image, Layer
from oci_builder.model.jsontext import dump_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.layers import LayerStore, WriteOptions, write_layer
from oci_builder.rootfs.layers_assemble import assemble, place_tree
from oci_builder.rootfs.layers_plan import Normal
from oci_builder.rootfs.scan import BASE_POLICY, changed, input_failure, scan_tree
from oci_builder.rootfs.tree_log import judge_tree
from oci_builder.rootfs.whiteout import hidden_by
from oci_builder.wire.compress import BLOCK, Compression, encode_layer, sniff
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import TarEntry, TarReader

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SETTINGS = {"architecture": "amd64", "os": "linux", "config": {"Env": [f"PATH={PATH}"]}}
NAME = "rootfs"
_XZ, _BZIP2 = b"\xfd7zXZ", b"BZh"


@dataclass(frozen=True, slots=True)
class RootfsOptions:
    """How a root file system becomes a base.

    Attributes:
        exclude: ``fnmatch`` patterns below a folder; a tar takes none, its bytes stay.
        epoch: newest time in a folder's layer, seconds since 1970.
        write: codec, threads and cache.
        limits: bounds on the tree or tar.
    """

    exclude: tuple[str, ...] = ()
    epoch: int = 0
    write: WriteOptions | None = None
    limits: Limits = DEFAULT_LIMITS


def load_rootfs(path: Path, store: LayerStore, options: RootfsOptions | None = None, emit: Emit = silent) -> Image:
    """The image of one layer. Idempotent; the layer is in the store afterwards.

    Raises:
        SpecError: ``scan.root`` (nothing there), ``spec.field`` (a tar with ``exclude``), ``scan.changed``.
        FormatError, PolicyError: what is wrong with a tree or tar (``tar.*``, ``gzip.*``, ``entry.*``, ``limit.*``).
        TransportError: ``io.*``.
    """
    options = options or RootfsOptions()
    if path.is_dir():
        layer = _folder(path, store, options, emit)
    elif path.is_file():
        layer = _tar(path, store, options, emit)
    else:
        raise SpecError("scan.root", f"no root file system at {show(str(path))}: a folder or a tar", where=str(path))
    return Image(SETTINGS, (layer,), base_layers=1)


def _folder(path: Path, store: LayerStore, options: RootfsOptions, emit: Emit) -> Layer:
    policy = replace(BASE_POLICY, exclude=options.exclude, excluder="base.exclude")
    tree = scan_tree(path, emit=emit, limits=options.limits, policy=policy)
    normal = Normal(options.epoch, None, None)
    return write_layer(assemble(NAME, place_tree(tree, b"", normal), normal=normal), store, options.write, emit)


def _tar(path: Path, store: LayerStore, options: RootfsOptions, emit: Emit) -> Layer:
    if options.exclude:
        raise SpecError(
            "spec.field", f"base.exclude: {show(str(path))} is a tar, whose bytes stay; unpack it to leave paths out",
            where="base.exclude",
        )  # fmt: skip
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise input_failure(error, os.fsencode(path)) from None
    try:
        return _TarLayer(path, descriptor, store, options, emit).layer()
    except OSError as error:
        raise input_failure(error, os.fsencode(path)) from None
    finally:
        os.close(descriptor)


class _TarLayer:
    """A tar, checked and brought into the store."""

    def __init__(self, path: Path, descriptor: int, store: LayerStore, options: RootfsOptions, emit: Emit) -> None:
        self.path = path
        self.where = show(str(path))
        self.store = store
        self.limits = options.limits
        self.write = options.write or WriteOptions()
        self.emit = emit
        self.before = os.fstat(descriptor)
        self.source = FileRange(descriptor, 0, self.before.st_size)
        head = self.source.pread(8, 0)
        if head.startswith((_XZ, _BZIP2)):
            raise FormatError(
                "media.compression", f"{self.where}: layers are plain, gzip or zstd; decompress it first",
                where=self.where, expected="tar, gzip or zstd", actual="xz" if head.startswith(_XZ) else "bzip2",
            )  # fmt: skip
        self.compression: Compression = sniff(head)
        self.padded = False

    def layer(self) -> Layer:
        asked = [self._identity(), self.write.codec.describe(), list(astuple(self.limits))]
        key = hashlib.sha256(b"rootfs tar" + dump_json(asked)).digest()
        cache = None if self.write.check else self.write.cache
        made = None if cache is None else self._known(cache.record(key))
        if made is None:
            task = f"base {self.path.name}"
            self.emit(Event("start", task, total=self.source.size))
            diff_id, tar_size = self._check(task)
            made = self._encode(diff_id) if self.compression == "identity" else self._copy()
            made |= {"diff_id": diff_id, "tar_size": tar_size}
            if self._identity(os.fstat(self.source.fd)) != self._identity():
                raise changed(os.fsencode(self.path), "was written to")
            known = {"diff_id": diff_id, "tar_size": tar_size}
            self.store.remember(Digest(made["digest"]), "tar", known | ({"padded": True} if self.padded else {}))
            if self.write.cache is not None:
                self.write.cache.remember(key, made)
            self.emit(Event("done", task))
        codec = self.write.codec.name if self.compression == "identity" else self.compression
        descriptor = Descriptor(media_type=media.oci_layer(codec), digest=Digest(made["digest"]), size=made["size"])
        history = {"created_by": "oci-builder: root file system"}
        return Layer(descriptor, Digest(made["diff_id"]), made["tar_size"], history)

    def _identity(self, status: os.stat_result | None = None) -> list[int]:
        found = status or self.before
        return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]

    def _known(self, record: Any) -> dict[str, Any] | None:
        try:
            known = self.store.has(Digest.parse(record["digest"])) and bool(Digest.parse(record["diff_id"]))
            return dict(record) if known and record["size"] >= 0 and record["tar_size"] > 0 else None
        except (TypeError, KeyError, ValueError, OciBuilderError):
            return None

    def _check(self, task: str) -> tuple[Digest, int]:
        """Judge the tar as the layer that it becomes; its diff_id and size."""

        def tap() -> Iterator[bytes]:
            for chunk in self.source.chunks():
                self.emit(Event("advance", task, len(chunk)))
                yield chunk

        findings = Findings(self.where)
        options = JudgeOptions(limits=self.limits, threads=self.write.threads, entries=self._refuse_whiteout)
        with Hashers() as hashers:
            facts = read_layer(tap(), self.where, options, hashers, hashers.new("blob"))
        for problem in facts.problems:
            findings.take(problem)
        findings.require()
        refusal = judge_tree([facts.tree], self.where, self.limits)
        if refusal is not None:
            raise refusal
        self.padded = facts.padded
        for code, message in facts.warnings:
            self._warn(code, message)
        if facts.diff_id is None:
            raise AssertionError("a layer without problems was read to its end")
        return facts.diff_id, facts.tar_size

    def _refuse_whiteout(self, _member: str, entry: TarEntry, _tar: TarReader) -> None:
        """A root hides nothing of what is below it; a file of such a name would vanish, and another with it (C4-13)."""
        if hidden_by(entry, self.where) is not None:
            place = f"{self.where}: {show(entry.name)}"
            raise PolicyError("entry.whiteout", f"{place}: a whiteout's name in a root file system", where=place)

    def _warn(self, code: str, message: str) -> None:
        self.emit(Event("warning", f"base {self.path.name}", message=f"[{code}] {message}"))

    def _encode(self, diff_id: Digest) -> dict[str, Any]:
        with self.store.ingest("rootfs") as ingest:
            made = encode_layer(self.source.chunks(BLOCK), ingest.write, self.write.codec, self.write.threads)
            if made.diff_id != diff_id:
                raise changed(os.fsencode(self.path), "was written to")
            ingest.commit(made.digest)
        return {"digest": made.digest, "size": made.size}

    def _copy(self) -> dict[str, Any]:
        hashed = hashlib.sha256()
        with self.store.ingest("rootfs") as ingest:
            for chunk in self.source.chunks():
                hashed.update(chunk)
                ingest.write(chunk)
            digest = Digest.from_hex(hashed.hexdigest())
            ingest.commit(digest)
        return {"digest": digest, "size": self.source.size}
