"""What a header and the extended headers before it say about an entry, field by field.

Where PAX records, GNU long names and the header give different answers, readers disagree too: that is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from oci_builder.model.errors import FormatError, PolicyError
from oci_builder.model.limits import Limits
from oci_builder.wire.tar import pax
from oci_builder.wire.tar.entry import Kind, TarEntry
from oci_builder.wire.tar.header import RawHeader
from oci_builder.wire.tar.names import Place, Warn, Where, check_link, clean_name

_KINDS = {
    b"0": Kind.FILE,
    b"\0": Kind.FILE,
    b"S": Kind.FILE,
    b"1": Kind.HARDLINK,
    b"2": Kind.SYMLINK,
    b"3": Kind.CHAR,
    b"4": Kind.BLOCK,
    b"5": Kind.DIR,
    b"6": Kind.FIFO,
}
_TYPE_BITS = {
    Kind.FILE: 0o100000,
    Kind.HARDLINK: 0o100000,
    Kind.SYMLINK: 0o120000,
    Kind.CHAR: 0o020000,
    Kind.BLOCK: 0o060000,
    Kind.DIR: 0o040000,
    Kind.FIFO: 0o010000,
}
_MAX_ID = 2**32 - 2  # 2**32 - 1 is chown's "leave as it is"
_MAX_SECONDS = 2**33
_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rules:
    """What a tar is held to.

    Attributes:
        archive: its name, for messages.
        strict: whether to our own writer's rules.
        warn: called for what is legal and merely unusual.
    """

    limits: Limits
    archive: str
    strict: bool
    warn: Warn


@dataclass(slots=True)
class Headers:
    """A header, and what stood before it.

    Attributes:
        records: of the PAX header, if there was one.
        names: GNU long names, by the type of their header (``L``, ``K``).
        start: offset of the first of all these headers in the tar.
    """

    raw: RawHeader
    records: pax.Records | None
    names: dict[bytes, bytes]
    start: int


class Fields:
    """The fields of one entry, checked as they are asked for.

    Attributes:
        name: as it is written.
        clean: without what is not needed; ``b""`` for the root.
        stored: bytes of its data area, padding not counted.
        where: for messages.

    Raises:
        FormatError: ``tar.ambiguous``, ``tar.size``, ``tar.link_data``, ``entry.name``, ``path.empty``.
        PolicyError: ``entry.type``, ``entry.root``, ``path.*``, ``limit.*``.
    """

    def __init__(self, headers: Headers, rules: Rules) -> None:
        self._raw, self._names, self._start = headers.raw, headers.names, headers.start
        self._values = headers.records.values if headers.records else {}
        self._rules = rules
        if headers.records:
            pax.check_own(headers.records, self._raw.type, Place(rules.archive, self._start))
        self.name = self._name()
        self.where = Place(rules.archive, self.name)
        self.kind = self._kind()
        self.stored = self._stored()
        self.clean = clean_name(self.name, rules.limits, rules.archive, strict=rules.strict)
        if not self.clean and self.kind is not Kind.DIR:
            raise PolicyError(
                "entry.root", f"{self.where}: a {self.kind} in place of the root folder", where=self.where
            )
        if self.name[:1] == b"/":
            rules.warn("path.absolute", f"{self.where}: an absolute name; the leading / is dropped")

    def entry(self, size: int) -> TarEntry:
        """The entry.

        Args:
            size: of its content, holes included.

        Raises:
            FormatError: ``entry.mtime``, ``tar.ambiguous``, ``tar.pax``, ``path.empty``.
            PolicyError: ``entry.owner``, ``entry.device``, ``entry.mode``, ``entry.link_target``, ``path.*``,
                ``limit.*``.
        """
        raw, values, device = self._raw, self._values, self.kind in (Kind.CHAR, Kind.BLOCK)
        uid, gid = self._owner()
        mtime = self._mtime()
        if device and not (0 <= raw.major < 2**32 and 0 <= raw.minor < 2**32):
            raise PolicyError("entry.device", f"{self.where}: device {raw.major}:{raw.minor}", where=self.where)
        return TarEntry(
            name=self.clean,
            kind=self.kind,
            size=size,
            mode=self._mode(),
            uid=uid,
            gid=gid,
            mtime_ns=mtime,
            link=self._link(),
            major=raw.major if device else 0,
            minor=raw.minor if device else 0,
            xattrs=pax.xattrs(values, self._rules.limits.xattr_size, self.where) if values else {},
            uname=values.get(b"uname", raw.uname),
            gname=values.get(b"gname", raw.gname),
            offset=self._start,
            raw_name=self.name,
        )

    def _name(self) -> bytes:
        raw, values, long_name = self._raw, self._values, self._names.get(b"L")
        path = values.get(b"GNU.sparse.name") or values.get(b"path")
        if long_name is not None and path and path != long_name:
            raise self._ambiguous("PAX and GNU give different names for one entry")
        return path or long_name or raw.name

    def _ambiguous(self, what: str) -> FormatError:
        where = Place(self._rules.archive, self._start)
        return FormatError("tar.ambiguous", f"{where}: {what}", where=where)

    def _kind(self) -> Kind:
        kind, where = _KINDS.get(self._raw.type), self.where
        if kind is None:
            what = repr(self._raw.type)
            raise PolicyError("entry.type", f"{where}: entry type {what}", where=where, actual=what)
        if kind is Kind.FILE and self.name.endswith(b"/"):
            # Before type 5 existed this was how folders were written. With type 0 Go sees a file, GNU tar a folder.
            if self._raw.type != b"\0":
                raise FormatError("entry.name", f"{where}: a file's name with a slash at its end", where=where)
            return Kind.DIR
        return kind

    def _stored(self) -> int:
        values, where = self._values, self.where
        size = pax.integer(values[b"size"], "tar.size", where) if b"size" in values else self._raw.size
        check_size(size, self._rules.limits, where)
        if size and self.kind is not Kind.FILE:
            raise FormatError(
                "tar.link_data", f"{where}: a {self.kind} with {size} bytes of data; readers disagree about those",
                where=where, actual=size,
            )  # fmt: skip
        return size

    def _owner(self) -> tuple[int, int]:
        values, where = self._values, self.where
        uid = pax.integer(values[b"uid"], "entry.owner", where) if b"uid" in values else self._raw.uid
        gid = pax.integer(values[b"gid"], "entry.owner", where) if b"gid" in values else self._raw.gid
        if not (0 <= uid <= _MAX_ID and 0 <= gid <= _MAX_ID):
            raise PolicyError("entry.owner", f"{where}: owner {uid}:{gid} does not fit 32 bits", where=where)
        return uid, gid

    def _mtime(self) -> int:
        """Nanoseconds since 1970."""
        written, where = self._values.get(b"mtime"), self.where
        mtime = pax.seconds_ns(written, where) if written is not None else self._raw.mtime * _SECOND
        if abs(mtime) > _MAX_SECONDS * _SECOND:
            raise FormatError("entry.mtime", f"{where}: the time {mtime // _SECOND} s is out of range", where=where)
        return mtime

    def _mode(self) -> int:
        mode, where = self._raw.mode, self.where
        extra = mode & ~0o7777
        if extra:
            # Go before 1.9 wrote the file type into the mode field, and images of that time are still around.
            if self._rules.strict or extra != _TYPE_BITS[self.kind]:
                raise PolicyError("entry.mode", f"{where}: mode {mode:o}", where=where, actual=oct(mode))
            self._rules.warn("entry.mode", f"{where}: mode {mode:o} holds the file type as well")
        return mode & 0o7777

    def _link(self) -> bytes:
        if self.kind not in (Kind.SYMLINK, Kind.HARDLINK):
            return b""
        where, rules = self.where, self._rules
        long_link, path = self._names.get(b"K"), self._values.get(b"linkpath")
        if long_link is not None and path and path != long_link:
            raise FormatError("tar.ambiguous", f"{where}: PAX and GNU give different link targets", where=where)
        target = path or long_link or self._raw.link
        if self.kind is Kind.SYMLINK:
            return check_link(target, rules.limits, where)
        link = clean_name(target, rules.limits, where, strict=rules.strict)
        # GNU tar writes a link to itself when it is given a name twice: nothing to do, if the file is there.
        if not link or (link == self.clean and rules.strict):
            what = "itself" if link else "the root folder"
            raise PolicyError("entry.link_target", f"{where}: a hard link to {what}", where=where, actual=what)
        return link


def check_size(size: int, limits: Limits, where: Where, code: str = "tar.size") -> None:
    """Refuse a size that no entry can have, or may have.

    Raises:
        FormatError: ``code``. PolicyError: ``limit.entry``, or ``code`` where that is not ``tar.size``.
    """
    if size < 0 or size >= 1 << 63:
        raise FormatError(code, f"{where}: a size of {size}", where=where, actual=size)
    if size > limits.entry_size:
        code = "limit.entry" if code == "tar.size" else code
        raise PolicyError(code, f"{where}: {size} bytes, the limit is {limits.entry_size}", where=where, actual=size)
