"""What of a cache goes, and how it goes while others use the rest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oci_builder.cache.contents import ASIDE, RECORD, Contents, built, cache_folder, contents, row, runs
from oci_builder.execution.staging import discard, remove_staged, require_unmounted, staged_trees
from oci_builder.model.errors import OciBuilderError, disk_error, show
from oci_builder.model.events import Emit, silent
from oci_builder.payload.tidy import LOCK, forget_uses
from oci_builder.store.holdings import Holding, choose, in_order
from oci_builder.store.locks import alone, alone_now, give_to_owner
from oci_builder.store.upkeep import plain, remove_blobs

DAY = 86400.0
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
            "size": self.size, "removed": [row(one, self.before.sizes) for one in self.removed],
            "in_use": [str(one.place) for one in self.in_use], "foreign": [str(p) for p in self.before.foreign],
            "failed": [{"path": str(place), "code": e.code, "reason": e.message} for place, e in self.failed],
        }  # fmt: skip


def prune_cache(cache: Path, options: PruneOptions, emit: Emit = silent) -> Pruned:
    """Remove what is old, and what is too much. Idempotent.

    What a build, a stage or a sandbox uses stays, and what is none of the cache's own. Another prune is waited for.

    Raises:
        SpecError: ``spec.path``: it is no cache. TransportError: ``io.*``; what could not be removed is in the result.
    """
    before = None if options.keep_days is None else time.time() - options.keep_days * DAY
    try:
        folder = cache_folder(cache)
        with nullcontext() if options.dry_run else _one_at_a_time(folder):
            done = _decide(contents(folder, emit), before, options)
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
        with self._group(work / LOCK, built) as going:
            blobs = [one for one in going if one.kind in _BLOBS]
            for one, error in remove_blobs(self.cache / "store", self.cache / RECORD, blobs):
                with self._trying(one):
                    if error is not None:
                        raise error
                    self.done.removed.append(one)
            for one in going:
                if one.kind == "record":
                    with self._trying(one):
                        _unlink(one.place, *one.beside)
                        self.done.removed.append(one)
            trees = [one for one in going if one.place.is_relative_to(work)]
            aside = self._move(work, trees)
            if trees:
                with suppress(OSError):  # a full disk: that a build was is of no harm
                    forget_uses(work, [one.place.relative_to(work).as_posix() for one in trees])
        self._free(aside)

    def _ran(self) -> None:
        """What stages use."""
        with self._group(self.cache / "locks" / LOCK, runs) as going:
            aside = self._move(self.cache, going)
        self._free(aside)

    @contextmanager
    def _group(self, lock: Path, look: Callable[[Path], Iterable[Holding]]) -> Iterator[list[Holding]]:
        """With the lock: what was decided to go and was not used since. A need of something that was is as young."""
        mine = [one for one in look(self.cache) if one.place in self.planned]
        if not mine:
            yield []
            return
        with ExitStack() as stack:
            try:
                _own_folder(lock.parent)
                free = stack.enter_context(alone_now(lock))
            except OSError as error:
                told = disk_error(error, "asking whether the cache is in use")
                self.done.failed += [(one.place, told) for one in mine]
                yield []
                return
            if not free:
                self.done.in_use += [self.planned[one.place] for one in mine]
                yield []
                return
            now = [replace(one, busy=False) for one in look(self.cache)]
            yield [one for one in in_order(now)
                   if one.place in self.planned and one.used <= self.planned[one.place].used]  # fmt: skip

    def _move(self, parent: Path, going: Iterable[Holding]) -> dict[Holding, Path]:
        """Move aside, what leads to a thing first; holding -> where it lies now."""
        aside = parent / f".pruned.partial-{os.getpid()}"
        moved = {}
        for number, one in enumerate(going):
            with self._trying(one):
                require_unmounted(one.place)  # what is mounted in it would move along
                _unlink(*one.beside)
                moved[one] = aside / str(number)
                try:
                    _own_folder(aside)
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
            whole = str(error.filename) == str(one.place)  # else a name in it
            doing = "removing" if whole else f"removing {show(str(one.place))}:"
            self.done.failed.append((one.place, disk_error(error, doing)))
        except OciBuilderError as error:
            self.done.failed.append((one.place, error))


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
        if ASIDE.fullmatch(aside.name) and not aside.is_symlink():
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


def _own_folder(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        give_to_owner(folder)


def _unlink(*places: Path) -> None:
    for place in places:
        place.unlink(missing_ok=True)


