"""A tiny language for hostile tars: every field of every header can be what no writer would write.

    tar(file(b"a", b"x"), symlink(b"l", b"/etc"), header(b"b", size=b"-1"), end=b"")

Numbers are octal where an integer is given and verbatim where bytes are.
"""

from __future__ import annotations

BLOCK = 512
END = bytes(1024)
USTAR, GNU, V7 = b"ustar\x0000", b"ustar  \0", bytes(8)

Number = int | bytes


def _number(value: Number, length: int) -> bytes:
    if isinstance(value, bytes):
        return value.ljust(length, b"\0")
    return b"%0*o\0" % (length - 1, value)


def base256(value: int, length: int) -> bytes:
    """A number as GNU tar writes what octal digits cannot say."""
    if value < 0:
        return value.to_bytes(length, "big", signed=True)
    return bytes([0x80]) + value.to_bytes(length - 1, "big")


def header(
    name: bytes, *, kind: bytes = b"0", mode: Number = 0o644, uid: Number = 0, gid: Number = 0, size: Number = 0,
    mtime: Number = 0, link: bytes = b"", magic: bytes = USTAR, major: Number = 0, minor: Number = 0,
    prefix: bytes = b"", checksum: str | bytes = "right", patch: dict[int, bytes] | None = None,
) -> bytes:  # fmt: skip
    """One header block. ``checksum``: ``right``, ``signed``, ``wrong`` or verbatim bytes; ``patch`` comes before it."""
    block = bytearray(BLOCK)
    for at, value in (
        (0, name), (100, _number(mode, 8)), (108, _number(uid, 8)), (116, _number(gid, 8)), (124, _number(size, 12)),
        (136, _number(mtime, 12)), (156, kind), (157, link), (257, magic), (329, _number(major, 8)),
        (337, _number(minor, 8)), (345, prefix), *sorted((patch or {}).items()),
    ):  # fmt: skip
        block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    total = sum(block)
    if checksum == "signed":
        total -= 256 * sum(byte > 127 for byte in block)
    elif checksum == "wrong":
        total += 1
    block[148:156] = checksum.ljust(8, b"\0") if isinstance(checksum, bytes) else b"%06o\0 " % total
    return bytes(block[:BLOCK])


def pad(data: bytes) -> bytes:
    """Data and its padding."""
    return data + bytes(-len(data) % BLOCK)


def file(name: bytes, data: bytes = b"", **fields: object) -> bytes:
    """A file with content; ``size`` may lie."""
    return header(name, **({"size": len(data)} | fields)) + pad(data)  # type: ignore[arg-type]


def folder(name: bytes, **fields: object) -> bytes:
    """A folder."""
    return header(name + b"/", **({"kind": b"5", "mode": 0o755} | fields))  # type: ignore[arg-type]


def symlink(name: bytes, target: bytes, **fields: object) -> bytes:
    """A symbolic link."""
    return header(name, **({"kind": b"2", "link": target, "mode": 0o777} | fields))  # type: ignore[arg-type]


def hardlink(name: bytes, target: bytes, **fields: object) -> bytes:
    """A hard link."""
    return header(name, **({"kind": b"1", "link": target} | fields))  # type: ignore[arg-type]


def record(key: bytes, value: bytes, length: bytes | None = None) -> bytes:
    """A PAX record; ``length`` instead of its own."""
    body = b" " + key + b"=" + value + b"\n"
    size = len(body) + 1
    while len(b"%d" % size) + len(body) != size:
        size += 1
    return (b"%d" % size if length is None else length) + body


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    """An extended header (``kind`` ``g``: a global one) of records verbatim."""
    body = b"".join(records)
    return header(b"PaxHeaders/x", kind=kind, size=len(body)) + pad(body)


def long_name(value: bytes, kind: bytes = b"L") -> bytes:
    """A GNU long name (``K``: long link name), verbatim: end it with a NUL for a good one."""
    return header(b"././@LongLink", kind=kind, size=len(value), magic=GNU) + pad(value)


def tar(*parts: bytes, end: bytes = END) -> bytes:
    """A whole tar."""
    return b"".join(parts) + end


def sparse(name: bytes, stored: bytes, pieces: list[tuple[int, int]], size: int) -> bytes:
    """An old GNU sparse file (type S) with up to four pieces."""
    table = b"".join(b"%011o\0%011o\0" % piece for piece in pieces)
    return header(
        name, kind=b"S", size=len(stored), magic=GNU, patch={386: table, 483: b"%011o\0" % size}
    ) + pad(stored)  # fmt: skip
