"""One 512-byte header block: its fields, checksum and numbers.

Sources: POSIX pax "ustar Interchange Format"; GNU tar manual, "Basic Tar Format"; Go's archive/tar as the arbiter where
writers differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from zlib import adler32

from oci_builder.model.errors import FormatError, PolicyError
from oci_builder.wire.tar.names import Where

BLOCK = 512
ZERO_BLOCK = bytes(BLOCK)
END_OF_ARCHIVE = bytes(2 * BLOCK)
# How files of other programs begin that are taken for tars. Named only when a header is none: names may begin so too.
_OTHERS = {b"\xfd7zXZ\0": "xz", b"BZh": "bzip2", b"\x04\x22\x4d\x18": "lz4", b"PK\x03\x04": "zip", b"7z\xbc\xaf": "7z",
           b"\x1f\x8b\x08": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"hsqs": "squashfs", b"07070": "cpio"}


@dataclass(slots=True)
class RawHeader:
    """Fields of a header block, before extended headers change them."""

    name: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    type: bytes
    link: bytes
    uname: bytes
    gname: bytes
    major: int
    minor: int
    block: bytes
    magic: str  # "ustar", "gnu" or "v7"


def parse_header(block: bytes, where: Where) -> RawHeader:
    """Parse a header block that is not all zeros.

    Raises:
        FormatError: ``tar.checksum``, ``tar.size``, ``tar.number``, ``tar.ambiguous``, ``entry.mtime``.
        PolicyError: ``entry.owner``, ``entry.device``, ``entry.mode``.
    """
    _check(block, where)
    magic = _magic(block)
    name = _text(block, 0, 100)
    if magic == "ustar":
        # star keeps times at the end of the prefix area and says so.
        prefix = _text(block, 345, 131 if block[508:512] == b"tar\0" else 155)
        if prefix:
            name = prefix + b"/" + name
    kind = block[156:157]
    # Go reads them whatever the entry is, and then the rest of the prefix area: what is no number there stops it.
    major, minor = (0, 0) if magic == "v7" else _devices(block, kind, where)
    if magic != "v7":
        _check_old_times(block, magic, where)
    return RawHeader(
        name=name,
        mode=_number(block, 100, 8, "entry.mode", where),
        uid=_number(block, 108, 8, "entry.owner", where),
        gid=_number(block, 116, 8, "entry.owner", where),
        size=_number(block, 124, 12, "tar.size", where),
        mtime=_number(block, 136, 12, "entry.mtime", where),
        type=kind,
        link=_text(block, 157, 100),
        uname=b"" if magic == "v7" else _text(block, 265, 32),
        gname=b"" if magic == "v7" else _text(block, 297, 32),
        major=major,
        minor=minor,
        block=block,
        magic=magic,
    )


@lru_cache(maxsize=4096)
def parse_number(field: bytes) -> int | None:
    """An octal or base-256 number; ``None`` when the field is neither."""
    if field[0] & 0x80:
        if field[0] == 0xFF:
            return int.from_bytes(field, "big", signed=True)
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") if field[0] == 0x80 else None
    digits = field.strip(b" \0")
    if b"\0" in digits:
        # Digits, a NUL, and then anything. Go's reader does not take a blank before that NUL, and others do not look
        # behind one that stands in front.
        if not field.lstrip(b" ")[0]:
            return None
        digits = digits.partition(b"\0")[0]
    if not digits:
        return 0
    return int(digits, 8) if digits.isdigit() and b"8" not in digits and b"9" not in digits else None


def _number(block: bytes, start: int, length: int, code: str, where: Where) -> int:
    field = block[start : start + length]
    value = parse_number(field)
    if value is None:
        kind = PolicyError if code in ("entry.owner", "entry.device", "entry.mode") else FormatError
        raise kind(
            code, f"{where}: not a number in the header at byte {start}: {field!r}", where=where, actual=repr(field)
        )
    return value


def _devices(block: bytes, kind: bytes, where: Where) -> tuple[int, int]:
    major, minor = (_number(block, start, 8, "entry.device", where) for start in (329, 337))
    return (major, minor) if kind in b"34" else (0, 0)


def _check_old_times(block: bytes, magic: str, where: Where) -> None:
    """The access and change times of GNU's and star's formats, in the area that holds the prefix in ustar's."""
    if magic == "ustar":
        if block[508:512] == b"tar\0":
            for start in (476, 488):
                _number(block, start, 12, "entry.mtime", where)
        return
    times = [block[start : start + 12] for start in (345, 357)]
    if any(time[0] and parse_number(time) is None for time in times):
        # Go before 1.8 wrote a prefix here, and Go reads what is ASCII as one; GNU tar does not.
        prefix = _text(block, 345, 155)
        if prefix and prefix.isascii():
            raise FormatError(
                "tar.ambiguous", f"{where}: a GNU header with a name's beginning where its times stand; readers "
                "disagree about the name", where=where, actual=repr(prefix[:40]),
            )  # fmt: skip


def _text(block: bytes, start: int, length: int) -> bytes:
    return block[start : start + length].partition(b"\0")[0]


def _magic(block: bytes) -> str:
    magic = block[257:265]
    if magic[:6] == b"ustar\0":
        return "ustar"
    return "gnu" if magic == b"ustar  \0" else "v7"


def _check(block: bytes, where: Where) -> None:
    # Base 256 is for what octal digits cannot hold, and Go reads none here.
    stored = parse_number(block[148:156]) if block[148] < 0x80 else None
    actual = byte_sum(block[:148]) + byte_sum(block[156:256]) + byte_sum(block[256:]) + 256
    if stored == actual:
        return
    # Old Sun and some embedded writers summed signed bytes.
    signed = actual - 256 * sum(1 for byte in block[:148] + block[156:] if byte > 127)
    if stored is None or stored != signed:
        other = next((name for magic, name in _OTHERS.items() if block.startswith(magic)), None)
        why = "the archive is damaged here, or this is no tar"
        if other:
            why = f"these are {other} data: decompress them first"
        raise FormatError(
            "tar.checksum", f"{where}: the header's checksum is wrong: {why}", where=where,
            expected=actual, actual=stored,
        )  # fmt: skip


def byte_sum(data: bytes) -> int:
    """The sum of at most 256 bytes: Adler-32's low half is that plus one, modulo 65521, and far faster than ``sum``."""
    return (adler32(data) & 0xFFFF) - 1
