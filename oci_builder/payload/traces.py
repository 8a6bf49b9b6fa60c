"""What packages that were compiled here tell of the folders that they were compiled in."""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from oci_builder.model.errors import show
from oci_builder.payload.names import normalize
from oci_builder.payload.relocate_audit import held


def traces(env: Path, built: Collection[str], folders: Sequence[Path]) -> Iterator[str]:
    """A line for each package that names one of the folders: no two builds of it have the same bytes.

    Only what was built here counts: wheels of others name the folders of their makers, which may be called the same.

    Args:
        env: the environment.
        built: normalized names of packages.

    Raises:
        OSError: the disk.
    """
    needles = [os.fsencode(form) for form in dict.fromkeys(f for one in folders for f in (one, one.resolve()))]
    for info in sorted(env.glob("lib/python*/site-packages/*.dist-info")):
        package = normalize(info.name.split("-")[0])
        if package in built:
            found = [name for name in _files(info) if _holds(info.parent / name, needles)]
            if found:
                more = f" and {len(found) - 1} more" if found[1:] else ""
                yield (
                    f"{package}: {show(found[0])}{more} names the folder that it was built in, so each build has other "
                    "bytes; its build script may call a compiler by its path"
                )


def _files(info: Path) -> list[str]:
    try:
        with (info / "RECORD").open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            return sorted({row[0] for row in csv.reader(file) if row and "\0" not in row[0]})
    except (OSError, csv.Error):
        return []


def _holds(path: Path, needles: Sequence[bytes]) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb", buffering=0) as file:
        return bool(held(file, needles))
