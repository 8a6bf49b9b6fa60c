"""The common case, quickly: an entry that needs nothing but one ordinary ustar header.

What is not of that shape, right or wrong, is left to the careful way, which gives the same answer for what is.
"""

from __future__ import annotations

import re
from struct import Struct

from oci_builder.model.limits import Limits
from oci_builder.wire.tar.entry import NO_XATTRS, Kind, TarEntry
from oci_builder.wire.tar.header import byte_sum, parse_number

_FIELDS = Struct("100s8s8s8s12s12s8sc100s8s32s32s16s155s12s")
_KINDS = {b"0": Kind.FILE, b"1": Kind.HARDLINK, b"2": Kind.SYMLINK, b"5": Kind.DIR}
_USTAR, _GNU = b"ustar\x0000", b"ustar  \0"
_EDGE = (b"", b"/")
_DOTS = re.compile(rb"(?:^|/)\.\.?(?:/|\Z)")
# As GNU tar, everybody else and bsdtar write it.
_NO_DEVICE = frozenset({bytes(16), b"0000000\0" * 2, b"000000 \0" * 2})
_NO_PREFIX, _NO_TAIL = bytes(155), bytes(12)
_MAX_ID = 2**32 - 2
_SECOND = 1_000_000_000


def plain_entry(block: bytes, start: int, limits: Limits) -> TarEntry | None:
    """The entry of a header block that no extended header precedes; ``None`` for everything unusual."""
    (
        name, mode_, uid_, gid_, size_, mtime_, checksum, type_, link, magic, uname, gname, device, prefix, tail,
    ) = _FIELDS.unpack(block)  # fmt: skip
    kind = _KINDS.get(type_)
    total = byte_sum(block[:148]) + byte_sum(block[156:256]) + byte_sum(block[256:]) + 256
    if kind is None or tail != _NO_TAIL or device not in _NO_DEVICE:
        return None
    if checksum[0] & 0x80 or parse_number(checksum) != total:
        return None
    if magic == _USTAR:
        if prefix != _NO_PREFIX:
            name = prefix.rstrip(b"\0") + b"/" + name
    elif magic != _GNU or prefix != _NO_PREFIX:
        return None
    mode, uid, gid = parse_number(mode_), parse_number(uid_), parse_number(gid_)
    size, mtime = parse_number(size_), parse_number(mtime_)
    if mode is None or uid is None or gid is None or size is None or mtime is None:
        return None
    if not (
        0 <= mode <= 0o7777 and 0 <= uid <= _MAX_ID and 0 <= gid <= _MAX_ID and 0 <= mtime <= 2**33
        and 0 <= size <= limits.entry_size and (kind is Kind.FILE or not size)
    ):  # fmt: skip
        return None
    raw = name.rstrip(b"\0")
    clean = raw[:-1] if kind is Kind.DIR and raw[-1:] == b"/" else raw
    link = link.rstrip(b"\0")
    if not _is_clean(clean, limits) or 0 in link or len(link) > limits.name:
        return None
    if kind is Kind.HARDLINK or kind is Kind.SYMLINK:
        if not _leads(kind, link, clean, limits):
            return None
    else:
        link = b""
    return TarEntry(
        clean, kind, size, mode, uid, gid, mtime * _SECOND, link, 0, 0, NO_XATTRS,
        uname.partition(b"\0")[0], gname.partition(b"\0")[0], start, raw,
    )  # fmt: skip


def _leads(kind: Kind, link: bytes, clean: bytes, limits: Limits) -> bool:
    """Whether a link's target is an ordinary one."""
    if kind is Kind.HARDLINK:
        return link != clean and _is_clean(link, limits)
    return bool(link) and link.count(b"/") < limits.depth


def _is_clean(name: bytes, limits: Limits) -> bool:
    """Whether a name of at most 256 bytes surely is in clean form already."""
    return (
        0 not in name
        and name[:1] not in _EDGE
        and name[-1:] not in _EDGE
        and b"//" not in name
        and ((b"/." not in name and name[0] != 0x2E) or not _DOTS.search(name))
        and name.count(b"/") < limits.depth
        and len(name) <= limits.component
        and len(name) <= limits.name
    )
