"""Layers that two archives share as bytes: found by the lengths of their gzip members, proved by comparing them.

Our Docker archive holds each layer's compressed blob unchanged (one compression pass, three archives). Where the second
archive repeats the very bytes of a layer that was read and found good in the first, its data is that layer's data; to
inflate it again would only give it again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from oci_builder.judge.contents import Contents, Member
from oci_builder.judge.layer import LayerFacts
from oci_builder.model.digest import Digest
from oci_builder.model.errors import OciBuilderError, read_error
from oci_builder.wire.compress.gzipframe import parse_header
from oci_builder.wire.source import FileRange, open_range

_CHUNK = 1 << 20
_HEAD, _KEY = 64, 32


@dataclass(frozen=True, slots=True)
class Known:
    """A good layer of the first archive."""

    offset: int
    size: int
    diff_id: Digest
    tar_size: int
    facts: LayerFacts

    def as_member(self, name: str) -> Member:
        """The member of the second archive that holds this layer's tar."""
        return Member(name, self.tar_size, self.diff_id, layer=replace(self.facts, compression="identity"), shared=True)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the second archive's file: whole gzip members, of a known layer or not."""

    start: int
    end: int
    known: Known | None = None


class Shared:
    """The good gzip layers of an archive, to be found again in another."""

    __slots__ = ("_known", "_source")

    def __init__(self, contents: Contents, source: FileRange) -> None:
        self._source = source
        self._known: dict[bytes, list[Known]] = {}
        for member in contents.members.values():
            facts, place = member.layer, member.range
            if facts is None or facts.diff_id is None or place is None or facts.compression != "gzip":
                continue
            if facts.problems or facts.padded:
                continue
            known = Known(*place, facts.diff_id, facts.tar_size, facts)
            self._known.setdefault(source.pread(_KEY, known.offset), []).append(known)

    @classmethod
    def of(cls, contents: Contents) -> Shared | None:
        """The layers of an archive file that was read; keep it open until ``close``.

        Raises:
            TransportError: ``io.*``: it was readable a moment ago, and is no more.
        """
        if contents.is_folder:
            return None
        try:
            return cls(contents, open_range(contents.path))
        except OSError as error:
            raise read_error(error, f"reading {contents.path.name}") from None

    def close(self) -> None:
        """Close the first archive's file."""
        os.close(self._source.fd)

    def segments(self, file: FileRange) -> list[Segment]:
        """Cut ``file`` into known and unknown parts. Cuts are guesses until the unknown parts decode cleanly."""
        out: list[Segment] = []
        done = at = 0
        while at < file.size:
            head = file.pread(_HEAD, at)
            known = next((k for k in self._known.get(head[:_KEY], ()) if self._same(k, file, at)), None)
            if known:
                out += [Segment(done, at)] if at > done else []
                out.append(Segment(at, at + known.size, known))
                done = at = at + known.size
                continue
            size = _member_size(head)
            if not size:
                break
            at += size
        return [*out, Segment(done, file.size)] if done < file.size or not out else out

    def _same(self, known: Known, file: FileRange, at: int) -> bool:
        if at + known.size > file.size:
            return False
        for start in range(0, known.size, _CHUNK):
            size = min(_CHUNK, known.size - start)
            if self._source.pread(size, known.offset + start) != file.pread(size, at + start):
                return False
        return True


def _member_size(head: bytes) -> int:
    try:
        header = parse_header(head, 0, "")
    except OciBuilderError:
        return 0
    return (header.member_size or 0) if header else 0
