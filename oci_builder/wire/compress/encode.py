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

    Hashing of the tar, compression and writing overlap; the same blocks give the same bytes with any number of
    threads. Memory: at most ``threads + 2`` blocks and their members. ``blocks`` is pulled, and ``sink`` called, in
    the caller's thread; what they raise ends the work and is passed on.

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
    tar_hash, blob_hash = hashlib.sha256(), hashlib.sha256()
    members: list[Member] = []
    queue: deque[tuple[int, Future[None], Future[bytes]]] = deque()
    tar_size = size = 0

    def drain() -> None:
        nonlocal tar_size, size
        length, hashed, compressed = queue.popleft()
        data = compressed.result()
        sink(data)
        blob_hash.update(data)
        hashed.result()
        members.append(Member(tar_size, length, size, len(data)))
        tar_size, size = tar_size + length, size + len(data)

    with ThreadPoolExecutor(1, "tar-hash") as hasher, ThreadPoolExecutor(max(1, threads), "compress") as pool:
        try:
            for index, block in enumerate(blocks):
                if len(block) > BLOCK:
                    raise ValueError(f"a block of {len(block)} bytes, the most is {BLOCK}")
                member = known(index) if known is not None else None
                compressed = pool.submit(codec.compress, block) if member is None else _done(member)
                queue.append((len(block), hasher.submit(tar_hash.update, block), compressed))
                while len(queue) > max(1, threads) + 1:
                    drain()
            while queue:
                drain()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            hasher.shutdown(wait=False, cancel_futures=True)
            raise
    return EncodedLayer(
        Digest.from_hex(blob_hash.hexdigest()), size, Digest.from_hex(tar_hash.hexdigest()), tar_size, tuple(members)
    )


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
