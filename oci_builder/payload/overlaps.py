"""Files that several packages bring under one name: the same one stands there in each build.

uv unpacks wheels side by side, and whichever comes last has its file there: ``tests/__init__.py`` is another one now
and then. Here the package whose name sorts last has it, whatever came last.
"""

from __future__ import annotations

import configparser
import filecmp
import os
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path

from oci_builder.model.errors import show

_SHOWN = 3


def settle_overlaps(env: Path, archives: Mapping[str, Path]) -> list[str]:
    """Put the right one of such files in its place, as a link to uv's cache. Idempotent.

    Args:
        env: an environment that was just filled.
        archives: normalized name of a package -> its wheel, unpacked by uv.

    Returns:
        A line for all packages that have other content under one name.

    Raises:
        OSError: the disk.
    """
    site = next((f"lib/{path.parent.name}/site-packages" for path in sorted(env.glob("lib/python*/site-packages"))), "")
    # Twice over all names, and their hashes only are kept: of a real tier's 100,000 few have two owners.
    seen, twice = set[int](), set[int]()
    for archive in archives.values():
        for name, _ in _files(archive, site):
            (twice if hash(name) in seen else seen).add(hash(name))
    owners: dict[str, dict[str, Path | str]] = {}
    for package, archive in sorted(archives.items()) if twice else ():
        for name, source in _files(archive, site):
            if hash(name) in twice:
                owners.setdefault(name, {})[package] = source
    told: dict[tuple[str, ...], list[str]] = {}
    for name, found in sorted(owners.items()):
        if len(found) > 1 and (env / name).is_file() and _differ(env / name, list(found.values())):
            told.setdefault(tuple(found), []).append(name)
    return [_line(packages, names) for packages, names in told.items()]


def _differ(place: Path, sources: list[Path | str]) -> bool:
    """Whether the packages differ about a file; the last one's is put there, unless uv writes it itself."""
    known = [source for source in sources if isinstance(source, Path)]
    if len(known) < len(sources):
        return len(set(sources)) > 1
    if not place.samefile(known[-1]):
        fresh = place.with_name(f".{place.name}.settled")
        fresh.unlink(missing_ok=True)
        os.link(known[-1], fresh)
        fresh.replace(place)
    return not all(filecmp.cmp(known[-1], other, shallow=False) for other in known[:-1])


def _line(packages: tuple[str, ...], names: list[str]) -> str:
    told = f"{_some(list(packages))} each bring {_some([show(name) for name in names])}"
    if any(name.startswith("bin/") for name in names):
        return f"{told}: which launcher stands there is left to chance, omit one of them"
    return f"{told} with other content: that of {packages[-1]} stands there"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
    return ", ".join(names[:_SHOWN]) + more


def _files(archive: Path, site: str) -> Iterator[tuple[str, Path | str]]:
    """Place in an environment of each file of an unpacked wheel, and the file; of a launcher, what it calls."""
    schemes = {"purelib": site, "platlib": site, "data": "", "scripts": "bin"}
    for parent, _folders, files in os.walk(archive):
        below = os.path.relpath(parent, archive)
        first, _, rest = below.partition("/")
        if first.endswith(".dist-info"):
            if below == first and "entry_points.txt" in files:
                yield from _launchers(Path(parent, "entry_points.txt"))
            continue
        target = posixpath.join(site, below)
        if first.endswith(".data"):
            scheme, _, inner = rest.partition("/")
            if scheme not in schemes:
                continue
            target = posixpath.join(schemes[scheme], inner)
        for name in files:
            place = posixpath.normpath(posixpath.join(target, name))
            # uv may change a script, as it gives it its interpreter: as good as one of its own.
            yield place, f"{archive}/{name}" if place.startswith("bin/") else Path(parent, name)


def _launchers(place: Path) -> Iterator[tuple[str, str]]:
    read = configparser.ConfigParser(delimiters=("=",), strict=False, interpolation=None)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        read.read_string(place.read_text(encoding="utf-8", errors="replace"))
    except configparser.Error:
        return
    for kind in ("console_scripts", "gui_scripts"):
        for name, called in read[kind].items() if read.has_section(kind) else ():
            yield f"bin/{name}", "".join(called.split("[")[0].split())
