"""As much of ELF as this runner takes: is a library for this machine, its soname, and a program's loader."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

_MACHINES = {"x86_64": 62, "aarch64": 183}
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NULL, _DT_STRTAB, _DT_SONAME = 0, 5, 14
_MOST_HEADERS = 256
_LARGEST_DYNAMIC = 1 << 16
# As in Linux: of all program headers together, and of a path.
_LARGEST_TABLE, _LONGEST_PATH = 65536, 4096


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


def interpreters(path: str) -> list[str]:
    """The loaders that a kernel may take from a program; none for another file.

    Linux goes by the machine's number and asks neither for the class nor for the byte order that a file says it has
    (fs/binfmt_elf.c), so both layouts of the headers count, and every loader in them.

    Raises:
        OSError: it cannot be read.
    """
    found = []
    with open(path, "rb") as file:
        head = file.read(64)
        if head[:4] != b"\x7fELF":
            return []
        for offset_at, offset_form, sizes_at, header in (
            (32, "<Q", 54, struct.Struct("<I4xQ16xQ16x")), (28, "<I", 42, struct.Struct("<II8xI12x")),
        ):  # fmt: skip
            if len(head) < sizes_at + 4:
                continue
            size, count = struct.unpack_from("<HH", head, sizes_at)
            if size != header.size or size * count > _LARGEST_TABLE:
                continue
            (offset,) = struct.unpack_from(offset_form, head, offset_at)
            table = _read(file, offset, size * count)
            for kind, start, length in header.iter_unpack(table[: len(table) // size * size]):
                if kind == _PT_INTERP:
                    found.append(os.fsdecode(_read(file, start, min(length, _LONGEST_PATH)).split(b"\0")[0]))
    return [name for name in found if name]


def machine(path: str) -> int:
    """The machine's number of a program; 0 for another file."""
    try:
        with open(path, "rb") as file:
            head = file.read(20)
    except OSError:
        return 0
    return int.from_bytes(head[18:20], "little") if head[:4] == b"\x7fELF" and len(head) == 20 else 0


def machine_name(number: int) -> str:
    """What a machine is called (uname's name where that is known)."""
    return next((name for name, known in _MACHINES.items() if known == number), f"machine {number}")


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    """Fewer bytes where the file ends; none from where no file can be."""
    if offset >= 1 << 63:
        return b""
    file.seek(offset)
    return file.read(size)


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
