"""Which files of several trees hold the same content, with as little reading as a proof needs.

The same inode is the same content. Of the rest only files whose size occurs more than once, in more than one tree or
large enough to matter, are read; their digests are remembered by identity (device, inode, size, times).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from oci_builder.model.events import Emit, Event, silent
from oci_builder.rootfs.scan import SourceEntry, Tree, changed, input_failure
from oci_builder.rootfs.scan_fingerprint import SETTLE_NS
from oci_builder.rootfs.scan_hash import difference, open_file, sha256_of
from oci_builder.rootfs.scan_helpers import Helpers
from oci_builder.wire.tar import Kind

# Equal files of one tier below this size stay separate files, as their makers left them: joining them saves nothing.
LINK_FLOOR = 64 << 10
_BATCH = 512
# Processes at a time, and the files for which starting them pays.
_AT_ONCE, _MANY = 8, 4096

Identity = tuple[int, int, int, int, int]
Contents = Mapping[tuple[int, int], bytes]


class HashCache(Protocol):
    """Remembers digests of file content by identity."""

    def known_hashes(self, identities: Sequence[Identity]) -> dict[Identity, bytes]:
        """The digests that are known."""

    def remember_hashes(self, hashes: Mapping[Identity, bytes]) -> None:
        """Keep these digests."""


def open_source(place: bytes, entry: SourceEntry) -> int:
    """A descriptor for reading the file that the scan saw; a link or another file there is an error.

    Raises:
        SpecError: ``scan.changed``.
        TransportError: ``io.*``.
    """
    try:
        descriptor = open_file(place)
    except OSError as error:
        raise input_failure(error, place) from None
    try:
        check_unchanged(descriptor, place, entry)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_unchanged(descriptor: int, place: bytes, entry: SourceEntry) -> None:
    """Compare an open file with what the scan saw.

    Raises:
        SpecError: ``scan.changed`` (C8-13).
    """
    how = difference(
        os.fstat(descriptor), entry.dev, entry.ino, entry.size, entry.mtime_ns, entry.ctime_ns, entry.nlink
    )
    if how:
        raise changed(place, how)


def hash_source(place: bytes, entry: SourceEntry) -> bytes:
    """SHA-256 of a file's content, checked to be what the scan saw before and after.

    Raises:
        SpecError: ``scan.changed``.
        TransportError: ``io.*``.
    """
    descriptor = open_source(place, entry)
    try:
        digest = sha256_of(descriptor, entry.size)
        check_unchanged(descriptor, place, entry)
    except OSError as error:
        raise input_failure(error, place) from None
    finally:
        os.close(descriptor)
    return digest


@dataclass(slots=True)
class _Inode:
    """One file, wherever it is linked."""

    entry: SourceEntry
    tree: Tree
    trees: set[int] = field(default_factory=set)

    @property
    def place(self) -> bytes:
        return os.fsencode(self.tree.root) + b"/" + self.entry.path

    @property
    def settled(self) -> bool:
        return self.entry.ctime_ns < self.tree.started_ns - SETTLE_NS


def content_digests(
    trees: Sequence[Tree], *, cache: HashCache | None = None, threads: int = 2, emit: Emit = silent
) -> dict[tuple[int, int], bytes]:
    """Digests of the files whose content may equal that of another inode, by (device, inode).

    Two files have equal content exactly when they are the same inode or both stand here with equal digests; files
    below ``LINK_FLOOR`` that could only equal others of their own tree are not looked at.

    Args:
        cache: consulted and filled; ``None`` reads every candidate.

    Raises:
        SpecError: ``scan.changed``.
        TransportError: ``io.*``.
    """
    wanted = {inode.entry.identity: inode for inode in _candidates(trees)}
    known = cache.known_hashes(list(wanted)) if cache is not None else {}
    todo = [inode for identity, inode in sorted(wanted.items()) if identity not in known]
    fresh = _hash_all(todo, threads, emit)
    if cache is not None:
        cache.remember_hashes({key: value for key, value in fresh.items() if wanted[key].settled})
    return {identity[:2]: digest for identity, digest in (known | fresh).items() if identity in wanted}


def _candidates(trees: Sequence[Tree]) -> Iterator[_Inode]:
    by_size: dict[int, dict[tuple[int, int], _Inode]] = {}
    for index, tree in enumerate(trees):
        for entry in tree.entries:
            if entry.kind is Kind.FILE and entry.size:
                same = by_size.setdefault(entry.size, {})
                inode = same.get(entry.inode)
                if inode is None:
                    inode = same[entry.inode] = _Inode(entry, tree)
                inode.trees.add(index)
    for size, same in by_size.items():
        spans = len({tree for inode in same.values() for tree in inode.trees}) > 1
        if len(same) > 1 and (spans or size >= LINK_FLOOR):
            yield from same.values()


def _hash_all(inodes: Sequence[_Inode], threads: int, emit: Emit) -> dict[Identity, bytes]:
    if not inodes:
        return {}
    task = "compare files"
    emit(Event("start", task, total=sum(inode.entry.size for inode in inodes)))
    hashes: dict[Identity, bytes] = {}
    many = min(threads, _AT_ONCE) if threads > 1 and len(inodes) >= _MANY else 0
    with Helpers(many) as helpers, ThreadPoolExecutor(many or max(1, threads)) as pool:
        found = pool.map(lambda batch: _hash_batch(batch, helpers), _batches(inodes))
        for batch, digests in zip(_batches(inodes), found, strict=True):
            hashes.update((inode.entry.identity, digest) for inode, digest in zip(batch, digests, strict=True))
            emit(Event("advance", task, sum(inode.entry.size for inode in batch)))
    emit(Event("done", task))
    return hashes


def _batches(inodes: Sequence[_Inode]) -> Iterable[Sequence[_Inode]]:
    return [inodes[start : start + _BATCH] for start in range(0, len(inodes), _BATCH)]


def _hash_batch(inodes: Sequence[_Inode], helpers: Helpers) -> list[bytes]:
    digests = helpers.digests([(inode.place, *inode.entry.identity, inode.entry.nlink) for inode in inodes])
    # Whatever went wrong goes wrong once more, and is said in our words, or does not matter.
    return [digest or hash_source(inode.place, inode.entry) for inode, digest in zip(inodes, digests, strict=True)]
