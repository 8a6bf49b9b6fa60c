"""PAX extended headers: records, and what they may change. Source: POSIX pax, "pax Extended Header"."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from oci_builder.model.errors import FormatError, PolicyError, show
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.wire.tar.names import Warn, Where

XATTR = b"SCHILY.xattr."
_SECONDS = re.compile(rb"(-?)(\d{1,20})(?:\.(\d*))?\Z")
_INTEGER = re.compile(rb"\d{1,20}\Z")
_START = re.compile(rb"([1-9]\d{0,9}) ([^=\0]+)=")
_LENGTH = re.compile(rb"[1-9]\d{0,9} ")

# Records that change what an entry is. In a global header they would change every later entry, and readers disagree
# about that (Go ignores them, GNU tar obeys): refused there.
_MEANINGFUL = frozenset(
    {b"path", b"linkpath", b"size", b"uid", b"gid", b"uname", b"gname", b"mtime", b"hdrcharset", b"mode"}
)
# The rest of a file whose beginning is in another archive (GNU tar -M): what is here is no whole file.
_OF_A_PART = frozenset({b"GNU.volume.filename", b"GNU.volume.offset", b"GNU.volume.size"})
_LIBARCHIVE = b"LIBARCHIVE.xattr."
_REPEATED = frozenset({b"GNU.sparse.offset", b"GNU.sparse.numbytes"})


@dataclass(slots=True)
class Records:
    """The records before one entry.

    Attributes:
        values: key to value, the last one wins, as everywhere.
        sparse_pairs: the repeated offset and numbytes records of sparse format 0.0, in order.
    """

    values: dict[bytes, bytes] = field(default_factory=dict)
    sparse_pairs: list[tuple[bytes, bytes]] = field(default_factory=list)


def parse_records(data: bytes, where: Where, warn: Warn, most: int = DEFAULT_LIMITS.pax_records) -> Records:
    """Parse the body of an ``x`` or ``g`` header.

    Args:
        most: records that it may have, those of sparse maps aside.

    Raises:
        FormatError: ``tar.pax`` for every malformed record.
        PolicyError: ``path.nul``; ``limit.record`` for more records than any writer has use for.
    """
    out = Records()
    at = count = 0
    twice: bytes | None = None
    while at < len(data):
        match = _START.match(data, at)
        end = at + int(match[1]) if match else 0
        if match is None or end > len(data) or end <= match.end() or data[end - 1] != 0x0A:
            raise _malformed(data, at, where)
        key, value = match[2], data[match.end() : end - 1]
        if 0 in value and key in (b"path", b"linkpath", b"uname", b"gname"):
            raise PolicyError("path.nul", f"{where}: a NUL byte in the PAX record {show(key)}", where=where)
        if key in _REPEATED:
            out.sparse_pairs.append((key, value))
        else:
            count += 1
            if count > most:
                raise PolicyError("limit.record", f"{where}: more than {most} records in a PAX header", where=where)
            if key in out.values:
                twice = key
            out.values[key] = value
        at = end
    if twice is not None:
        warn("tar.pax", f"{where}: the PAX key {show(twice[:80])} stands twice; the last one counts")
    if _LIBARCHIVE in data and XATTR not in data:
        warn("tar.pax", f"{where}: extended attributes in libarchive's own records, which only bsdtar reads: left out")
    return out


def _malformed(data: bytes, at: int, where: Where) -> FormatError:
    match = _LENGTH.match(data, at)
    end = at + int(match.group()) if match else 0
    whole = match is not None and match.end() < end <= len(data) and data[end - 1] == 0x0A
    what = "a record without a key" if whole else "a malformed record"
    return _bad(where, f"{what} at byte {at}: {data[at : at + 40]!r}")


def check_global(records: Records, where: Where) -> None:
    """Refuse a global header that changes entries; comments and vendor records pass.

    Raises:
        FormatError: ``tar.global``.
    """
    for key in list(records.values) + [key for key, _ in records.sparse_pairs]:
        if key in _OF_A_PART:
            raise FormatError("tar.global", f"{where}: one volume of several ({show(key)}): join them", where=where)
        if key in _MEANINGFUL or key.startswith((XATTR, b"GNU.sparse", _LIBARCHIVE)):
            raise FormatError("tar.global", f"{where}: a global header sets {show(key)} for all entries", where=where)


def check_own(records: Records, kind: bytes, where: Where) -> None:
    """Refuse records before an entry of this type that one reader cannot read, or takes for something else.

    Raises:
        FormatError: ``tar.ambiguous``, ``entry.mtime``.
    """
    sparse = records.sparse_pairs or any(key.startswith(b"GNU.sparse.") for key in records.values)
    if sparse and kind not in (b"0", b"\0"):
        # Go's reader takes the name in them for sparse files only, GNU tar's and Python's for anything.
        raise FormatError("tar.ambiguous", f"{where}: GNU sparse records, and the entry is no file", where=where)
    for key in (b"atime", b"ctime"):
        # Nobody restores them, but Go and GNU tar read them, and stop at one that is no time.
        if records.values.get(key):
            seconds_ns(records.values[key], where)


def integer(value: bytes, code: str, where: Where) -> int:
    """A non-negative decimal.

    Raises:
        FormatError: ``code`` (``tar.size``, ``tar.pax``).
        PolicyError: ``entry.owner``.
    """
    if not _INTEGER.match(value):
        kind = PolicyError if code == "entry.owner" else FormatError
        raise kind(code, f"{where}: {value[:40]!r} is not a non-negative number", where=where, actual=repr(value[:40]))
    return int(value)


def seconds_ns(value: bytes, where: Where) -> int:
    """A decimal time as nanoseconds; digits beyond nanoseconds are cut off, as in Go.

    Raises:
        FormatError: ``entry.mtime``.
    """
    match = _SECONDS.match(value)
    if match is None or int(match[2]) >= 1 << 63:
        raise FormatError("entry.mtime", f"{where}: the time {value[:40]!r} is not a decimal", where=where)
    sign, whole, fraction = match.groups()
    nanoseconds = int(whole) * 1_000_000_000 + int((fraction or b"")[:9].ljust(9, b"0"))
    return -nanoseconds if sign else nanoseconds


def xattrs(values: dict[bytes, bytes], limit: int, where: Where) -> dict[bytes, bytes]:
    """The extended attributes among the records.

    Raises:
        FormatError: ``entry.xattr`` for an empty name.
        PolicyError: ``limit.xattr``.
    """
    out = {}
    for key, value in values.items():
        if key.startswith(XATTR):
            name = key[len(XATTR) :]
            if not name or len(name) > 255:
                raise FormatError("entry.xattr", f"{where}: an extended attribute named {show(name[:80])}", where=where)
            if len(value) > limit:
                raise PolicyError(
                    "limit.xattr", f"{where}: {len(value)} bytes in {show(name)}, the limit is {limit}", where=where
                )
            out[name] = value
    return out


def record(key: bytes, value: bytes) -> bytes:
    """One record, with its own length in front.

    >>> record(b"path", b"x")
    b'9 path=x\\n'
    """
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + len(str(len(body)))
    if len(str(length)) + len(body) != length:
        length += 1
    return str(length).encode() + body


def _bad(where: Where, what: str) -> FormatError:
    return FormatError("tar.pax", f"{where}: {what}", where=where, actual=what)
