"""Write a planned layer into the store, doing no work that an earlier build has done.

Three short cuts, each giving the bytes of the long way:

1. every header and every file's identity is as in an earlier build: its blob is taken, nothing is read;
2. inodes or ctimes differ (a rebuilt environment links its files anew): the tar is read and hashed, and the blob taken
   when the diff_id is the same;
3. some blocks are as in an earlier layer: their compressed form is copied, the rest is compressed. Where inodes or
   ctimes differ, a block counts as the same only when inflating its compressed form gives its very bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import OciBuilderError
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Layer
from oci_builder.model.jsontext import dump_json
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.rootfs.layers_blocks import RULE, Reader, Recipe, layer_blocks, recipes
from oci_builder.rootfs.layers_plan import LayerPlan
from oci_builder.wire.compress import Codec, EncodedLayer, Options, decode_chunks, encode_layer
from oci_builder.wire.compress.codecs import crc32
from oci_builder.wire.source import FileRange

__all__ = ["LayerCache", "LayerStore", "WriteOptions", "layer_blocks", "write_layer"]

DEFAULT_CODEC = Codec()
BlockPlace = tuple[str, int, int]
# Blocks between two requests to the C library to return free memory to the system.
_TRIM_EVERY = 256
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


class Ingest(Protocol):
    """A blob that is being written."""

    def truncate(self) -> None:
        """Begin again from nothing."""

    def write(self, data: bytes) -> object:
        """Append."""

    def commit(self, digest: Digest | None = None) -> Digest:
        """Make it visible."""


class LayerStore(Protocol):
    """What writing a layer needs of a blob store."""

    def has(self, digest: Digest) -> bool:
        """Whether the blob is there."""

    def open(self, digest: Digest) -> FileRange:
        """The blob, verified."""

    def prove(self, digests: Iterable[Digest], emit: Emit = silent) -> None:
        """Hash blobs that nothing but their times vouches for."""

    def ingest(
        self, ref: str, expected: Digest | None = None, size: int | None = None
    ) -> AbstractContextManager[Ingest]:
        """A new blob."""

    def remember(self, digest: Digest, key: str, value: Any) -> None:
        """Keep a record beside a blob."""


class LayerCache(Protocol):
    """What earlier builds learnt."""

    def record(self, key: bytes) -> Any:
        """A remembered JSON value."""

    def remember(self, key: bytes, value: Any) -> None:
        """Keep a JSON value."""

    def block(self, key: bytes) -> BlockPlace | None:
        """Where a compressed block lies."""

    def remember_blocks(self, blocks: list[tuple[bytes, BlockPlace]]) -> None:
        """Keep places of blocks."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How layers are written.

    Attributes:
        codec: compression.
        threads: compressing threads.
        cache: what earlier builds learnt, and where this one's results go; ``None`` takes the long way.
        check: believe no file times: read everything again.
    """

    codec: Codec = DEFAULT_CODEC
    threads: int = 2
    cache: LayerCache | None = None
    check: bool = False


def write_layer(plan: LayerPlan, store: LayerStore, options: WriteOptions | None = None, emit: Emit = silent) -> Layer:
    """Write one layer. Idempotent: the same plan and files give the same blob, which is in the store afterwards.

    Raises:
        SpecError: ``scan.changed``.
        TransportError: ``io.*``.
    """
    task = f"layer {plan.name}"
    emit(Event("start", task, total=plan.content_size))
    layer = _Writer(plan, store, options or WriteOptions(), emit, task).run()
    emit(Event("done", task))
    return layer


class _Writer:
    """One layer on its way into the store."""

    def __init__(self, plan: LayerPlan, store: LayerStore, options: WriteOptions, emit: Emit, task: str) -> None:
        self.plan = plan
        self.store = store
        self.options = options
        self.cache = options.cache
        self.emit = emit
        self.task = task
        self.about = RULE + dump_json(options.codec.describe())

    def run(self) -> Layer:
        exact, shape = layer_keys(self.plan, self.about)
        made = None
        if self.cache is not None:
            if exact is not None and not self.options.check:
                made = self._known(exact, "unchanged")
            if made is None:
                made = self._same_tar(shape)
        made = made or self._encode()
        if self.cache is not None:
            for key in (exact, shape):
                if key is not None:
                    self.cache.remember(key, made)
        return self._layer(made)

    def _known(self, key: bytes, why: str) -> dict[str, Any] | None:
        """The record of an earlier build, when its blob is still there."""
        assert self.cache is not None
        record = self.cache.record(key)
        try:
            digest = Digest.parse(record["digest"])
            Digest.parse(record["diff_id"])
            if int(record["size"]) < 0 or int(record["tar_size"]) < 0 or not self.store.has(digest):
                return None
        except (TypeError, KeyError, ValueError, OciBuilderError):
            return None
        self.emit(Event("note", self.task, message=f"{why}, taken from the cache"))
        return dict(record)

    def _same_tar(self, shape: bytes) -> dict[str, Any] | None:
        known = self._known(shape, "looks unchanged")
        if known is None:
            return None
        hashed = hashlib.sha256()
        for block in layer_blocks(self.plan):
            hashed.update(block)
            self.emit(Event("advance", self.task, len(block)))
        return known if known["diff_id"] == Digest.from_hex(hashed.hexdigest()) else None

    def _encode(self) -> dict[str, Any]:
        blocks = _Blocks(self.plan, self.store, self.options, self.about, self.emit)
        with self.store.ingest(f"layer-{self.plan.name}") as ingest:
            made = encode_layer(
                blocks.read(self.task), ingest.write, self.options.codec, self.options.threads,
                known=blocks.known,
            )  # fmt: skip
            ingest.commit(made.digest)
        blocks.remember(made)
        # Where the end marker's own member begins: what an archive of several layers leaves out.
        marker = made.members[-1].blob_offset
        tar = {"diff_id": made.diff_id, "tar_size": made.tar_size}
        self.store.remember(made.digest, "tar", {**tar, "marker": marker})
        return {**tar, "digest": made.digest, "size": made.size}

    def _layer(self, made: dict[str, Any]) -> Layer:
        created_by = f"oci-builder: {' and '.join(self.plan.tiers) or self.plan.name}"
        descriptor = Descriptor(
            media_type=media.oci_layer(self.options.codec.name), digest=Digest(made["digest"]), size=made["size"]
        )
        history = {"created_by": created_by}
        return Layer(descriptor, Digest(made["diff_id"]), made["tar_size"], history, self.plan.name)


class _Blocks:
    """The blocks of a layer as they are read, with the places where an earlier build left some of them compressed."""

    def __init__(self, plan: LayerPlan, store: LayerStore, options: WriteOptions, about: bytes, emit: Emit) -> None:
        self.plan = plan
        self.store = store
        self.cache = options.cache
        self.trust = not options.check
        self.about = about
        self.codec = options.codec
        self.keys: list[tuple[bytes | None, bytes]] = []
        self.latest = b""
        self.opened: dict[str, FileRange | None] = {}
        self.emit = emit

    def read(self, task: str) -> Iterator[bytes]:
        """The blocks."""
        with Reader() as reader:
            for number, recipe in enumerate(recipes(self.plan), 1):
                if number % _TRIM_EVERY == 0 and _trim is not None:
                    # Compressors leave glibc's heap in pieces: over 7.6 GB of real layers the peak was 409 MiB,
                    # and is 202 MiB this way.
                    _trim(0)
                if self.cache is not None:
                    self.keys.append(block_keys(recipe, self.about))
                block = reader.block(recipe)
                self.emit(Event("advance", task, len(block)))
                self.latest = block
                yield block

    def known(self, index: int) -> bytes | None:
        """The compressed form of the block that was read last, when an earlier layer has it."""
        if self.cache is None:
            return None
        exact, shape = self.keys[index]
        if exact is not None and self.trust and (member := self._member(exact)) is not None:
            return member if is_member_of(member, self.latest, self.codec) else None
        member = self._member(shape)
        return member if member is not None and inflates_to(member, self.latest, self.codec) else None

    def _member(self, key: bytes) -> bytes | None:
        place = self.cache.block(key) if self.cache is not None else None
        if place is None:
            return None
        digest, offset, size = place
        if digest not in self.opened:
            self.opened[digest] = self._open(digest)
        blob = self.opened[digest]
        if blob is None or not 0 <= offset < offset + size <= blob.size:
            return None
        return blob.pread(size, offset)

    def _open(self, digest: str) -> FileRange | None:
        try:
            parsed = Digest.parse(digest)
            self.store.prove([parsed], self.emit)
            return self.store.open(parsed)
        except OciBuilderError:
            return None

    def remember(self, made: EncodedLayer) -> None:
        """Note where this layer's blocks lie, for later layers."""
        if self.cache is not None:
            found = zip(self.keys, made.members, strict=True)
            places = [
                (key, (str(made.digest), member.blob_offset, member.blob_size))
                for keys, member in found for key in keys if key is not None
            ]  # fmt: skip
            self.cache.remember_blocks(places)


def is_member_of(member: bytes, block: bytes, codec: Codec) -> bool:
    """Whether a member that an earlier build made (with ``codec``) is this block's, and not another one's."""
    if codec.name != "gzip":
        return inflates_to(member, block, codec)
    # Its blob was hashed in this run, so a wrong place is all that can be wrong; crc32 costs a twentieth of inflating.
    trailer = crc32(block).to_bytes(4, "little") + len(block).to_bytes(4, "little")
    return member[:2] == b"\x1f\x8b" and member[-8:] == trailer


def inflates_to(member: bytes, block: bytes, codec: Codec) -> bool:
    """Whether a member's content is exactly this block."""
    try:
        return b"".join(decode_chunks([member], codec.name, Options(DEFAULT_LIMITS, "block"))) == block
    except OciBuilderError:
        return False


def layer_keys(plan: LayerPlan, about: bytes) -> tuple[bytes | None, bytes]:
    """Cache keys of a layer: by all entries and the identity of all content, and by entries and exact times alone.

    The second one survives linking files anew, and a file that was written to has another. The
    first is None when a file was too fresh at the scan for its times to vouch for it.
    """
    exact, shape = hashlib.sha256(b"exact" + about), hashlib.sha256(b"shape" + about)
    settled = True
    for item in plan.items:
        facts = item.facts
        shape.update(facts)
        exact.update(facts)
        if item.carries:
            identity = item.identity
            if item.data is not None:
                identity = item.data
            shape.update(item.data or b"%d" % item.source.mtime_ns)
            if identity is None:
                settled = False
            else:
                exact.update(b"%d " % len(identity) + identity)
    return (exact.digest() if settled else None), shape.digest()


def block_keys(recipe: Recipe, about: bytes) -> tuple[bytes | None, bytes]:
    """Cache keys of a block, as ``layer_keys``: with the identity of its content, and with exact times alone."""
    exact, shape = hashlib.sha256(b"block" + about), hashlib.sha256(b"block shape" + about)
    settled = True
    for piece in recipe:
        about_piece = b"%d %d %d %d;" % (len(piece.header), piece.start, piece.size, piece.last) + piece.header
        exact.update(about_piece)
        shape.update(about_piece)
        if piece.item is not None:
            data = piece.item.data
            identity = piece.item.identity if data is None else hashlib.sha256(data).digest()
            shape.update(b"%d %d " % (piece.item.source.size, piece.item.source.mtime_ns))
            if identity is None:
                settled = False
            else:
                exact.update(b"%d " % len(identity) + identity)
    return (exact.digest() if settled else None), shape.digest()
