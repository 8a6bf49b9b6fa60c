"""What the cache holds of payloads, for ``cache prune``: what tiers were made into, and what they were made from.

Environments and runtimes are hard links of uv's unpacked wheels, so a wheel that one of them uses costs nothing and
stays as long as it does. Of uv's cache only what lies below our own is ours to remove.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from oci_builder.payload.fetch import FOLDER
from oci_builder.payload.tidy import last_uses
from oci_builder.payload.uv import CACHE_NAME
from oci_builder.payload.uv_cache import archive_links, pointer_files
from oci_builder.store.holdings import Holding
from oci_builder.store.upkeep import changed_at, plain

_KEY = "[0-9a-f]{20}"
_MADE = (
    ("runtime", re.compile(f"runtime-{_KEY}")), ("cuda", re.compile(f"cuda-{_KEY}")),
    ("python", re.compile(f"python-{_KEY}-{_KEY}")), ("bytecode", re.compile("bytecode-[0-9a-f]{16}")),
    ("environment", re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]*-{_KEY}")),
)  # fmt: skip
_SOURCES = (
    ("repository", re.compile(r"[A-Za-z0-9_-]+-[0-9a-f]{16}\.git")),
    ("checkout", re.compile("[A-Za-z0-9_-]+-[0-9a-f]{12}-[0-9a-f]{16}")),
)
_OWN = re.compile(
    rf"{FOLDER}|{CACHE_NAME}|uses\.json|python-{_KEY}\.json|\.in-use\.lock|\.uses\.json\.lock|\..*\.partial-\d+"
)
_OWN_SOURCES = re.compile(r"\..*\.lock|\..*\.partial-\d+")
_METADATA = tuple(f"{env}/lib/python*/site-packages/*.dist-info/METADATA" for env in ("*", "envs/*"))
_BUCKET = re.compile(r"(archive|wheels|sdists)-v\d+")


def payload_held(work: Path) -> list[Holding]:
    """Environments, runtimes, interpreters, sources and the parts of uv's cache, below the folder of the tiers."""
    made, sources = list(_made(work)), list(_sources(work / FOLDER, last_uses(work)))
    wheels, interpreters = list(_wheels(work / CACHE_NAME)), list(_interpreters(work / CACHE_NAME / "python"))
    by_inode = {inode: wheel.place for wheel in wheels for inode in _inodes(wheel.place.glob("*.dist-info/METADATA"))}
    found = [_with_needs(holding, by_inode, interpreters) for holding in made]
    newest = max((one.used for one in found if one.kind in ("runtime", "environment")), default=0.0)
    # Nobody can tell which environment asked what of an index, or which file of bytecode is whose.
    rest = [*_distributions(work / CACHE_NAME, wheels), *_index(work / CACHE_NAME, newest)]
    return [
        *(replace(one, used=max(one.used, newest)) if one.kind == "bytecode" else one for one in found),
        *sources, *wheels, *interpreters, *rest,
    ]  # fmt: skip


def foreign_payload(work: Path) -> Iterator[Path]:
    """What lies among these and is none of ours; uv's cache is uv's business."""
    for folder, kinds, own in ((work, _MADE, _OWN), (work / FOLDER, _SOURCES, _OWN_SOURCES)):
        for place in plain(folder):
            ours = own.fullmatch(place.name) or (_kind(place, kinds) and place.is_dir())
            if place.is_symlink() or not ours:
                yield place


def _kind(place: Path, kinds: Iterable[tuple[str, re.Pattern[str]]]) -> str:
    return next((kind for kind, pattern in kinds if pattern.fullmatch(place.name)), "")


def _real(folder: Path) -> Iterator[Path]:
    return (place for place in plain(folder) if place.is_dir() and not place.is_symlink())


def _made(work: Path) -> Iterator[Holding]:
    uses = last_uses(work)
    for place in _real(work):
        kind = _kind(place, _MADE)
        if kind:
            yield Holding(kind, place, max(uses.get(place.name, 0.0), changed_at(place)))


def _sources(folder: Path, uses: Mapping[str, float]) -> Iterator[Holding]:
    for place in _real(folder):
        kind = _kind(place, _SOURCES)
        if kind:
            # A checkout has its objects in the bare repositories, its submodules in others.
            lent = place.rglob(".git/objects/info/alternates") if kind == "checkout" else ()
            needs = {home for file in lent for home in _lenders(file)}
            used = max(uses.get(f"{FOLDER}/{place.name}", 0.0), changed_at(place))
            yield Holding(kind, place, used, tuple(sorted(needs)))


def _lenders(alternates: Path) -> Iterator[Path]:
    """The repositories that a checkout borrows of, however it calls them (gitrepository-layout(5))."""
    try:
        lines = alternates.read_bytes().splitlines() if alternates.is_file() else []
    except OSError:
        return
    for line in lines:
        with suppress(ValueError):  # a zero byte
            yield Path(os.path.realpath(alternates.parents[1] / os.fsdecode(line))).parent


def _with_needs(holding: Holding, wheels: Mapping[tuple[int, int], Path], pythons: list[Holding]) -> Holding:
    found = {wheels[i] for pattern in _METADATA for i in _inodes(holding.place.glob(pattern)) if i in wheels}
    for link in holding.place.glob("*/bin/python"):
        home = Path(os.path.realpath(link))
        found |= {python.place for python in pythons if home.is_relative_to(python.place.resolve())}
    return replace(holding, needs=tuple(sorted(found)))


def _inodes(paths: Iterable[Path]) -> Iterator[tuple[int, int]]:
    for path in paths:
        try:
            found = path.lstat()
        except OSError:
            continue
        yield found.st_dev, found.st_ino


# ---- uv's cache


def _wheels(cache: Path) -> Iterator[Holding]:
    """Unpacked wheels with the links and pointers that lead to them, and the source distribution that one was made of.

    A name more or fewer changes a file's ctime: an environment's links say when a wheel was last used.
    """
    links: dict[str, list[Path]] = {}
    for link in archive_links(cache):
        if link.parent.resolve() != link.parent:
            continue  # not in uv's cache, but behind a link in it
        links.setdefault(os.path.basename(os.readlink(link)), []).append(link)
    for bucket in _buckets(cache, "archive"):
        for place in _real(bucket):
            named = links.get(place.name, [])
            shards = {link.parent.parent for link in named if link.relative_to(cache).parts[0].startswith("sdists")}
            pointers = [p for link in named if link.parent.parent not in shards for p in pointer_files(link)]
            used = max(map(changed_at, [place, *place.glob("*.dist-info/METADATA")]))
            yield Holding("wheel", place, used, tuple(sorted(shards)), (*named, *pointers))


def _distributions(cache: Path, wheels: list[Holding]) -> Iterator[Holding]:
    """Folders of source distributions with what was built of them, which may have taken hours."""
    known = {shard for wheel in wheels for shard in wheel.needs}
    for bucket in _buckets(cache, "sdists"):
        found = {path.parent for path in bucket.rglob("revision.*") if not path.is_symlink()}
        for shard in sorted(found | {one for one in known if one.is_relative_to(bucket)}):
            yield Holding("source distribution", shard, max(map(changed_at, [shard, *plain(shard)])))


def _interpreters(folder: Path) -> Iterator[Holding]:
    links = [place for place in plain(folder) if place.is_symlink()]
    for place in _real(folder):
        if not place.name.startswith("."):
            beside = tuple(link for link in links if os.path.realpath(link) == os.path.realpath(place))
            yield Holding("interpreter", place, changed_at(place), beside=beside)


def _index(cache: Path, newest: float) -> Iterator[Holding]:
    for place in _real(cache):
        if place.name != "python" and not _BUCKET.fullmatch(place.name) and re.fullmatch(r"[a-z-]+-v\d+", place.name):
            yield Holding("index", place, max(newest, changed_at(place)))


def _buckets(cache: Path, name: str) -> list[Path]:
    return [place for place in _real(cache) if re.fullmatch(rf"{name}-v\d+", place.name)]
