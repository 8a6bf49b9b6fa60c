"""Compressed bytes in, uncompressed chunks out: strict framing, bounded memory, parallel where that is safe."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

from oci_builder.model.limits import Limits
from oci_builder.wire.compress.codecs import Compression
from oci_builder.wire.compress.gunzip import gunzip
from oci_builder.wire.compress.gzipframe import MAGIC
from oci_builder.wire.compress.pull import Pull
from oci_builder.wire.compress.unzstd import MAGIC_BYTES, is_skippable, unzstd
from oci_builder.wire.compress.within import Budget, OnMember, Warn
from oci_builder.wire.source import FileRange


@dataclass(frozen=True, slots=True)
class Options:
    """How to decode.

    Attributes:
        limits: ``layer_size`` (or ``bound``) always, ``ratio`` past ``ratio_floor``, ``zstd_window``.
        where: what is read, for messages.
        threads: 1 reads serially; more inflate members of ours and frames of known size in parallel, with the same
            bytes and the same errors.
        strict: refuse NUL padding after the last gzip member, which is otherwise a warning.
        warn: takes ``(code, message)``.
        on_member: takes each gzip member or zstd frame when it has ended well.
        bound: which field of the limits bounds the output: a whole archive's is ``image_size``.
    """

    limits: Limits
    where: str
    threads: int = 1
    strict: bool = False
    warn: Warn | None = None
    on_member: OnMember | None = None
    bound: str = "layer_size"


def sniff(head: bytes | memoryview) -> Compression:
    """The compression that the first bytes show; 4 bytes are enough. Anything unknown is ``identity``."""
    head = bytes(head[:4])
    if head[:2] == MAGIC:
        return "gzip"
    return "zstd" if head == MAGIC_BYTES or is_skippable(head) else "identity"


def decode(
    source: FileRange,
    compression: Compression,
    *,
    limits: Limits,
    where: str,
    threads: int = 1,
    strict: bool = False,
    warn: Warn | None = None,
) -> Generator[bytes | memoryview, None, None]:
    """As ``decode_chunks``, for a blob on disk."""
    return decode_chunks(source.chunks(), compression, Options(limits, where, threads, strict, warn))


def decode_chunks(
    chunks: Iterable[bytes | memoryview], compression: Compression, options: Options
) -> Generator[bytes | memoryview, None, None]:
    """The uncompressed bytes, in pieces of at most 4 MiB. Every compressed byte is read and accounted for.

    Close the generator when it is left before its end.

    Raises (while iterating, after all good members before the fault; how much of a broken one comes first depends on
    how ``chunks`` are cut, the error does not):
        FormatError: ``gzip.header``, ``gzip.data``, ``gzip.crc``, ``gzip.size``, ``gzip.truncated``,
            ``gzip.trailing``; ``zstd.header``, ``zstd.data`` (also a wrong checksum), ``zstd.window``,
            ``zstd.dictionary``, ``zstd.truncated``, ``zstd.trailing``.
        PolicyError: ``limit.layer`` (or ``limit.image``), ``limit.ratio``.
    """
    budget = Budget(options.limits, options.where, options.on_member, options.bound)
    warn = options.warn or _nothing
    match compression:
        case "gzip":
            return gunzip(Pull(chunks), budget, options.threads, options.strict, warn)
        case "zstd":
            return unzstd(Pull(chunks), budget, options.threads)
        case _:
            return _plain(chunks, budget)


def _plain(chunks: Iterable[bytes | memoryview], budget: Budget) -> Generator[bytes | memoryview, None, None]:
    for chunk in chunks:
        budget.spend(len(chunk))
        yield chunk


def _nothing(_code: str, _message: str) -> None: ...
