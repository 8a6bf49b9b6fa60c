"""The deterministic tar writer: ustar headers, PAX records only where ustar cannot say it.

No access or change times (systemd/mkosi#1982), no fractions of seconds, no user or group names (they would leak the
building machine's), device fields of ordinary entries zero.
"""

from __future__ import annotations

from functools import lru_cache

from oci_builder.wire.tar.entry import Kind, TarEntry
from oci_builder.wire.tar.header import BLOCK, byte_sum
from oci_builder.wire.tar.pax import XATTR, record

_TYPES = {
    Kind.FILE: b"0",
    Kind.HARDLINK: b"1",
    Kind.SYMLINK: b"2",
    Kind.CHAR: b"3",
    Kind.BLOCK: b"4",
    Kind.DIR: b"5",
    Kind.FIFO: b"6",
}
_MAX_8 = 0o7777777
_MAX_12 = 0o77777777777
_MAGIC = b"ustar\x0000" + bytes(64)
_NO_DEVICE = b"0000000\x000000000\0"
# What every header's checksum counts: the magic, and the checksum's own field as eight spaces.
_ALWAYS = byte_sum(_MAGIC) + 8 * 32
_NO_DEVICE_SUM = byte_sum(_NO_DEVICE)
_PAX_NAME = b"PaxHeaders/entry"


def encode_header(entry: TarEntry) -> bytes:
    """All header blocks of an entry: a PAX header when needed, then the ustar header. A function of its value only."""
    name = entry.name or b"."
    if entry.kind is Kind.DIR:
        name += b"/"
    seconds = entry.mtime_ns // 1_000_000_000
    records = {XATTR + key: value for key, value in entry.xattrs.items()} if entry.xattrs else {}
    prefix, short = _split(name)
    if short is None:
        records[b"path"] = name
        prefix, short = b"", name[:100]
    link = entry.link
    if len(link) > 100:
        records[b"linkpath"] = link
        link = link[:100]
    if entry.size > _MAX_12:
        records[b"size"] = b"%d" % entry.size
    if not 0 <= seconds <= _MAX_12:
        records[b"mtime"] = b"%d" % seconds
    if entry.uid > _MAX_8:
        records[b"uid"] = b"%d" % entry.uid
    if entry.gid > _MAX_8:
        records[b"gid"] = b"%d" % entry.gid
    main = _block(
        short, prefix, entry.mode, entry.uid if entry.uid <= _MAX_8 else 0, entry.gid if entry.gid <= _MAX_8 else 0,
        entry.size if entry.size <= _MAX_12 else 0, seconds if 0 <= seconds <= _MAX_12 else 0, _TYPES[entry.kind],
        link, entry.major, entry.minor,
    )  # fmt: skip
    return _pax(records) + main if records else main


def padding(size: int) -> bytes:
    """The zeros after ``size`` bytes of content."""
    return bytes(-size % BLOCK)


def _pax(records: dict[bytes, bytes]) -> bytes:
    body = b"".join([record(key, records[key]) for key in sorted(records)])
    return _pax_block(len(body)) + body + padding(len(body))


@lru_cache(1024)
def _pax_block(size: int) -> bytes:
    return _block(_PAX_NAME, b"", 0o644, 0, 0, size, 0, b"x", b"", 0, 0)


def _split(name: bytes) -> tuple[bytes, bytes | None]:
    """Prefix and name for the ustar fields; ``None`` for the name when they cannot hold it."""
    if len(name) <= 100:
        return b"", name
    if len(name) > 256:
        return b"", None
    cut = name.rfind(b"/", 0, 156)
    rest = name[cut + 1 :]
    return (name[:cut], rest) if cut > 0 and 0 < len(rest) <= 100 else (b"", None)


def _block(
    name: bytes, prefix: bytes, mode: int, uid: int, gid: int, size: int, mtime: int, kind: bytes, link: bytes,
    major: int, minor: int,
) -> bytes:  # fmt: skip
    fields, total = _numbers(mode, uid, gid, size, mtime)
    numbers = _NO_DEVICE
    total += _ALWAYS + _NO_DEVICE_SUM + byte_sum(name + kind + link)
    if prefix:
        total += byte_sum(prefix)
    if major or minor:
        numbers = b"%07o\0%07o\0" % (major, minor)
        total += byte_sum(numbers) - _NO_DEVICE_SUM
    return b"%b%b%06o\0 %b%b%b%b%b" % (
        name.ljust(100, b"\0"), fields, total, kind, link.ljust(100, b"\0"), _MAGIC, numbers, prefix.ljust(167, b"\0"),
    )  # fmt: skip


# Links and folders, half of a layer's entries, have size 0 and a few modes.
@lru_cache(4096)
def _numbers(mode: int, uid: int, gid: int, size: int, mtime: int) -> tuple[bytes, int]:
    """The number fields and the sum of their bytes."""
    fields = b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, uid, gid, size, mtime)
    return fields, byte_sum(fields)
