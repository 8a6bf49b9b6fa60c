"""``cache show`` and ``cache prune``: what a cache holds, and which of it goes.

A prune decides by what it measured, then takes the lock that builds share, looks again, and moves what nobody has used
since aside; a build that starts meanwhile waits for that moment only, and the disk is freed after it. What a killed
prune moved aside goes with the next one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oci_builder.execution.staging import discard, remove_staged, staged_in_use, staged_trees
from oci_builder.model.errors import OciBuilderError, SpecError, disk_error, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.settings import timestamp
from oci_builder.payload.holdings import foreign_payload, payload_held
from oci_builder.payload.tidy import LOCK, forget_uses
from oci_builder.store.holdings import Holding, Sizes, choose, in_order
from oci_builder.store.locks import alone, alone_now, in_use
from oci_builder.store.upkeep import blobs_held, changed_at, foreign_blobs, plain, remove_blobs

DAY = 86400.0
_RECORD, _ASIDE = "build.sqlite", ".pruned.partial-"
_AREAS = frozenset({"store", "tiers", "staged", "stages", "installed", "failed", "answers", "locks"})
_OWN = re.compile(r"build\.sqlite(-journal|-wal|-shm)?|\.prune\.lock|\.link-probe-.*|\.pruned\.partial-\d+")
_OWN_STAGED = re.compile(r"[0-9a-f]{32}(-\d+)?(\.partial|\.lock)?|sha256-[0-9a-f]{32}\.json|\.record-.*")
_RUNS = {
    **{name: ("run", re.compile(r"[a-z0-9-]+-[A-Za-z0-9]+")) for name in ("stages", "failed", "answers")},
    "installed": ("installation", re.compile("[0-9a-f]{16}")),
}  # fmt: skip
_LOOKS = 5
_BLOBS = ("blob", "partial download", "quarantine")


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """What goes.

    Attributes:
        keep_days: what nobody used for so long goes; None: nothing is too old.
        max_size: bytes that the cache may take; what was not used for longest goes until it does. None: any number.
        dry_run: only say what would go.
    """

    keep_days: float | None = None
    max_size: int | None = None
    dry_run: bool = False


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
            "holdings": [_row(one, self.sizes) for one in self.holdings], "foreign": [str(p) for p in self.foreign],
        }  # fmt: skip


@dataclass(slots=True)
class Pruned:
    """What a prune did, or would do.

    Attributes:
        before: what there was.
        removed: what went; of a dry run what would.
        in_use: what would have gone, had nobody used it.
        failed: place and reason of what should have gone and could not.
    """

    before: Contents
    dry_run: bool
    removed: list[Holding]
    in_use: list[Holding]
    failed: list[tuple[Path, OciBuilderError]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes that the cache takes afterwards."""
        gone = {one.place for one in self.removed}
        return self.before.sizes.of(one.place for one in self.before.holdings if one.place not in gone)

    def to_json(self) -> dict[str, Any]:
        """For ``cache prune --json``."""
        return {
            "cache": str(self.before.cache), "dry_run": self.dry_run, "freed": self.before.size - self.size,
            "size": self.size, "removed": [_row(one, self.before.sizes) for one in self.removed],
            "in_use": [str(one.place) for one in self.in_use], "foreign": [str(p) for p in self.before.foreign],
            "failed": [{"path": str(place), "code": e.code, "reason": e.message} for place, e in self.failed],
        }  # fmt: skip


def show_cache(cache: Path, emit: Emit = silent) -> Contents:
    """What lies in a cache, how large, when it was last used. Changes nothing.

    Raises:
        SpecError: ``spec.path``: it is no cache. TransportError: ``io.*``.
    """
    folder = _folder(cache)
    try:
        return _contents(folder, emit)
    except OSError as error:
        raise disk_error(error, "looking at the cache") from None


def prune_cache(cache: Path, options: PruneOptions, emit: Emit = silent) -> Pruned:
    """Remove what is old, and what is too much. Idempotent.

    What a build, a stage or a sandbox uses stays, and what is none of the cache's own. Another prune is waited for.

    Raises:
        SpecError: ``spec.path``: it is no cache. TransportError: ``io.*``; what could not be removed is in the result.
    """
    folder = _folder(cache)
    before = None if options.keep_days is None else time.time() - options.keep_days * DAY
    try:
        with nullcontext() if options.dry_run else _one_at_a_time(folder):
            done = _decide(_contents(folder, emit), before, options)
            if not options.dry_run:
                _Removal(done, emit).run()
            return done
    except OSError as error:
        raise disk_error(error, "pruning the cache") from None


def _decide(found: Contents, before: float | None, options: PruneOptions) -> Pruned:
    going = choose(found.holdings, found.sizes, before, options.max_size)
    idle = [replace(one, busy=False) for one in found.holdings]
    chosen = {one.place for one in going}
    kept = {one.place for one in found.holdings if one.busy} - chosen
    in_use = [one for one in choose(idle, found.sizes, before, options.max_size) if one.place in kept]
    return Pruned(found, options.dry_run, going, in_use)


class _Removal:
    """What was decided, done group by group, each under the lock of those who use it."""

    def __init__(self, done: Pruned, emit: Emit) -> None:
        self.cache, self.done, self.emit = done.before.cache, done, emit
        self.planned, done.removed = {one.place: one for one in done.removed}, []

    def run(self) -> None:
        """Remove; ``done`` then says what went, what stayed because it came into use, and what could not go."""
        self.done.failed += _sweep(self.cache)
        self._built()
        self._ran()
        for tree in staged_trees(self.cache / "staged"):
            planned = self.planned.get(tree.folder)
            if planned is not None and tree.used <= planned.used:
                with self._trying(planned):
                    if not remove_staged(tree):
                        self.done.in_use.append(planned)
                        continue
                    self.done.removed.append(planned)

    def _built(self) -> None:
        """What builds use."""
        work = self.cache / "tiers"
        with self._group(work / LOCK, _built) as going:
            blobs = [one for one in going if one.kind in _BLOBS]
            if blobs:
                remove_blobs(self.cache / "store", self.cache / _RECORD, blobs)
            for one in going:
                if one.kind == "record":
                    _unlink(one.place, *one.beside)
            trees = [one for one in going if one.place.is_relative_to(work)]
            self.done.removed += [one for one in going if one not in trees]
            aside = self._move(work, trees)
            if trees:
                with suppress(OSError):  # a full disk: that a build was is of no harm
                    forget_uses(work, [one.place.relative_to(work).as_posix() for one in trees])
        self._free(aside)

    def _ran(self) -> None:
        """What stages use."""
        with self._group(self.cache / "locks" / LOCK, _runs) as going:
            aside = self._move(self.cache, going)
        self._free(aside)

    @contextmanager
    def _group(self, lock: Path, look: Callable[[Path], Iterable[Holding]]) -> Iterator[list[Holding]]:
        """With the lock: what was decided to go and was not used since. A need of something that was is as young."""
        mine = [one for one in look(self.cache) if one.place in self.planned]
        if not mine:
            yield []
            return
        lock.parent.mkdir(exist_ok=True)
        with alone_now(lock) as free:
            if not free:
                self.done.in_use += [self.planned[one.place] for one in mine]
                yield []
                return
            now = [replace(one, busy=False) for one in look(self.cache)]
            yield [one for one in in_order(now)
                   if one.place in self.planned and one.used <= self.planned[one.place].used]  # fmt: skip

    def _move(self, parent: Path, going: Iterable[Holding]) -> dict[Holding, Path]:
        """Move aside, what leads to a thing first; holding -> where it lies now."""
        aside = parent / f"{_ASIDE}{os.getpid()}"
        moved = {}
        for number, one in enumerate(going):
            with self._trying(one):
                _unlink(*one.beside)
                moved[one] = aside / str(number)
                try:
                    aside.mkdir(mode=0o700, exist_ok=True)
                    one.place.rename(moved[one])
                except OSError:
                    # A disk that is full to the last block, or one that moves no folders (overlayfs): builds wait.
                    del moved[one]
                    _remove(one.place)
                    self.done.removed.append(one)
        return moved

    def _free(self, aside: Mapping[Holding, Path]) -> None:
        for one, place in aside.items():
            with self._trying(one):
                _remove(place)
                self.done.removed.append(one)
        for parent in {place.parent for place in aside.values()}:
            with suppress(OSError):
                parent.rmdir()

    @contextmanager
    def _trying(self, one: Holding) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.done.failed.append((one.place, disk_error(error, f"removing {show(str(one.place))}")))
        except OciBuilderError as error:
            self.done.failed.append((one.place, error))


# ---- what there is


def _folder(cache: Path) -> Path:
    """The cache's real folder. An absent one is an empty cache.

    Raises:
        SpecError: ``spec.path``.
    """
    folder = cache.resolve()
    names = {place.name for place in plain(folder)}
    if folder.exists() and (not folder.is_dir() or (names and not names & {_RECORD, "store", "tiers", "staged"})):
        raise SpecError("spec.path", f"{show(str(cache))} is no cache of oci-builder", where=str(cache))
    return folder


def _contents(cache: Path, emit: Emit) -> Contents:
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
                *_marked(_built(cache), cache / "tiers" / LOCK), *_marked(_runs(cache), cache / "locks" / LOCK),
                *_staged(cache / "staged"),
            ]  # fmt: skip
        except FileNotFoundError:
            # A build that is at work removes and renames.
            if not left:
                raise
    raise AssertionError


def _built(cache: Path) -> list[Holding]:
    record = cache / _RECORD
    known = [place for place in plain(cache) if place.name == _RECORD and place.is_file() and not place.is_symlink()]
    beside = tuple(Path(f"{record}{end}") for end in ("-journal", "-wal", "-shm"))
    return [
        *blobs_held(cache / "store"), *payload_held(cache / "tiers"),
        *(Holding("record", place, place.stat().st_mtime, beside=beside) for place in known),
    ]  # fmt: skip


def _runs(cache: Path) -> list[Holding]:
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
        if place.is_symlink() or not (_OWN.fullmatch(place.name) or (place.name in _AREAS and place.is_dir())):
            yield place
    yield from foreign_blobs(cache / "store")
    yield from foreign_payload(cache / "tiers")
    patterns = {"staged": _OWN_STAGED, **{name: pattern for name, (_, pattern) in _RUNS.items()}}
    for name, pattern in patterns.items():
        yield from (p for p in plain(cache / name) if p.is_symlink() or not pattern.fullmatch(p.name))


# ---- removal


@contextmanager
def _one_at_a_time(cache: Path) -> Iterator[None]:
    with ExitStack() as stack:
        if cache.exists():
            with suppress(OSError):  # a full disk takes no new file: who prunes it shall not have to wait for room
                stack.enter_context(alone(cache / ".prune.lock"))
        yield


def _sweep(cache: Path) -> list[tuple[Path, OciBuilderError]]:
    """Remove what killed prunes moved aside, as nobody else prunes now; what cannot be removed, with the reason."""
    failed: list[tuple[Path, OciBuilderError]] = []
    for aside in (place for parent in (cache, cache / "tiers") for place in plain(parent)):
        if aside.name.startswith(_ASIDE) and not aside.is_symlink():
            try:
                _remove(aside)
            except OSError as error:
                failed.append((aside, disk_error(error, "removing")))
            except OciBuilderError as error:
                failed.append((aside, error))
    return failed


def _remove(place: Path) -> None:
    """Raises OSError, or TransportError ``io.busy`` where something is mounted below."""
    with suppress(FileNotFoundError):  # a build's own tidying may be as far
        discard(place)


def _unlink(*places: Path) -> None:
    for place in places:
        place.unlink(missing_ok=True)


def _stamp(seconds: float) -> str:
    return timestamp(int(seconds))


def _row(one: Holding, sizes: Sizes) -> dict[str, Any]:
    return {
        "kind": one.kind, "path": str(one.place), "size": sizes.of([one.place]), "used": _stamp(one.used),
        "in_use": one.busy,
    }  # fmt: skip
