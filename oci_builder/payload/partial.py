"""A folder in the making stands beside its place: nobody sees it half made, and its name tells ``tidy`` whose it is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oci_builder.store.removal import clear_folder

# The maker's process is in it.
PARTIAL = re.compile(r"\..*\.partial-(\d+)")


def beside(place: Path) -> Path:
    """The name, beside ``place``, of what this process makes for it."""
    return place.with_name(f".{place.name}.partial-{os.getpid()}")


@contextmanager
def making(place: Path) -> Iterator[Path]:
    """As ``beside``, with nothing there at first; what has not been put in its place (``put``) is gone at the end."""
    staging = beside(place)
    clear_folder(staging)
    try:
        yield staging
    finally:
        clear_folder(staging)


def put(made: Path, place: Path, record: str = "") -> None:
    """Give a finished folder its place. When another process was faster, its folder stays: the same inputs made it.

    Args:
        record: name of the file that a finished folder has; empty: each is finished.

    Raises:
        OSError: the disk, or something else is there.
    """
    try:
        made.rename(place)
    except OSError:
        if not ((place / record).is_file() if record else place.is_dir()):
            raise
