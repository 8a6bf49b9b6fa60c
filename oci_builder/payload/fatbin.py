"""CUDA fat binaries: which GPU architectures a module holds code for, read from its headers alone.

A *container* is what one translation unit or one device link left behind: a 16-byte header and entries, each with its
own header (kind, architecture, flags) and a payload that may be compressed. Everything asked here stands in the entry
headers, so no payload is read or decompressed: 140 MB of kernels cost as much as their few thousand headers.

Layout (little endian), established by compiling with known ``-gencode`` options and comparing with ``cuobjdump``
(``bench/compare_cuobjdump.py`` repeats the comparison on every shared object of a real environment)::

    container  u32 0xBA55ED50 · u16 version 1 · u16 header size · u64 bytes of all entries
    entry      u16 kind (1 PTX, 2 ELF) · u16 version · u32 header size · u64 payload bytes, padded · u32 compressed
               bytes · u32 options · u16 minor, u16 major (of the PTX ISA, or the ELF ABI) · u32 architecture ·
               u32 name offset · u32 name size · u64 flags (0x100000: ``a``, 0x200000: ``f``) · …
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MAGIC = b"\x50\xed\x55\xba\x01\x00\x10\x00"
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")
_KINDS = {1: "ptx", 2: "sass"}
_SUFFIXES = {0x000000: "", 0x100000: "a", 0x200000: "f"}
_ARCH = re.compile(r"(?:sm|compute)_([1-9][0-9]{1,2})([af]?)\Z")
# Measured: 1 MiB reads stay in the cache, and the regular expression searches twice as fast as bytes.find.
_WINDOW = 1 << 20
_FIND = re.compile(re.escape(MAGIC)).search
# More entries than this in one container is no compiler's work; the largest seen has 23.
_MAX_ENTRIES = 4096


class Source(Protocol):
    """Random access to the bytes of one file; ``wire.source.FileRange`` is one."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def pread(self, n: int, at: int) -> bytes:
        """Up to ``n`` bytes at ``at``; short only at the end."""


@dataclass(frozen=True, slots=True)
class MemorySource:
    """A ``Source`` over bytes in memory."""

    data: bytes

    @property
    def size(self) -> int:
        """Bytes held."""
        return len(self.data)

    def pread(self, n: int, at: int) -> bytes:
        """See ``Source.pread``."""
        return self.data[at : at + n]


class Arch(NamedTuple):
    """A GPU architecture: ``sm_100a`` is ``Arch(100, "a")``.

    ``a`` code uses instructions of exactly this GPU; ``f`` code those of its family (CUDA programming guide,
    "Compute capabilities": architecture- and family-specific feature sets).
    """

    number: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Arch | None:
        """``sm_100f`` or ``compute_90`` as a value; None when it is neither."""
        match = _ARCH.match(text)
        return cls(int(match[1]), match[2]) if match else None

    @property
    def major(self) -> int:
        """The major compute capability: 10 for ``sm_103``."""
        return self.number // 10

    def __str__(self) -> str:
        return f"sm_{self.number}{self.suffix}"


class Code(NamedTuple):
    """One entry of a container.

    Attributes:
        kind: ``sass`` (machine code), ``ptx``, or ``other`` (link-time IR and what is not known).
        arch: the architecture it was compiled for.
        isa: (major, minor) of the PTX ISA for PTX, (0, 0) else.
    """

    kind: str
    arch: Arch
    isa: tuple[int, int] = (0, 0)


class Container(NamedTuple):
    """One container: where it starts and ends in the file, and its entries in order."""

    start: int
    end: int
    entries: tuple[Code, ...]


class BadFatbin(ValueError):
    """A container whose headers contradict each other or its surroundings."""


def read_container(source: Source, at: int, end: int) -> Container:
    """Read the container that starts at ``at``; its bytes must end at or before ``end``.

    Raises:
        BadFatbin: it is not a container, is cut off, or its entries do not fill it.
    """
    head = source.pread(16, at)
    if len(head) < 16 or not head.startswith(MAGIC):
        raise BadFatbin(f"no fat binary at {at}")
    _, _, header, size = _CONTAINER.unpack(head)
    stop = at + header + size
    if stop > min(end, source.size):
        raise BadFatbin(f"fat binary at {at} claims {size} bytes, more than there are")
    codes, position = [], at + header
    while position < stop:
        code, position = _read_entry(source, position, stop)
        codes.append(code)
        if len(codes) > _MAX_ENTRIES:
            raise BadFatbin(f"fat binary at {at} has more than {_MAX_ENTRIES} entries")
    return Container(at, stop, tuple(codes))


def _read_entry(source: Source, at: int, stop: int) -> tuple[Code, int]:
    head = source.pread(_ENTRY.size, at)
    if len(head) < _ENTRY.size:
        raise BadFatbin(f"fat binary entry at {at} is cut off")
    kind, _, header, payload, _, _, minor, major, arch, _, _, flags = _ENTRY.unpack(head)
    following = at + header + payload
    if header < _ENTRY.size or following > stop:
        raise BadFatbin(f"fat binary entry at {at} does not fit its container")
    suffix = _SUFFIXES.get(flags & 0x300000)
    name = _KINDS.get(kind, "other") if suffix is not None else "other"
    return Code(name, Arch(arch, suffix or ""), (major, minor) if name == "ptx" else (0, 0)), following


def section_containers(source: Source, at: int, size: int) -> Iterator[Container]:
    """The containers of one fat binary section, which holds nothing else but zero padding between them.

    Raises:
        BadFatbin: as ``read_container``, and for non-zero bytes between containers.
    """
    end = at + size
    while at < end:
        if source.pread(8, at).startswith(MAGIC):
            container = read_container(source, at, end)
            yield container
            at = container.end
        else:
            following = _past_padding(source, at, end)
            if following < end and not source.pread(8, following).startswith(MAGIC):
                raise BadFatbin(f"bytes at {following} belong to no fat binary")
            at = following


def _past_padding(source: Source, at: int, end: int) -> int:
    while at < end:
        piece = source.pread(min(4096, end - at), at)
        if not piece:
            return end
        rest = piece.lstrip(b"\0")
        if rest:
            return at + len(piece) - len(rest)
        at += len(piece)
    return end


def embedded_containers(source: Source, skip: tuple[tuple[int, int], ...] = ()) -> Iterator[Container]:
    """Containers outside the usual sections: cuFFT and cuBLASLt keep most kernels in plain data.

    A file is searched for the magic; what only looks like a container is passed over. ``skip`` are (start, end) ranges.
    """
    base, window, at = 0, b"", 0
    while at < source.size:
        match = _FIND(window, at - base)
        if match is None:
            # The last bytes of a window may begin a magic that ends in the next one.
            base = at = max(at, base + len(window) - len(MAGIC) + 1 if window else 0)
            window = source.pread(_WINDOW, base)
            if len(window) < len(MAGIC):
                return
            continue
        at = base + match.start()
        container = None if _inside(at, skip) else _try_container(source, at)
        if container and container.entries:
            yield container
        at = max(container.end if container else 0, _inside(at, skip), at + len(MAGIC))
        if at > base + len(window):
            base, window = at, source.pread(_WINDOW, at)


def _inside(at: int, ranges: tuple[tuple[int, int], ...]) -> int:
    """The end of the range that holds ``at``; 0 when none does."""
    return next((stop for start, stop in ranges if start <= at < stop), 0)


def _try_container(source: Source, at: int) -> Container | None:
    try:
        return read_container(source, at, source.size)
    except BadFatbin:
        return None
