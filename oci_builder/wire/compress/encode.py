"""Blocks in, one compressed layer out: a pipeline whose bytes do not depend on its threads."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from oci_builder.model.digest import Digest
from oci_builder.wire.compress.codecs import BLOCK, Codec
from oci_builder.wire.compress.gzipframe import encode_stored


@dataclass(frozen=True, slots=True)
class Member:
    """One gzip member, zstd frame or plain block of a layer: where it lies in the tar and in the blob (bytes)."""

    tar_offset: int
    tar_size: int
    blob_offset: int
    blob_size: int


@dataclass(frozen=True, slots=True)
class EncodedLayer:
    """What ``encode_layer`` made.

    Attributes:
        digest, size: of the blob.
        diff_id, tar_size: of the tar.
        members: in order, without gaps.
    """

    digest: Digest
    size: int
    diff_id: Digest
    tar_size: int
    members: tuple[Member, ...]


def encode_layer(
    blocks: Iterable[bytes | memoryview],
    sink: Callable[[bytes], object],
    codec: Codec,
    threads: int = 1,
    known: Callable[[int], bytes | None] | None = None,
) -> EncodedLayer:
    """Compress each element of ``blocks`` as a member of its own and give the members to ``sink``, in order.

    Hashing, compression and writing overlap; the same blocks give the same bytes with any number of threads. Memory:
    at most ``threads + 2`` blocks and their members. ``blocks`` is pulled, and ``sink`` called, in the caller's
    thread; what they raise ends the work and is passed on.

    Args:
        blocks: the tar, each element at most ``BLOCK`` bytes and not changed afterwards.
        sink: takes the blob's bytes, such as ``Ingest.write``.
        codec: how to compress.
        threads: compressing threads, at least 1.
        known: asked right after a block was pulled, by its index: its member where one was made before, else None.
            The caller vouches that it is what ``codec`` makes of the block.

    Raises:
        ValueError: a block over ``BLOCK`` bytes (that is an error of the caller, not of an input).
    """
    pipeline = _Pipeline(sink, codec, max(1, threads))
    try:
        for index, block in enumerate(blocks):
            if len(block) > BLOCK:
                raise ValueError(f"a block of {len(block)} bytes, the most is {BLOCK}")
            pipeline.add(block, known(index) if known is not None else None)
        return pipeline.finish()
    finally:
        pipeline.stop()


class _Pipeline:
    """Blocks on their way: hashed and compressed in threads, handed on in order."""

    def __init__(self, sink: Callable[[bytes], object], codec: Codec, threads: int) -> None:
        self._sink, self._codec, self._most = sink, codec, threads + 1
        self._tar, self._blob = _Hasher("tar-hash"), _Hasher("blob-hash")
        self._pool = ThreadPoolExecutor(threads, "compress")
        self._queue: deque[tuple[int, Future[None], Future[bytes]]] = deque()
        self._members: list[Member] = []

    def add(self, block: bytes | memoryview, member: bytes | None) -> None:
        """Take a block, and its member where one was made before."""
        compressed = self._pool.submit(self._codec.compress, block) if member is None else _done(member)
        self._queue.append((len(block), self._tar.update(block), compressed))
        while len(self._queue) > self._most:
            self._hand_on()

    def _hand_on(self) -> None:
        length, hashed, compressed = self._queue.popleft()
        data = compressed.result()
        behind = self._blob.update(data)
        tar_at, at = self._end()
        self._members.append(Member(tar_at, length, at, len(data)))
        self._sink(data)
        hashed.result()
        behind.result()

    def _end(self) -> tuple[int, int]:
        """Bytes of tar and of blob so far."""
        if not self._members:
            return 0, 0
        last = self._members[-1]
        return last.tar_offset + last.tar_size, last.blob_offset + last.blob_size

    def finish(self) -> EncodedLayer:
        """Hand on what is left."""
        while self._queue:
            self._hand_on()
        tar_size, size = self._end()
        return EncodedLayer(self._blob.digest(), size, self._tar.digest(), tar_size, tuple(self._members))

    def stop(self) -> None:
        """End the threads; what they have not begun is dropped. Idempotent."""
        self._pool.shutdown(cancel_futures=True)
        self._tar.stop()
        self._blob.stop()


class _Hasher:
    """SHA-256 in a thread of its own, in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._hash = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, name)

    def update(self, data: bytes | memoryview) -> Future[None]:
        """Hash ``data``, which must not change until that is done."""
        return self._pool.submit(self._hash.update, data)

    def digest(self) -> Digest:
        """Of what is hashed; everything asked for must be done."""
        return Digest.from_hex(self._hash.hexdigest())

    def stop(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)


def _done(member: bytes) -> Future[bytes]:
    future: Future[bytes] = Future()
    future.set_result(member)
    return future


def store_bytes(data: bytes) -> bytes:
    """``data`` as stored members of at most ``BLOCK`` bytes each: every bit counts, though no digest covers it."""
    return b"".join(encode_stored(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))


def compress_bytes(data: bytes, codec: Codec | None = None) -> bytes:
    """``data`` as members of at most ``BLOCK`` bytes each, for the small pieces between layers (headers, padding)."""
    codec = codec or Codec()
    return b"".join(codec.compress(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
