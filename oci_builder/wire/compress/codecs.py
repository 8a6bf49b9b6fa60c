"""The compressors: the one file that imports isal, libdeflate (``deflate``) and zstandard.

How a gzip block is compressed, and why (measured on 332 random 1 MiB blocks of the v070-r1 wheels, one core, size
against zlib level 6 of the same block):

====================  =======  =========
way                   MiB/s    size
====================  =======  =========
zlib 6                 32      1
igzip 1                565     1.069
igzip 2                555     1.061
libdeflate 4           132     1.013
adaptive (level 3)     174     1.011
====================  =======  =========

igzip is 6 % larger over all and 15 to 45 % larger on text and device code, where libdeflate is at most 5 % larger; on
nearly incompressible blocks igzip loses nothing and is five times faster. So the default picks by block.
igzip's level 3 is not used: its bytes depend on the CPU (SSE, AVX2, AVX-512). Those of levels 1 and 2, of libdeflate
and of libzstd do not (compared under qemu's Nehalem and Haswell).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import deflate
import isal
import zstandard
from isal import igzip_lib, isal_zlib

from oci_builder.wire.compress import gzipframe

Compression = Literal["identity", "gzip", "zstd"]

# 1 MiB: 0.5 MiB costs 0.1 % size and 7 % speed, 4 MiB gains under 0.1 % and doubles what a reader must hold.
BLOCK = 1 << 20

_DEFAULT_LEVEL = {"gzip": 3, "zstd": 3, "identity": 0}
_LEVELS = {"gzip": range(10), "zstd": range(1, 23), "identity": range(1)}
_SAMPLES, _SAMPLE = 8, 8 << 10

DeflateError: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]  # isal's stub calls it an instance
ZstdError = zstandard.ZstdError


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to compress layers.

    Attributes:
        name: ``gzip``, ``zstd`` or ``identity``.
        level: gzip 0 (stored), 1 and 2 (igzip), 3 (chosen by block), 4 to 9 (libdeflate); zstd 1 to 22; None becomes
            the default, 3.

    Raises:
        ValueError: unknown name or level; specs are checked before they come here.
    """

    name: Compression = "gzip"
    level: int | None = None

    def __post_init__(self) -> None:
        if self.name not in _LEVELS:
            raise ValueError(f"unknown codec {self.name!r}")
        if self.level is None:
            object.__setattr__(self, "level", _DEFAULT_LEVEL[self.name])
        elif self.level not in _LEVELS[self.name]:
            raise ValueError(f"{self.name} has no level {self.level}")

    def describe(self) -> dict[str, object]:
        """Everything that the compressed bytes depend on, for ``container.json`` and cache keys."""
        out: dict[str, object] = {"codec": self.name, "level": self.level}
        if self.name == "gzip":
            out["libraries"] = {"isa-l": isal.ISAL_VERSION, "libdeflate (deflate)": metadata.version("deflate")}
        if self.name == "zstd":
            out["libraries"] = {"zstd": ".".join(map(str, zstandard.ZSTD_VERSION))}
        if self.name != "identity":
            out["block"] = BLOCK
        return out

    def compress(self, block: bytes | memoryview) -> bytes:
        """``block`` as one gzip member or zstd frame. Thread-safe; runs without the interpreter lock."""
        if self.name == "gzip":
            return gzipframe.encode_member(_deflate(block, self.level or 0), isal_zlib.crc32(block), len(block))
        if self.name == "zstd":
            return _zstd(self.level or 3).compress(block)
        return bytes(block)


def _deflate(block: bytes | memoryview, level: int) -> bytes | bytearray:
    if level in (1, 2):
        return bytes(igzip_lib.compress(block, level, igzip_lib.COMP_DEFLATE))
    if level != 3:
        return deflate.deflate_compress(block, level)
    ratio = _sampled_ratio(block)
    if ratio > 0.6:
        return bytes(igzip_lib.compress(block, 2, igzip_lib.COMP_DEFLATE))
    return deflate.deflate_compress(block, 5 if ratio < 0.35 else 4)


def _sampled_ratio(block: bytes | memoryview) -> float:
    size = len(block)
    if size <= _SAMPLES * _SAMPLE:
        return 0.0  # Small blocks cost little: always the tighter way.
    step = size // _SAMPLES
    sample = b"".join(bytes(block[at : at + _SAMPLE]) for at in range(0, step * _SAMPLES, step))
    return len(igzip_lib.compress(sample, 1, igzip_lib.COMP_DEFLATE)) / len(sample)


_local = threading.local()


def _zstd(level: int) -> zstandard.ZstdCompressor:
    # One compressor a thread: they are not thread-safe. threads=0 is single-threaded mode of libzstd, whose bytes
    # differ from multi-threaded mode with any count; blocks are our parallelism.
    compressors: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("zstd", {})
    if level not in compressors:
        compressors[level] = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    return compressors[level]


def inflate_member(member: memoryview, header_size: int, most: int) -> bytes | None:
    """Inflate a member that ends exactly where ``member`` does; None when anything about it is not so.

    The caller then reads the same bytes the careful way, which gives the error (or the right data).
    """
    crc, size = (int.from_bytes(member[at : at + 4], "little") for at in (len(member) - 8, len(member) - 4))
    if size > most or header_size + gzipframe.TRAILER_SIZE > len(member):
        return None
    # Asking for no more than the trailer claims lets igzip allocate once.
    inflater = Inflater()
    try:
        data = inflater.decompress(member[header_size:], size + 1)
    except DeflateError:
        return None
    ends = inflater.eof and inflater.unused_data == member[-8:]
    return data if ends and len(data) == size and crc32(data) == crc else None


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """CRC-32 (zlib's), continued from ``value``."""
    return int(isal_zlib.crc32(data, value))


class Inflater:
    """A raw deflate stream, inflated in bounded pieces."""

    __slots__ = ("_igzip",)

    def __init__(self) -> None:
        self._igzip = igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_DEFLATE)

    def decompress(self, data: bytes | memoryview, most: int) -> bytes:
        """At most ``most`` bytes of output; input that is left over is kept inside (pass ``b""`` to go on)."""
        return bytes(self._igzip.decompress(data, most))

    @property
    def eof(self) -> bool:
        """True once the final deflate block is complete."""
        return bool(self._igzip.eof)

    @property
    def needs_input(self) -> bool:
        """True when no output is possible without more input."""
        return bool(self._igzip.needs_input)

    @property
    def unused_data(self) -> bytes:
        """Input after the end of the stream."""
        return bytes(self._igzip.unused_data)


@dataclass(frozen=True, slots=True)
class ZstdFrame:
    """What a frame header says (RFC 8878, section 3.1.1.1). ``content_size`` is None when it does not say."""

    window: int
    dictionary: int
    content_size: int | None
    checksum: bool
    header_size: int


def zstd_header(head: bytes) -> ZstdFrame:
    """Parse a frame header.

    Raises:
        ZstdError: malformed, or ``head`` is too short (18 bytes are always enough).
    """
    found = zstandard.get_frame_parameters(head)
    size = None if found.content_size == zstandard.CONTENTSIZE_UNKNOWN else found.content_size
    return ZstdFrame(
        found.window_size, found.dict_id, size, bool(found.has_checksum), zstandard.frame_header_size(head)
    )


class ZstdInflater:
    """One zstd frame, fed in whole blocks so that output stays bounded."""

    __slots__ = ("_zstd",)

    def __init__(self, most_window: int) -> None:
        self._zstd = zstandard.ZstdDecompressor(max_window_size=most_window).decompressobj()

    def decompress(self, data: bytes) -> bytes:
        """The output of ``data``.

        Raises:
            ZstdError: corrupt, or the checksum differs.
        """
        return self._zstd.decompress(data)

    @property
    def eof(self) -> bool:
        """True once the frame is complete and its checksum right."""
        return bool(self._zstd.eof)
