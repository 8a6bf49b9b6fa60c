"""The blob store and the build cache as ``cache prune`` sees them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from oci_builder.model.digest import Digest
from oci_builder.store.blobs import DirStore
from oci_builder.store.cache import BuildCache, is_build_cache
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
    for below, (kind, pattern) in _FOLDERS.items() if is_store(store) else ():
        for place in plain(store / below):
            if pattern.fullmatch(place.name) and not place.is_symlink() and place.is_file():
                beside = (store / "records" / f"{place.name}.json",) if kind == "blob" else ()
                yield Holding(kind, place, max(map(_written_at, (place, *beside))), beside=beside)


def remove_blobs(store: Path, cache: Path, going: Sequence[Holding]) -> Iterator[tuple[Holding, OSError | None]]:
    """Remove these of ``blobs_held``, and what the build cache knows of them. Nobody else may be using the store.

    Yields each with why it stays, if it does; a download that somebody has taken up meanwhile is given with neither.
    """
    if not going:
        return
    with DirStore(store) as blobs:
        for one in going:
            try:
                _remove(blobs, one)
            except BlockingIOError:
                continue
            except OSError as error:
                yield one, error
            else:
                yield one, None
        if is_build_cache(cache):
            with BuildCache(cache) as known:
                known.forget_blobs(blobs.digests())


def _remove(blobs: DirStore, one: Holding) -> None:
    if one.kind == "blob":
        blobs.remove(Digest.from_hex(one.place.name))
    elif one.kind == "partial download":
        held = lock_part(one.place, wait=False)
        try:
            one.place.unlink(missing_ok=True)
        finally:
            os.close(held)
    else:
        one.place.unlink(missing_ok=True)


def is_store(store: Path) -> bool:
    """Whether a folder is a ``DirStore``'s, no part of it a link, and nobody's OCI layout."""
    layout = any(os.path.lexists(store / name) for name in ("index.json", "oci-layout"))
    parts = [store / name for name in ("records", "ingest", "blobs", "blobs/sha256")]
    return not layout and all(place.is_dir() and place.resolve() == place for place in parts)


def foreign_blobs(store: Path) -> Iterator[Path]:
    """What lies in a store's folders and is none of its own; all of it where it is no store of ours."""
    if plain(store) and not is_store(store):
        yield store
        return
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
