"""The strict tar reader: one pass over a stream, one answer, every byte accounted for.

Python's ``tarfile`` stops silently at a bad checksum, accepts negative sizes and disagrees with GNU tar on links that
carry data. This reader refuses what readers disagree about, and follows Go's archive/tar where writers differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from oci_builder.model.errors import FormatError, PolicyError
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.wire.source import ChunkReader, FileRange
from oci_builder.wire.tar import pax
from oci_builder.wire.tar.entry import TarEntry
from oci_builder.wire.tar.fields import Fields, Headers, Rules, check_size
from oci_builder.wire.tar.header import BLOCK, ZERO_BLOCK, RawHeader, parse_header
from oci_builder.wire.tar.names import Place, Warn, Where, ignore
from oci_builder.wire.tar.plain import plain_entry
from oci_builder.wire.tar.sparse import SparseMap, old_gnu_map, pax_map, sparse_error


class TarReader:
    """Iterate over the entries of a tar; ``data`` gives the current entry's content.

    Iteration ends when the end marker was seen and the rest of the stream was read and found to be zeros. Content that
    is not read is passed over.

    Args:
        chunks: the tar's bytes. Of a file, content that is not asked for is not read.
        where: name of the archive or layer, for messages.
        strict: hold the tar to our own writer's rules.
        warn: called for what is legal and merely unusual.

    Attributes:
        extended: the bodies of the extended headers before the current entry, those included that change nothing.

    Raises:
        FormatError: ``tar.checksum``, ``tar.truncated``, ``tar.trailing``, ``tar.size``, ``tar.pax``, ``tar.global``,
            ``tar.longname``, ``tar.ambiguous``, ``tar.link_data``, ``entry.sparse``, ``entry.mtime``, ``entry.name``,
            ``path.empty``.
        PolicyError: ``entry.type``, ``entry.root``, ``entry.owner``, ``entry.device``, ``entry.mode``,
            ``entry.link_target`` (to the root; strict: to itself), ``path.*``, ``limit.*``.
    """

    def __init__(
        self,
        chunks: Iterable[bytes | memoryview] | FileRange,
        *,
        limits: Limits = DEFAULT_LIMITS,
        where: str = "tar",
        strict: bool = False,
        warn: Warn = ignore,
    ) -> None:
        self._in = ChunkReader(chunks)
        self._rules = Rules(limits, where, strict, warn)
        self._limits, self._where, self._strict, self._warn = limits, where, strict, warn
        self._left = 0  # bytes of the current entry's data area, padding included, not yet read
        self._stored = 0  # of those, content
        self._sparse: SparseMap | None = None
        self._extended = 0  # bytes of extended headers
        self.extended = b""
        self._holes = 0  # bytes that sparse files have on top of what is stored
        self.entries = 0

    @property
    def tar_size(self) -> int:
        """Bytes of the tar read so far; its size once iteration has ended."""
        return self._in.offset

    def __iter__(self) -> Iterator[TarEntry]:
        while True:
            if self._left:
                self._skip_data()
            start = self._in.offset
            block = self._in.read_exact(BLOCK)
            entry = plain_entry(block, start, self._limits) if len(block) == BLOCK else None
            if entry is not None:
                self._sparse, self.extended = None, b""
                self._stored = entry.size
                self._left = entry.size + -entry.size % BLOCK
            else:
                raw, records, names = self._headers(block)
                if raw is None:
                    self._end(records, names)
                    return
                fields = Fields(Headers(raw, records, names, start), self._rules)
                entry = fields.entry(self._open_data(raw, records, fields.stored, fields.where))
            self.entries += 1
            if self.entries > self._limits.entries:
                raise PolicyError(
                    "limit.entries", f"{self._where}: more than {self._limits.entries} entries", where=self._where
                )
            yield entry

    @property
    def sparse(self) -> bool:
        """Whether the current entry is stored with holes."""
        return self._sparse is not None

    def data(self) -> Iterator[memoryview]:
        """The current entry's content. Call it once for an entry."""
        stored = self._data_area()
        return self._sparse.expand(stored) if self._sparse else stored

    def pieces(self) -> Iterator[memoryview | int]:
        """As ``data``, with the lengths of holes in place of their zeros."""
        stored = self._data_area()
        return self._sparse.pieces(stored) if self._sparse else stored

    # -- headers ---------------------------------------------------------------------------------------------------

    def _headers(self, block: bytes) -> tuple[RawHeader | None, pax.Records | None, dict[bytes, bytes]]:
        """From ``block`` on, the next real header and its extended headers; ``None`` at the end marker."""
        records: pax.Records | None = None
        names: dict[bytes, bytes] = {}
        self.extended = b""
        where = Place(self._where, self._in.offset - len(block))
        for count in range(self._limits.pax_headers + 1):
            if count:
                where = Place(self._where, self._in.offset)
                block = self._in.read_exact(BLOCK)
            if len(block) < BLOCK:
                raise self._truncated(where, "within a header" if block else "without an end marker")
            if block == ZERO_BLOCK:
                return None, records, names
            raw = parse_header(block, where)
            if raw.type == b"x":
                # A second header for one entry replaces the first in some readers and adds to it in others.
                if records is not None:
                    raise FormatError("tar.pax", f"{where}: two PAX headers for one entry", where=where)
                records = self._records(raw, where)
            elif raw.type == b"g":
                pax.check_global(self._records(raw, where), where)
                if self._strict:
                    raise FormatError("tar.global", f"{where}: a global header", where=where)
            elif raw.type in (b"L", b"K"):
                self._long_name(raw, names, where)
            else:
                return raw, records, names
        raise PolicyError(
            "limit.pax_headers", f"{where}: more than {self._limits.pax_headers} extended headers before one entry",
            where=where,
        )  # fmt: skip

    def _records(self, raw: RawHeader, where: Where) -> pax.Records:
        return pax.parse_records(self._record_body(raw, where), where, self._warn, self._limits.pax_records)

    def _long_name(self, raw: RawHeader, names: dict[bytes, bytes], where: Where) -> None:
        body = self._record_body(raw, where)
        value = body.rstrip(b"\0")
        if 0 in value:
            raise PolicyError("path.nul", f"{where}: a NUL byte in a GNU long name", where=where)
        if not value:
            raise FormatError("tar.longname", f"{where}: an empty GNU long name", where=where)
        if names.setdefault(raw.type, value) != value:
            raise FormatError("tar.ambiguous", f"{where}: two GNU long names for one entry", where=where)

    def _record_body(self, raw: RawHeader, where: Where) -> bytes:
        check_size(raw.size, self._limits, where)
        if raw.size > self._limits.record:
            raise PolicyError(
                "limit.record", f"{where}: an extended header of {raw.size} bytes, the limit is {self._limits.record}",
                where=where,
            )  # fmt: skip
        self._extended += raw.size
        if self._extended > self._limits.pax_bytes:
            raise PolicyError(
                "limit.pax_bytes", f"{where}: over {self._limits.pax_bytes} bytes of extended headers", where=where
            )
        body = self._in.read_exact(raw.size)
        pad = -raw.size % BLOCK
        if len(body) < raw.size or self._in.skip(pad) < pad:
            raise self._truncated(where, "within an extended header")
        self.extended += body
        return body

    def _end(self, records: pax.Records | None, names: dict[bytes, bytes]) -> None:
        """Check what follows the first zero block."""
        where = Place(self._where, self._in.offset)
        if records is not None or names:
            raise FormatError("tar.pax", f"{where}: an extended header without an entry", where=where)
        second = self._in.read_exact(BLOCK)
        if 0 < len(second) < BLOCK and not any(second):
            raise self._truncated(where, "within the end marker")
        if not second:
            raise self._trailing(where, "one zero block instead of the end marker's two")
        if second != ZERO_BLOCK:
            raise self._trailing(where, "one zero block and then more")
        extra = 0
        for part in self._in.rest():
            extra += len(part)
            if bytes(part).count(0) != len(part):
                raise self._trailing(where, "bytes after the end marker")
        if extra and self._strict:
            raise self._trailing(where, f"{extra} zero bytes after the end marker")

    # -- data ------------------------------------------------------------------------------------------------------

    def _open_data(self, raw: RawHeader, records: pax.Records | None, stored: int, where: Where) -> int:
        """Set up the data area; returns the size of the content."""
        self._sparse = None
        if raw.type == b"S":
            raw.size = stored
            self._sparse = old_gnu_map(raw, self._in, self._limits.record, where)
            self._warn("entry.sparse", f"{where}: a sparse file of GNU tar's old form: Docker refuses it")
        elif records is not None and raw.type in (b"0", b"\0"):
            self._sparse = pax_map(records, stored, self._in, self._limits.record, where)
        used = self._sparse.used if self._sparse else 0
        size = self._sparse.size if self._sparse else stored
        if self._sparse:
            if self._strict:
                raise sparse_error(where, "our layers hold no sparse entries")
            check_size(size, self._limits, where, "entry.sparse")
            # Holes cost an archive nothing: what the stream's own budget does not see is counted here.
            self._holes += size - (stored - used)
            if self._in.offset + self._holes > self._limits.layer_size:
                raise PolicyError(
                    "limit.layer", f"{where}: sparse files expand beyond {self._limits.layer_size} bytes", where=where
                )
        self._stored = stored - used
        self._left = self._stored + (-stored % BLOCK)
        return size

    def _data_area(self) -> Iterator[memoryview]:
        while self._stored:
            got = False
            for part in self._in.iter_data(self._stored):
                got = True
                self._stored -= len(part)
                self._left -= len(part)
                yield part
            if not got:
                raise self._truncated(Place(self._where, self._in.offset), "within an entry's content")

    def _skip_data(self) -> None:
        skipped = self._in.skip(self._stored)
        self._left -= skipped
        if skipped < self._stored:
            raise self._truncated(Place(self._where, self._in.offset), "within an entry's content")
        self._stored = 0
        if self._left:
            pad = self._in.read_exact(self._left)
            where = Place(self._where, self._in.offset)
            if len(pad) < self._left:
                raise self._truncated(where, "within padding")
            if pad.count(0) != len(pad):
                if self._strict:
                    raise self._trailing(where, "padding that is not zeros")
                self._warn("tar.padding", f"{where}: padding that is not zeros")
            self._left = 0

    def _truncated(self, where: Where, what: str) -> FormatError:
        # umoci 0.4.7's insert writes such layers; GNU tar complains of them too.
        why = " (cut off, or its writer left that out)" if what.startswith("without") else ""
        return FormatError(
            "tar.truncated", f"{where}: the archive ends {what}{why}; fetch it again", where=where, actual=what
        )

    def _trailing(self, where: Where, what: str) -> FormatError:
        return FormatError("tar.trailing", f"{where}: {what}", where=where, actual=what)
