"""One sweep over texts, files, what compressed files hold, trees and layers: names, metadata and contents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from oci_builder.model.errors import OciBuilderError, PolicyError
from oci_builder.model.events import Emit, Event
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.report import Finding
from oci_builder.release.inside import OPENERS, TOO_MUCH, MemberClosed, NotOpened, kind_of, peeked
from oci_builder.release.search import Hit, Search
from oci_builder.release.secrets import (
    ScanOptions,
    holds_credentials,
    judged_by,
    names_weights,
    place_of,
    secret_finding,
    weights_finding,
)
from oci_builder.release.shapes import CONFIG
from oci_builder.release.stubs import behind, is_stub
from oci_builder.wire.tar import Kind, TarEntry, TarReader

Chunk = bytes | memoryview
Place = tuple[str, bytes]  # (archive and layer, path)

_DEPTH = 8
# For a decoder, by how deep it stands: all that are open at once are within the bound of the whole program.
_MEMORY = (128 << 20, 72 << 20, *[24 << 20] * (_DEPTH - 2))
_STUB = "program"
_MOST_TOLD = 10
# More say nothing more, and would be kept in memory.
_MOST_FINDINGS = 10_000
_INSIDE = b"!"
# A member costs time however small it is, a container more: so many bytes of what is opened at most.
_PRICE, _PRICE_OPENING = 4 << 10, 16 << 10
# Paths inside are kept for each of a window's texts, and a container's own name may be 64 KiB.
_LONGEST_PLACE = 1024


@dataclass(slots=True)
class Scan:
    """What was looked at and what was found: files of layers and trees, bytes, findings."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    size: int = 0

    @property
    def errors(self) -> list[Finding]:
        """What must not leave."""
        return [f for f in self.findings if f.severity == "error"]

    def warn(self, emit: Emit, task: str) -> None:
        """Say what could not be looked into."""
        for finding in self.findings:
            if finding.severity != "error":
                emit(Event("warning", task, message=finding.message))

    def looked_at(self) -> dict[str, object]:
        """For a receipt's check that passed: how much, and how many compressed files stayed closed."""
        closed = sum(int(f.actual) for f in self.findings if f.severity != "error")
        return {"files": self.files, "bytes": self.size, "unsearched": closed}

    def to_json(self) -> dict[str, object]:
        """For a receipt's check."""
        return {"files": self.files, "bytes": self.size, "findings": [f.to_json() for f in self.findings]}

    def require(self) -> None:
        """Refuse whatever was found; what could not be looked into is no reason.

        Raises:
            PolicyError: ``policy.secret`` or ``policy.weights``, naming the places, never the secrets.
        """
        errors = self.errors
        if not errors:
            return
        lines = [f"{f.message} ({f.actual})" if f.actual else f.message for f in errors[:_MOST_TOLD]]
        more = f"; and {len(errors) - _MOST_TOLD} more" if len(errors) > _MOST_TOLD else ""
        raise PolicyError(
            errors[0].code,
            f"{'; '.join(lines)}{more}. Remove them and build again, or allow what is public with --allow",
            where=errors[0].where, actual=len(errors),
        )  # fmt: skip


class Sweep:
    """Takes files one after the other; ``finish`` when there are no more, and ``found`` has all findings."""

    def __init__(self, options: ScanOptions) -> None:
        self.found = Scan()
        self.options = options
        self._search = Search(self._hit, options.own)
        self._links = Links(options)
        self._seen: set[tuple[Place, bytes]] = set()
        self._let: list[str] = []  # in the container that is open: its own bytes may show the same
        self._opened = 0
        self._closed: list[str] = []
        self._closed_count = 0

    def finish(self, where: str = "") -> None:
        """Search what is left, and say what could not be looked into."""
        self._search.end()
        self._search = Search(self._hit, self.options.own)
        for finding in self._links.findings():
            self.add(finding)
        if self._closed_count:
            more = f"; and {self._closed_count - len(self._closed)} more" if self._closed_count > _MOST_TOLD else ""
            message = f"not searched inside: {'; '.join(self._closed)}{more}"
            self.add(Finding("policy.unsearched", "warning", where, "", str(self._closed_count), message, 0))
        self._closed, self._closed_count = [], 0

    def text(self, place: Place, data: bytes) -> None:
        """Search a text as it is."""
        self._search.begin(place)
        self._search.feed(data)

    def entry(self, entry: TarEntry, content: Iterable[Chunk], where: str, extended: bytes = b"") -> None:
        """Take an entry of a layer or tree: its metadata, and its content when it is a file."""
        self._links.note(entry, where)
        self._entry(self._search, entry, content, (where, entry.name), extended, 0)

    def _entry(
        self, search: Search, entry: TarEntry, content: Iterable[Chunk], place: Place, extended: bytes,
        depth: int,
    ) -> None:  # fmt: skip
        search.begin(place)
        search.feed(b"\n".join((entry.name, entry.link, entry.uname, entry.gname, extended)))
        if entry.kind is Kind.FILE:
            if not depth:
                self.found.files += 1
                self.found.size += entry.size
            self.file(place, entry.size, content, search, depth)

    def file(
        self, place: Place, size: int, chunks: Iterable[Chunk], search: Search | None = None, depth: int = 0
    ) -> None:  # fmt: skip
        """Take a file; reads all of ``chunks``."""
        search = search or self._search
        head, chunks = peeked(chunks)
        weights = weights_finding(place[1], size, head[:16], place[0], self.options)
        if weights is not None and not depth:
            self.add(weights)
        if head and holds_credentials(place[1]) and not self.options.lets(place[1]):
            self.add(secret_finding("credentials file", *place))
        kind = kind_of(head)
        if not kind and depth < _DEPTH and is_stub(head, size):
            kind = _STUB
        if kind in OPENERS or kind in ("tar", _STUB):
            self._container(kind, place, chunks, search, depth)
            return
        if kind:
            self._note_closed(place, f"a {kind} archive")
        settings = CONFIG.fullmatch(judged_by(place[1])) is not None
        into = Search(self._hit, self.options.own, addresses=True) if settings else search
        into.begin(place)
        for chunk in chunks:
            into.feed(chunk)
        if settings:
            into.end()

    def tar(self, chunks: Iterable[Chunk], where: str, limits: Limits = DEFAULT_LIMITS) -> None:
        """Take a layer.

        Raises:
            FormatError, PolicyError: what is wrong with it.
        """
        reader = TarReader(chunks, limits=limits, where=where)
        for entry in reader:
            self.entry(entry, reader.data(), where, reader.extended)
        self.text((where, b""), reader.extended)

    # -- files within files ----------------------------------------------------------------------------------------

    def _container(self, kind: str, place: Place, chunks: Iterable[Chunk], search: Search, depth: int) -> None:
        """Its own bytes, and what it holds, each searched; what both show is told where it is inside."""
        outside: dict[Hit, None] = {}
        own = Search(lambda hit: _few(outside, hit), self.options.own)
        own.begin(place)
        stream = _Tee(chunks, own)
        inner = Search(self._hit, self.options.own)
        before, allowed = len(self.found.findings), len(self._let)
        try:
            if depth >= _DEPTH:
                raise NotOpened(f"{depth} deep in others")
            self._open(kind, place, stream, inner, depth + 1)
        except (NotOpened, OciBuilderError) as error:
            if stream.fault is not None:
                raise stream.fault from None
            self._note_closed(place, error.message if isinstance(error, OciBuilderError) else str(error))
        for _ in stream:
            pass
        own.end()
        inner.end()
        known = {finding.actual for finding in self.found.findings[before:]}.union(self._let[allowed:])
        for hit in outside:
            if f"sha256 {hashlib.sha256(hit.secret).hexdigest()}" not in known:
                self._hit(hit)
        if not depth:
            self._let.clear()

    def _open(self, kind: str, place: Place, stream: Iterable[Chunk], inner: Search, depth: int) -> None:
        if kind == _STUB:
            kind, stream = behind(stream)
            if not kind:
                return
            if kind not in OPENERS and kind != "tar":
                raise NotOpened(f"a {kind} archive behind a program")
        room = self._pay(_PRICE_OPENING)
        limits = replace(DEFAULT_LIMITS, layer_size=room, entry_size=room, zstd_window=_MEMORY[depth - 1])
        if kind == "tar":
            reader = TarReader(self._counted(stream), limits=limits, where=place[1].decode("utf-8", "replace"))
            for entry in reader:
                self._pay(_PRICE)
                self._entry(inner, entry, reader.data(), _within(place, entry.name), reader.extended, depth)
            return
        for name, content in OPENERS[kind](stream, limits, "it"):
            self._pay(_PRICE)
            member = _within(place, name)
            inner.begin(member)
            inner.feed(name)
            try:
                self.file(member, 0, self._counted(content), inner, depth)
            except MemberClosed as error:
                self._note_closed(member, str(error))

    def _pay(self, price: int) -> int:
        """What may still be opened."""
        self._opened += price
        room = self.options.opened + 8 * self.found.size - self._opened
        if room <= 0:
            raise NotOpened(TOO_MUCH)
        return room

    def _counted(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            self._opened += len(chunk)
            yield chunk

    def _note_closed(self, place: Place, why: str) -> None:
        if self.options.lets(place[1]):
            return
        self._closed_count += 1
        if len(self._closed) < _MOST_TOLD:
            self._closed.append(f"{place_of(*place)} ({why[:200]})")

    # -- findings --------------------------------------------------------------------------------------------------

    def _hit(self, hit: Hit) -> None:
        place: Place = hit.label  # type: ignore[assignment]
        digest = hashlib.sha256(hit.secret)
        key = (place, digest.digest())
        if key in self._seen or len(self._seen) >= _MOST_FINDINGS:
            return
        if not self.options.lets(place[1], hit.secret):
            self._seen.add(key)
            self.add(secret_finding(hit.kind, *place, hit.secret))
        elif len(self._let) < _MOST_FINDINGS:
            self._let.append(f"sha256 {digest.hexdigest()}")

    def add(self, finding: Finding) -> None:
        """Take a finding that was made elsewhere."""
        if len(self.found.findings) < _MOST_FINDINGS:
            self.found.findings.append(finding)


def _few(hits: dict[Hit, None], hit: Hit) -> None:
    if len(hits) < _MOST_FINDINGS:
        hits[hit] = None


def _within(place: Place, name: bytes) -> Place:
    """The place of a container's member."""
    path = place[1] + _INSIDE + name
    if len(path) > _LONGEST_PLACE:
        path = path[: _LONGEST_PLACE // 2] + b"..." + path[-_LONGEST_PLACE // 2 :]
    return place[0], path


class _Tee:
    """A container's bytes, searched as they are read. ``fault`` is what whoever gives them raised."""

    def __init__(self, chunks: Iterable[Chunk], search: Search) -> None:
        self._chunks, self._search = iter(chunks), search
        self.fault: Exception | None = None

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        try:
            chunk = next(self._chunks)
        except (OciBuilderError, OSError) as error:
            self.fault = error
            raise
        self._search.feed(chunk)
        return chunk


@dataclass(slots=True)
class Links:
    """Links that are called as weights are, and the sizes of what they may mean: a model cache links names to blobs,
    and equal files of a tree are stored once, under the name that comes first.
    """

    options: ScanOptions
    _large: dict[bytes, int] = field(default_factory=dict)
    _named: list[tuple[bytes, bytes, str]] = field(default_factory=list)

    def note(self, entry: TarEntry, where: str) -> None:
        """Take an entry."""
        if entry.kind is Kind.FILE and entry.size >= self.options.weights_size:
            self._large[entry.name] = entry.size
        elif entry.kind in (Kind.HARDLINK, Kind.SYMLINK) and names_weights(entry.name):
            target = entry.link
            if entry.kind is Kind.SYMLINK:
                target = os.path.normpath(os.path.join(b"/", os.path.dirname(entry.name), target)).lstrip(b"/")
            self._named.append((entry.name, target, where))

    def findings(self) -> Iterator[Finding]:
        """Of all that was taken; begins anew."""
        for path, target, where in self._named:
            size = self._large.get(target, 0)
            # What the file's own name or content tells is said once, there.
            found = None if names_weights(target) else weights_finding(path, size, b"", where, self.options)
            if found is not None and not self.options.lets(target):
                yield found
        self._named, self._large = [], {}
