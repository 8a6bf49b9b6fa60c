"""What a cache holds, how much disk it takes, and which of it goes: the rules of ``cache prune``, without a removal.

A holding is what goes as one: a blob, an environment, an unpacked wheel, a staged tree. Environments, runtimes and
wheels are hard links of one another, so that a file's room is free when the last of its names goes.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

# In the order in which things of one age go: what was made of others before those.
KINDS = (
    "run", "staged tree", "installation", "runtime", "bytecode", "environment", "python", "cuda", "checkout", "wheel",
    "source distribution", "interpreter", "repository", "index", "blob", "partial download", "quarantine", "record",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Holding:
    """One thing that a cache holds.

    Attributes:
        kind: one of ``KINDS``.
        place: its file or folder.
        used: when it was last used, seconds since 1970.
        needs: places of holdings that it is made of, which stay as long as it does.
        beside: small files that go with it: records, links, pointers.
        busy: somebody uses it now.
    """

    kind: str
    place: Path
    used: float
    needs: tuple[Path, ...] = ()
    beside: tuple[Path, ...] = ()
    busy: bool = False


@dataclass(slots=True)
class Sizes:
    """Disk space of holdings, files with several names told apart; about 100 bytes of memory a file that has several.

    Attributes:
        own: place -> bytes that go with the holding for certain.
        links: place -> inode numbers of its files that have several names.
        shared: inode number -> bytes of such a file.
        names: inode number -> how many names of it the cache has.
    """

    own: dict[Path, int] = field(default_factory=dict)
    links: dict[Path, array[int]] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)
    names: dict[int, int] = field(default_factory=dict)

    def add(self, place: Path) -> None:
        """Measure a file or folder; what cannot be looked at counts nothing. No link is followed."""
        own, links = 0, array("Q")
        for found in _walk(place):
            if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                links.append(found.st_ino)
                self.shared[found.st_ino] = found.st_blocks * 512
                self.names[found.st_ino] = self.names.get(found.st_ino, 0) + 1
            else:
                own += found.st_blocks * 512
        self.own[place], self.links[place] = own, links

    def of(self, places: Iterable[Path]) -> int:
        """Bytes of these together, each file once."""
        own, seen = 0, set[int]()
        for place in places:
            own += self.own.get(place, 0)
            seen.update(self.links.get(place, ()))
        return own + sum(self.shared[inode] for inode in seen)


def _walk(top: Path) -> Iterator[os.stat_result]:
    try:
        first = os.lstat(top)
    except OSError:
        return
    yield first
    left = [] if top.is_symlink() or not top.is_dir() else [os.fspath(top)]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    folder = stat.S_ISDIR(found.st_mode)
                    if folder and found.st_dev != first.st_dev:
                        continue  # mounted there: no room of the cache's, nor to be removed
                    yield found
                    if folder:
                        left.append(entry.path)
        except OSError:
            continue


def in_order(holdings: Sequence[Holding]) -> list[Holding]:
    """Holdings by their last use, oldest first; each counts as used, and in use, when what is made of it does."""
    rank = {kind: number for number, kind in enumerate(KINDS)}
    by_place = {holding.place: holding for holding in holdings}
    for holding in sorted(holdings, key=lambda one: rank[one.kind]):
        now = by_place[holding.place]
        for place in now.needs:
            need = by_place.get(place)
            if need is not None:
                by_place[place] = replace(need, used=max(need.used, now.used), busy=need.busy or now.busy)
    return sorted(by_place.values(), key=lambda one: (one.used, rank[one.kind], one.place))


def choose(holdings: Sequence[Holding], sizes: Sizes, before: float | None, most: int | None) -> list[Holding]:
    """Which go: what was last used before a time, and then the oldest until the rest has room.

    What is in use stays, and so does what was not measured (it came later).

    Args:
        before: seconds since 1970; None: nothing is too old.
        most: bytes; None: any number.
    """
    left, names = sizes.of(sizes.own), dict(sizes.names) if most is not None else {}
    going = []
    for holding in in_order([replace(one, busy=one.busy or one.place not in sizes.own) for one in holdings]):
        old = before is not None and holding.used < before
        if holding.busy or not (old or (most is not None and left > most)):
            continue
        going.append(holding)
        if most is not None:
            left -= sizes.own[holding.place] + _freed(sizes.links[holding.place], names, sizes.shared)
    return going


def _freed(links: Iterable[int], names: dict[int, int], shared: Mapping[int, int]) -> int:
    freed = 0
    for inode in links:
        names[inode] -= 1
        if not names[inode]:
            freed += shared[inode]
    return freed
