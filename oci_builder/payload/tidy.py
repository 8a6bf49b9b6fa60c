"""What the cache keeps of the payload: what a spec's last builds used, and not what came before.

A build holds the cache shared while it reads; what is old goes only when nobody else holds it. uv's own cache and the
fetched repositories stay: they are what the next build is quick by.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from chroot_exec.teardown import mounts_below
from oci_builder.model.events import Emit, Event
from oci_builder.model.jsontext import dump_json
from oci_builder.model.sizes import human
from oci_builder.payload.partial import PARTIAL, beside
from oci_builder.store.holdings import Sizes
from oci_builder.store.locks import alone, give_to_owner, lock_file
from oci_builder.store.removal import remove_folder

KEPT_BUILDS = 2
# Of what no record names (made before there were records, or by a build that failed).
KEPT_SECONDS = 7 * 86400.0
# A use is written down once in so long, where nothing else has changed.
_RECENT_SECONDS = 3600.0
_LAST = 1 << 40
LOCK = ".in-use.lock"
_USES = "uses.json"
_MADE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9a-f]{20}")


@contextmanager
def in_use(work: Path) -> Iterator[None]:
    """While this is open, nobody's ``tidy`` removes anything below ``work``. Any number of builds may have it open.

    Raises:
        OSError: the disk.
    """
    work.mkdir(parents=True, exist_ok=True)
    with lock_file(work / LOCK) as file:
        with suppress(OSError):  # a file system without locks: then tidy does nothing either
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def note_use(work: Path, who: str, used: Iterable[str]) -> None:
    """A build used these folders below ``work``; its spec's builds before the last are forgotten.

    Args:
        who: stands for the spec.

    Raises:
        OSError: the disk.
    """
    with _turn(work):
        uses = _uses(work)
        now = sorted(set(used))
        earlier = [names for names in uses.get(who, []) if names != now]
        fresh = {**uses, who: [now, *earlier][:KEPT_BUILDS]}
        when = _when(work)
        if fresh != uses or time.time() - when.get(who, 0.0) > _RECENT_SECONDS:
            _write(work, fresh, {*_known(work), *_names(uses), *now}, {**when, who: time.time()})


def last_uses(work: Path) -> dict[str, float]:
    """Name of a folder below ``work`` -> when a build last used it or its spec's build after it, seconds since 1970."""
    when, found = _when(work), dict[str, float]()
    for who, builds in _uses(work).items():
        # A build that has nothing to do asks for no toolkit.
        last = max(when.get(who, 0.0), when.get(who.removesuffix(" cuda"), 0.0))
        for name in {name for names in builds for name in names}:
            found[name] = max(last, found.get(name, 0.0))
    return found


def forget_uses(work: Path, gone: Iterable[str]) -> None:
    """These folders below ``work`` are no more.

    Raises:
        OSError: the disk.
    """
    lost = set(gone)
    with _turn(work):
        stay = {who: [[n for n in names if n not in lost] for names in builds] for who, builds in _uses(work).items()}
        fresh = {who: kept for who, builds in stay.items() if (kept := [names for names in builds if names])}
        _write(work, fresh, _known(work) - lost, {who: at for who, at in _when(work).items() if who in fresh})


def tidy(work: Path, emit: Emit) -> None:
    """Remove what no spec's last builds used. Does nothing while another build has the cache in use.

    What cannot be removed is a warning: the build that is over is none the worse.
    """
    try:
        _tidy(work, emit)
    except OSError as error:
        emit(Event("warning", "cache", message=f"old folders of {work} stay: {error}"))


def _tidy(work: Path, emit: Emit) -> None:
    with (work / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        old = [place for place in _old(work) if not mounts_below(str(place))]
        for place in old:
            aside = beside(place)  # gone at once, whatever happens
            place.rename(aside)
            remove_folder(aside)
        _sweep(work)
    if old:
        told = f"{len(old)} folders that no recent build used are gone; {work} holds {human(size_of(work))}"
        emit(Event("note", "cache", message=told))


def size_of(folder: Path) -> int:
    """Bytes below a folder, each file once however many names it has."""
    sizes = Sizes()
    sizes.add(folder)
    return sizes.of([folder])


def _turn(work: Path) -> AbstractContextManager[None]:
    """To read and write the record of uses."""
    work.mkdir(parents=True, exist_ok=True)
    return alone(work / f".{_USES}.lock")


def _old(work: Path) -> Iterator[Path]:
    wanted, known = _names(_uses(work)), _known(work)
    for place in sorted(p for p in [*work.iterdir(), *work.glob("sources/*")] if p.is_dir() and not p.is_symlink()):
        name = place.relative_to(work).as_posix()
        if name in wanted or not (_MADE.fullmatch(name) or _is_checkout(place)):
            continue
        if name in known or time.time() - place.stat().st_ctime > KEPT_SECONDS:
            yield place


def _is_checkout(place: Path) -> bool:
    return place.parent.name == "sources" and not place.name.startswith(".") and (place / ".git").is_dir()


def _sweep(work: Path) -> None:
    """What killed builds left: nobody else is at work here, on this host."""
    for place in [*work.iterdir(), *work.glob("sources/.*")]:
        match = PARTIAL.fullmatch(place.name)
        if match and match[1] != str(os.getpid()) and not Path("/proc", match[1]).exists():
            remove_folder(place)


def _write(work: Path, uses: dict[str, list[list[str]]], known: set[str], when: dict[str, float]) -> None:
    place = beside(work / _USES)
    place.write_bytes(dump_json({"uses": uses, "known": sorted(known), "when": {w: int(t) for w, t in when.items()}}))
    give_to_owner(place)
    place.replace(work / _USES)


def _read(work: Path) -> dict[str, Any]:
    try:
        found = json.loads((work / _USES).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _uses(work: Path) -> dict[str, list[list[str]]]:
    uses = _read(work).get("uses")
    builds = uses.items() if isinstance(uses, dict) else ()
    return {who: [[str(n) for n in names] for names in found if isinstance(names, list)]
            for who, found in builds if isinstance(found, list)}  # fmt: skip


def _known(work: Path) -> set[str]:
    known = _read(work).get("known")
    return {str(name) for name in known} if isinstance(known, list) else set()


def _when(work: Path) -> dict[str, float]:
    when = _read(work).get("when")
    found = when.items() if isinstance(when, dict) else ()
    return {who: float(at) for who, at in found if isinstance(at, int) and 0 <= at < _LAST}


def _names(uses: dict[str, list[list[str]]]) -> set[str]:
    return {name for builds in uses.values() for names in builds for name in names}
