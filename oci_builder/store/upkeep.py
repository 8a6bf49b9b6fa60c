"""The blob store and the build cache as ``cache prune`` sees them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from oci_builder.store.blobs import DirStore
from oci_builder.store.cache import BuildCache
from oci_builder.store.holdings import Holding
from oci_builder.store.ingest import lock_part

_HEX = "[0-9a-f]{64}"
_FOLDERS = {
    "blobs/sha256": ("blob", re.compile(_HEX)),
    "ingest": ("partial download", re.compile(r"[A-Za-z0-9._-]+\.part")),
    "quarantine": ("quarantine", re.compile(rf"{_HEX}-\d+")),
}
_OWN = re.compile(rf"blobs|sha256|ingest|quarantine|records|{_HEX}\.json|{_HEX}\.\d+-\d+\.tmp")


def blobs_held(store: Path) -> Iterator[Holding]:
    """Blobs, interrupted downloads and what was put aside, in a ``DirStore``'s folder.

    A blob was last used when its record says so (``DirStore.note_use``).
    """
    for below, (kind, pattern) in _FOLDERS.items():
        for place in plain(store / below):
            if pattern.fullmatch(place.name) and not place.is_symlink() and place.is_file():
                beside = (store / "records" / f"{place.name}.json",) if kind == "blob" else ()
                yield Holding(kind, place, max(map(_written_at, (place, *beside))), beside=beside)


def remove_blobs(store: Path, cache: Path, going: Iterable[Holding]) -> None:
    """Remove these of ``blobs_held``, and what the build cache knows of them. Nobody else may be using the store.

    A download that somebody has taken up meanwhile stays.

    Raises:
        OSError: the disk. What was removed until then is whole.
    """
    gone = {holding.place: holding for holding in going}
    with DirStore(store) as blobs, BuildCache(cache) as known:
        kept = [digest for digest in blobs.digests() if blobs.path(digest) not in gone]
        blobs.gc(kept)
        known.forget_blobs(kept)
        for place, holding in gone.items():
            if holding.kind == "partial download":
                with suppress(BlockingIOError):
                    held = lock_part(place, wait=False)
                    place.unlink(missing_ok=True)
                    os.close(held)
            elif holding.kind != "blob":
                place.unlink(missing_ok=True)


def foreign_blobs(store: Path) -> Iterator[Path]:
    """What lies in a store's folders and is none of its own."""
    for folder in (store, store / "blobs", store / "records", *(store / below for below in _FOLDERS)):
        pattern = next((p for below, (_, p) in _FOLDERS.items() if folder == store / below), _OWN)
        for place in plain(folder):
            if not pattern.fullmatch(place.name) or place.is_symlink():
                yield place


def plain(folder: Path) -> list[Path]:
    """What a folder holds, sorted; nothing of what is none, cannot be read, or lies behind a link.

    Args:
        folder: below a cache whose own path has no links.
    """
    try:
        return sorted(folder.iterdir()) if folder.resolve() == folder else []
    except (OSError, RuntimeError):
        return []


def changed_at(place: Path) -> float:
    """When a file or folder was last written to, moved, or given or deprived of a name; 0 where it is gone."""
    try:
        # Many of ours have a time that was set back: ctime is the kernel's.
        return os.lstat(place).st_ctime
    except OSError:
        return 0.0


def _written_at(place: Path) -> float:
    try:
        return os.lstat(place).st_mtime
    except OSError:
        return 0.0
