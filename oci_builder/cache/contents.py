"""What lies in a cache, and what of it is none of the cache's own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oci_builder.execution.staging import staged_in_use, staged_trees
from oci_builder.model.errors import SpecError, disk_error, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.settings import timestamp
from oci_builder.payload.holdings import foreign_payload, payload_held
from oci_builder.payload.tidy import LOCK
from oci_builder.store.cache import is_build_cache
from oci_builder.store.holdings import Holding, Sizes, in_order
from oci_builder.store.locks import in_use
from oci_builder.store.upkeep import blobs_held, changed_at, foreign_blobs, is_store, plain

RECORD = "build.sqlite"
ASIDE = re.compile(r"\.pruned\.partial-\d+")
_AREAS = frozenset({"store", "tiers", "staged", "stages", "installed", "failed", "answers", "locks"})
_OWN = re.compile(rf"build\.sqlite-(journal|wal|shm)|\.prune\.lock|\.link-probe-.*|{ASIDE.pattern}")
_OWN_STAGED = re.compile(r"[0-9a-f]{32}(-\d+)?(\.partial|\.lock)?|sha256-[0-9a-f]{32}\.json|\.record-.*")
_RUNS = {
    **{name: ("run", re.compile("[a-z0-9-]+-(once|[0-9a-f]{32})")) for name in ("stages", "failed", "answers")},
    "installed": ("installation", re.compile("[0-9a-f]{16}")),
}  # fmt: skip
_LOOKS = 5
_LAST = 253_402_300_799


@dataclass(frozen=True, slots=True)
class Contents:
    """What a cache holds.

    Attributes:
        cache: its folder.
        holdings: oldest use first.
        sizes: of the holdings.
        foreign: what is none of the cache's own, links included.
    """

    cache: Path
    holdings: Sequence[Holding]
    sizes: Sizes
    foreign: Sequence[Path]

    @property
    def size(self) -> int:
        """Bytes of all holdings, each file once."""
        return self.sizes.of(one.place for one in self.holdings)

    def kinds(self) -> dict[str, dict[str, Any]]:
        """Kind -> how many, how large (each file once in a kind), when the last of them was used."""
        out: dict[str, dict[str, Any]] = {}
        for kind in dict.fromkeys(one.kind for one in self.holdings):
            these = [one for one in self.holdings if one.kind == kind]
            out[kind] = {
                "count": len(these), "size": self.sizes.of(one.place for one in these), "used": _stamp(these[-1].used)
            }  # fmt: skip
        return out

    def to_json(self) -> dict[str, Any]:
        """For ``cache show --json``."""
        return {
            "cache": str(self.cache), "size": self.size, "kinds": self.kinds(),
            "holdings": [row(one, self.sizes) for one in self.holdings], "foreign": [str(p) for p in self.foreign],
        }  # fmt: skip


def show_cache(cache: Path, emit: Emit = silent) -> Contents:
    """What lies in a cache, how large, when it was last used. Changes nothing.

    Raises:
        SpecError: ``spec.path``: it is no cache. TransportError: ``io.*``.
    """
    try:
        return contents(cache_folder(cache), emit)
    except OSError as error:
        raise disk_error(error, "looking at the cache") from None


def cache_folder(cache: Path) -> Path:
    """The cache's real folder. An absent one is an empty cache.

    Raises:
        SpecError: ``spec.path``.
    """
    folder = Path(os.path.realpath(cache))
    if os.path.lexists(folder) and not (folder.is_dir() and _is_cache(folder)):
        raise SpecError("spec.path", f"{show(str(cache))} is no cache of oci-builder", where=str(cache))
    return folder


def _is_cache(folder: Path) -> bool:
    """Whether a folder holds something that only we make, or nothing but what could become it."""
    names = {place.name for place in plain(folder)}
    locked = any((folder / name / LOCK).is_file() for name in ("tiers", "locks"))
    return names <= _AREAS or locked or is_store(folder / "store") or bool(_held(folder))


def contents(cache: Path, emit: Emit) -> Contents:
    held = _held(cache)
    emit(Event("start", "measure", total=len(held), unit="items"))
    sizes = Sizes()
    for one in held:
        sizes.add(one.place)
        emit(Event("advance", "measure", 1, unit="items"))
    emit(Event("done", "measure", unit="items"))
    return Contents(cache, in_order(held), sizes, list(_foreign(cache)))


def _held(cache: Path) -> list[Holding]:
    for left in reversed(range(_LOOKS)):
        try:
            return [
                *_marked(built(cache), cache / "tiers" / LOCK), *_marked(runs(cache), cache / "locks" / LOCK),
                *_staged(cache / "staged"),
            ]  # fmt: skip
        except FileNotFoundError:
            # A build that is at work removes and renames.
            if not left:
                raise
    raise AssertionError


def built(cache: Path) -> list[Holding]:
    record = cache / RECORD
    known = [place for place in plain(cache) if place.name == RECORD and is_build_cache(place)]
    beside = tuple(Path(f"{record}{end}") for end in ("-journal", "-wal", "-shm"))
    return [
        *blobs_held(cache / "store"), *payload_held(cache / "tiers"),
        *(Holding("record", place, place.stat().st_mtime, beside=beside) for place in known),
    ]  # fmt: skip


def runs(cache: Path) -> list[Holding]:
    return [
        Holding(kind, place, changed_at(place))
        for name, (kind, pattern) in _RUNS.items() for place in plain(cache / name)
        if pattern.fullmatch(place.name) and place.is_dir() and not place.is_symlink()
    ]  # fmt: skip


def _staged(folder: Path) -> list[Holding]:
    trees = staged_trees(folder) if not folder.is_symlink() else ()
    return [Holding("staged tree", tree.folder, tree.used, busy=staged_in_use(tree)) for tree in trees]


def _marked(held: Iterable[Holding], lock: Path) -> list[Holding]:
    try:
        busy = in_use(lock)
    except OSError:
        busy = False
    return [replace(one, busy=busy) for one in held]


def _foreign(cache: Path) -> Iterator[Path]:
    for place in plain(cache):
        ours = _OWN.fullmatch(place.name) or (place.name in _AREAS and place.is_dir())
        if place.is_symlink() or not (ours or (place.name == RECORD and is_build_cache(place))):
            yield place
    yield from foreign_blobs(cache / "store")
    yield from foreign_payload(cache / "tiers")
    patterns = {"staged": _OWN_STAGED, **{name: pattern for name, (_, pattern) in _RUNS.items()}}
    for name, pattern in patterns.items():
        yield from (p for p in plain(cache / name) if p.is_symlink() or not pattern.fullmatch(p.name))


def _stamp(seconds: float) -> str:
    # A file's time may be anything, a date not.
    return timestamp(int(min(max(seconds, 0), _LAST)))


def row(one: Holding, sizes: Sizes) -> dict[str, Any]:
    return {
        "kind": one.kind, "path": str(one.place), "size": sizes.of([one.place]), "used": _stamp(one.used),
        "in_use": one.busy,
    }  # fmt: skip
