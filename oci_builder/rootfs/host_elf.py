"""As much of ELF as it takes to find the libraries that a program needs, and the loader's cache for an image.

Sources: ELF-64 object file format; ld.so(8); glibc's elf/cache.c for the format of ld.so.cache.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"
_X86_64 = 62
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 1, 5, 15, 29
_HEAD = struct.Struct("<16xHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_MOST_SEGMENTS = 4096

_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEAD = struct.Struct("<20sIIB3xI12x")
_CACHE_ENTRY = struct.Struct("<iIIIQ")
_CACHE_LIBC6_X86_64 = 0x0303
_CACHE_LITTLE_ENDIAN = 2


@dataclass(frozen=True, slots=True)
class Linkage:
    """What a program or library asks of the loader.

    Attributes:
        interpreter: path of the loader, empty for libraries and static programs.
        needed: library names, in order.
        search: RPATH or RUNPATH folders, ``$ORIGIN`` not replaced.
    """

    interpreter: str = ""
    needed: tuple[str, ...] = ()
    search: tuple[str, ...] = ()


def read_linkage(path: Path) -> Linkage | None:
    """The linkage of an x86-64 ELF file; None for anything else, malformed files included.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if not head.startswith(_MAGIC) or len(head) < _HEAD.size:
            return None
        _, machine, _, _, table, _, _, _, width, count, *_ = _HEAD.unpack(head)
        if machine != _X86_64 or width != _SEGMENT.size or count > _MOST_SEGMENTS:
            return None
        file.seek(table)
        raw = file.read(width * count)
        segments = list(_SEGMENT.iter_unpack(raw[: len(raw) // width * width]))

        def read(kind: int) -> bytes:
            for segment in segments:
                if segment[0] == kind:
                    file.seek(segment[2])
                    return file.read(min(segment[5], 1 << 20))
            return b""

        interpreter = read(_PT_INTERP).split(b"\0")[0].decode("utf-8", "surrogateescape")
        dynamic = read(_PT_DYNAMIC)
        entries = list(_DYNAMIC.iter_unpack(dynamic[: len(dynamic) // _DYNAMIC.size * _DYNAMIC.size]))
        address = next((value for tag, value in entries if tag == _DT_STRTAB), None)
        offset = None if address is None else _file_offset(segments, address)
        if offset is None:
            return Linkage(interpreter)

        def text(at: int) -> str:
            file.seek(offset + at)
            return file.read(4096).split(b"\0")[0].decode("utf-8", "surrogateescape")

        needed = tuple(text(value) for tag, value in entries if tag == _DT_NEEDED)
        paths = [text(value) for tag, value in entries if tag in (_DT_RPATH, _DT_RUNPATH)]
        return Linkage(interpreter, needed, tuple(p for path in paths for p in path.split(":") if p))


def _file_offset(segments: list[tuple[int, ...]], address: int) -> int | None:
    for kind, _, offset, start, _, size, _, _ in segments:
        if kind == _PT_LOAD and start <= address < start + size:
            return offset + address - start
    return None


def configured_folders(conf: Path = Path("/etc/ld.so.conf")) -> list[Path]:
    """Library folders that ld.so.conf names, its includes followed; folders that are absent are left out."""
    found: list[Path] = []
    pending = [conf]
    seen: set[Path] = set()
    while pending:
        file = pending.pop(0)
        if file in seen:
            continue
        seen.add(file)
        try:
            lines = file.read_text("utf-8", "surrogateescape").splitlines()
        except OSError:
            continue
        for line in lines:
            words = line.partition("#")[0].split()
            if words[:1] == ["include"]:
                for pattern in words[1:]:
                    folder, name = (file.parent / pattern).parent, Path(pattern).name
                    pending += sorted(folder.glob(name))
            elif words and not words[0].startswith("hwcap"):
                found += [Path(word) for word in words if Path(word).is_dir()]
    return list(dict.fromkeys(found))


def loader_cache(libraries: Mapping[str, str]) -> bytes:
    """An ``/etc/ld.so.cache`` for x86-64: library name -> absolute path in the image."""
    names = sorted(libraries, key=_cache_order, reverse=True)
    start = _CACHE_HEAD.size + _CACHE_ENTRY.size * len(names)
    strings = bytearray()
    entries = []
    for name in names:
        key = start + len(strings)
        strings += name.encode("utf-8", "surrogateescape") + b"\0"
        value = start + len(strings)
        strings += libraries[name].encode("utf-8", "surrogateescape") + b"\0"
        entries.append(_CACHE_ENTRY.pack(_CACHE_LIBC6_X86_64, key, value, 0, 0))
    head = _CACHE_HEAD.pack(_CACHE_MAGIC, len(names), len(strings), _CACHE_LITTLE_ENDIAN, 0)
    return head + b"".join(entries) + bytes(strings)


def _cache_order(name: str) -> list[tuple[int, int, int]]:
    # The loader searches by halves with glibc's _dl_cache_libcmp: digits compare as numbers, and after letters.
    keys: list[tuple[int, int, int]] = []
    at = 0
    while at < len(name):
        end = at
        while end < len(name) and name[end].isascii() and name[end].isdigit():
            end += 1
        if end > at:
            keys.append((1, int(name[at:end]), 0))
            at = end
        else:
            keys.append((0, ord(name[at]), 0))
            at += 1
    return keys
