"""As much of ELF as this runner takes: is a library for this machine, its soname, and a program's loader."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

_MACHINES = {"x86_64": 62, "aarch64": 183}
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NULL, _DT_STRTAB, _DT_SONAME = 0, 5, 14
_MOST_HEADERS = 256
_LARGEST_DYNAMIC = 1 << 16


def is_elf(path: str) -> bool:
    """Whether the file is a 64-bit little-endian ELF file."""
    try:
        with open(path, "rb") as file:
            return file.read(6) == b"\x7fELF\x02\x01"
    except OSError:
        return False


def is_library(path: str, machine: str) -> bool:
    """Whether the file is a 64-bit little-endian shared object for ``machine`` (uname's name)."""
    try:
        with open(path, "rb") as file:
            head = file.read(20)
    except OSError:
        return False
    if len(head) < 20 or head[:6] != b"\x7fELF\x02\x01":
        return False
    kind, number = struct.unpack_from("<HH", head, 16)
    return bool(kind == 3 and number == _MACHINES.get(machine, number))


def soname(path: str) -> str:
    """The DT_SONAME of a 64-bit little-endian shared object; empty when there is none."""
    try:
        with open(path, "rb") as file:
            return _soname(file)
    except (OSError, struct.error):
        return ""


def interpreter(path: str) -> str:
    """The loader that a 64-bit little-endian program asks for; empty when it asks for none."""
    try:
        with open(path, "rb") as file:
            for kind, start, _, length in _headers(file):
                if kind == _PT_INTERP:
                    file.seek(start)
                    return file.read(min(length, 4096)).split(b"\0")[0].decode("utf-8", "backslashreplace")
    except (OSError, struct.error):
        pass
    return ""


def _headers(file: BinaryIO) -> Iterator[tuple[int, int, int, int]]:
    """(type, offset, address, size in the file) of each program header; none in a file of another form."""
    head = file.read(64)
    if head[:6] != b"\x7fELF\x02\x01":
        return
    (offset,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    for i in range(min(count, _MOST_HEADERS)):
        file.seek(offset + i * size)
        kind, _, start, address, _, length, _, _ = struct.unpack("<IIQQQQQQ", file.read(56))
        yield kind, start, address, length


def _soname(file: BinaryIO) -> str:
    loads, dynamic = [], (0, 0)
    for kind, start, address, length in _headers(file):
        if kind == _PT_LOAD:
            loads.append((address, length, start))
        elif kind == _PT_DYNAMIC:
            dynamic = (start, min(length, _LARGEST_DYNAMIC))
    file.seek(dynamic[0])
    table = file.read(dynamic[1])
    entries: dict[int, int] = {}
    for tag, value in struct.iter_unpack("<qQ", table[: len(table) // 16 * 16]):
        if tag == _DT_NULL:
            break
        entries.setdefault(tag, value)
    if _DT_SONAME not in entries:
        return ""
    strings = entries.get(_DT_STRTAB, 0)
    where = next((start + strings - address for address, length, start in loads if 0 <= strings - address < length), 0)
    file.seek(where + entries[_DT_SONAME])
    return file.read(256).split(b"\0")[0].decode("ascii", "replace")
