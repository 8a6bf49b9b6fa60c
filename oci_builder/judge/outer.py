"""The three outer forms: a folder, a tar, a gzip-compressed tar. Each is read once, from front to back."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

from oci_builder.judge.contents import Contents, Intake, link_target
from oci_builder.judge.hashing import Hashers, SideHash
from oci_builder.judge.options import Findings, JudgeOptions
from oci_builder.judge.path import is_folder, layout_members, open_member, tree_hint
from oci_builder.judge.sameness import Known, Segment, Shared
from oci_builder.model.errors import FormatError, OciBuilderError, PolicyError, read_error, show
from oci_builder.model.events import Event
from oci_builder.wire.compress import MemberSeen, Options, decode_chunks, sniff
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import Kind, TarEntry, TarReader, encode_header

_CHUNK = 1 << 20
# Gzip members whose places are kept: more than the largest image has.
_MOST_SEEN = 1 << 17


def read_archive(
    path: Path, options: JudgeOptions, findings: Findings, hashers: Hashers, shared: Shared | None = None
) -> Intake:
    """Read everything that ``path`` holds. Faults of the bytes become findings.

    Raises:
        SpecError: ``spec.path``: no archive and no layout is there.
        TransportError: ``io.*`` when the path cannot be opened or read.
    """
    folder = is_folder(path)
    try:
        if folder:
            intake = Intake(Contents(path, "identity", is_folder=True), options, findings, hashers)
            _folder(intake, path)
            return intake
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return _file(path, fd, options, findings, hashers, shared)
        finally:
            os.close(fd)
    except OSError as error:
        raise read_error(error, f"reading {path.name}") from None


def _file(
    path: Path, fd: int, options: JudgeOptions, findings: Findings, hashers: Hashers, shared: Shared | None
) -> Intake:
    info = os.fstat(fd)
    source = FileRange(fd, 0, info.st_size)
    outer = sniff(source.pread(4, 0))
    cuts = shared.segments(source) if shared and outer == "gzip" else []
    for segments in ([cuts] if options.shortcut and cuts else []) + [[Segment(0, source.size)]]:
        attempt = Findings(findings.where)
        intake = Intake(Contents(path, outer, info.st_size), options, attempt, hashers)
        whole = hashers.new("file")
        options.emit(Event("start", _task(intake), total=sum(segment.end - segment.start for segment in segments)))
        # Fails when a shared segment is not just a member's content, or anything else is odd: then all is read.
        if _OuterTar(intake, source, segments, whole).run():
            break
    options.emit(Event("done", _task(intake)))
    intake.findings = findings
    for finding in attempt.found:
        findings.add(finding)
    _mark_shared(intake.contents, cuts)
    intake.contents.digest = whole.digest()
    if whole.size != info.st_size:
        findings.error("io.changed", "", "the file changed while it was read", status=5)
    return intake


def _task(intake: Intake) -> str:
    return f"{intake.options.task} {intake.contents.path.name}"


def _mark_shared(contents: Contents, cuts: list[Segment]) -> None:
    same = {cut.known.diff_id for cut in cuts if cut.known}
    for member in contents.members.values():
        member.shared = member.digest in same


class _OuterTar:
    """Walks the tar of an archive file."""

    __slots__ = (
        "_foreign",
        "_intake",
        "_places",
        "_prefixed",
        "_pressed",
        "_segments",
        "_source",
        "_task",
        "_unplaced",
        "_whole",
    )

    def __init__(self, intake: Intake, source: FileRange, segments: list[Segment], whole: SideHash) -> None:
        self._intake, self._source, self._segments, self._whole = intake, source, segments, whole
        self._unplaced: dict[int, Known] = {}
        self._places: list[tuple[int, int, str]] = []
        self._foreign: list[tuple[int, int]] = []
        self._pressed: list[tuple[int, int]] = []
        self._prefixed = False
        self._task = _task(intake)

    def run(self) -> bool:
        """Read all members; False when shared segments are in use and anything is not as it should be."""
        intake = self._intake
        where, limits = intake.findings.where, intake.options.limits
        stream = self._stream()
        tar = TarReader(stream, limits=limits, where=where, warn=self._unusual)
        try:
            for entry in tar:
                self._member(entry, tar)
        except OciBuilderError as error:
            if any(segment.known for segment in self._segments):
                return False
            intake.findings.take(_not_an_archive(error, intake.contents))
            intake.contents.complete = False
            self._hash_rest()
        else:
            self._check_end(tar.tar_size)
        finally:
            stream.close()
        self._place_members()
        return not self._unplaced

    def _check_end(self, size: int) -> None:
        end = self._places[-1][1] if self._places else 0
        if self._intake.options.strict and size > end + -end % 512 + 1024:
            self._intake.findings.error(
                "tar.trailing", "", "our archives end with two zero blocks, no more", actual=size
            )

    def _hash_rest(self) -> None:
        """The digest is of the whole file, however far its tar could be read."""
        at = self._whole.size
        while at < self._source.size and (chunk := self._source.pread(_CHUNK, at)):
            self._whole.update(chunk)
            at += len(chunk)

    def _stream(self) -> Generator[bytes | memoryview, None, None]:
        """The outer tar's bytes; a shared segment stands as zeros that nobody will look at."""
        zeros, position = memoryview(bytes(_CHUNK)), 0
        for segment in self._segments:
            raw = self._whole.tee(self._raw(segment))
            if segment.known:
                self._unplaced[position] = segment.known
                for _ in raw:
                    pass
                for at in range(0, segment.known.tar_size, _CHUNK):
                    yield zeros[: segment.known.tar_size - at]
                position += segment.known.tar_size
            else:
                with closing(self._decoded(raw, segment, position)) as decoded:
                    for chunk in decoded:
                        position += len(chunk)
                        yield chunk

    def _raw(self, segment: Segment) -> Iterator[bytes]:
        at, emit, task = segment.start, self._intake.options.emit, self._task
        while at < segment.end:
            chunk = self._source.pread(min(_CHUNK, segment.end - at), at)
            if not chunk:
                return
            at += len(chunk)
            emit(Event("advance", task, amount=len(chunk)))
            yield chunk

    def _decoded(
        self, raw: Iterable[bytes | memoryview], segment: Segment, position: int
    ) -> Generator[bytes | memoryview, None, None]:
        options, contents = self._intake.options, self._intake.contents

        def seen(member: MemberSeen) -> None:
            contents.written_by_us |= member.ours
            if not member.stored:
                found = self._pressed if member.ours else self._foreign
                if len(found) < _MOST_SEEN:
                    found.append((position + member.data_offset, segment.start + member.offset))

        # Before a shared segment nothing may be left over: padding there would hide from the cut.
        strict = options.strict or segment.end < self._source.size
        how = Options(
            options.limits, self._intake.findings.where, options.workers, strict, self._unusual, seen, "image_size"
        )
        return decode_chunks(raw, contents.outer, how)

    def _place_members(self) -> None:
        starts, contents = [start for start, _, _ in self._places], self._intake.contents
        for seen, placed in ((self._foreign, contents.foreign_members), (self._pressed, contents.pressed_members)):
            for data_at, at in seen:
                index = bisect_right(starts, data_at) - 1
                inside = index >= 0 and data_at < self._places[index][1]
                placed.setdefault(self._places[index][2] if inside else "", at)

    def _member(self, entry: TarEntry, tar: TarReader) -> None:
        contents, findings = self._intake.contents, self._intake.findings
        name = entry.name.decode("utf-8", "surrogateescape")
        shown = show(entry.name)
        self._check_header(entry, shown)
        taken = name in contents.members or name in contents.links
        if taken or (entry.kind is not Kind.DIR and name in contents.folders):
            findings.error("archive.duplicate", shown, "two members of this name: readers differ in which they take")
            return
        if entry.kind is Kind.DIR:
            contents.folders.add(name)
            return
        if len(contents.members) >= self._intake.options.limits.archive_members:
            most = f"{findings.where}: more than {len(contents.members)} members"
            raise PolicyError("limit.members", most, where=findings.where)
        if entry.kind is Kind.SYMLINK:
            contents.links[name] = link_target(name, entry.link)
            return
        if entry.kind is not Kind.FILE:
            message = f"a {entry.kind} in an image archive{tree_hint(name)}"
            findings.error("archive.member", shown, message, actual=entry.kind)
            return
        if tar.sparse:
            findings.error("archive.member", shown, "a sparse file in an image archive", actual="sparse")
            return
        at = tar.tar_size
        self._places.append((at, at + entry.size, name))
        data = iter(tar.data())
        first = next(data, None)  # a shared segment is noted when the stream comes to it, not before
        known = self._unplaced.get(at)
        if known and known.tar_size == entry.size:
            del self._unplaced[at]
            contents.members[name] = known.as_member(name)
            return
        chunks = chain([first], data) if first is not None else data
        member = self._intake.member(name, entry.size, chunks)
        if contents.outer == "identity":
            member.range = (at, entry.size)

    def _check_header(self, entry: TarEntry, shown: str) -> None:
        findings, strict = self._intake.findings, self._intake.options.strict
        self._check_checksum(entry, shown)
        if entry.raw_name.startswith((b"./", b"/")):
            message = "names in an archive have no ./ or / in front: some readers do not find them"
            if not self._prefixed:
                findings.judge(strict)("archive.prefix", shown, message, actual=show(entry.raw_name))
            self._prefixed = True
        odd = entry.mtime_ns or entry.uid or entry.gid or entry.uname or entry.gname or entry.xattrs
        if strict and odd:
            findings.error("archive.header", shown, "time 0 and owner 0:0 without names are what we write")

    def _check_checksum(self, entry: TarEntry, shown: str) -> None:
        """All of a header is summed but the sum's own end: where the rest is as ours, that must be too."""
        if self._intake.contents.outer != "identity" or not entry.name:
            return
        block, ours = self._source.pread(512, entry.offset), encode_header(entry)
        if block != ours and block[:154] + ours[154:156] + block[156:] == ours:
            message = "the checksum does not end as it does in headers that are else like this: changed"
            self._intake.findings.error("tar.checksum", shown, message, actual=repr(block[148:156]))

    def _unusual(self, code: str, message: str) -> None:
        if code == "tar.padding":
            self._intake.findings.error(code, "", message)
        elif code not in ("path.absolute", "entry.mode"):  # said once by _check_header; podman writes the latter
            self._intake.findings.warn(code, "", message)


def _not_an_archive(error: OciBuilderError, contents: Contents) -> OciBuilderError:
    if contents.members or error.code not in ("tar.checksum", "tar.truncated"):
        return error
    message = f"{contents.path}: neither an image archive (tar, tar.gz) nor an OCI layout folder"
    return FormatError(error.code, f"{message} ({error.message})", **error.fields)


def _folder(intake: Intake, root: Path) -> None:
    """An OCI layout on disk: only what lies in it counts, links out of it are refused."""
    try:
        files, folders = layout_members(root, intake.options.limits)
    except PolicyError as error:
        intake.findings.take(error)
        intake.contents.complete = False
        return
    intake.contents.folders.update(folders)
    for name in files:
        with intake.findings.collecting():
            fd = open_member(root / name, name)
            try:
                size = os.fstat(fd).st_size
                intake.contents.size += size
                intake.member(name, size, FileRange(fd, 0, size).chunks())
            finally:
                os.close(fd)
