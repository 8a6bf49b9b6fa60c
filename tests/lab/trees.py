"""A tree as values, to be compared."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def listing(root: Path) -> dict[str, object]:
    """Path -> mode, time and content of everything in a tree."""
    out: dict[str, object] = {}
    for place in [root, *sorted(root.rglob("*"))]:
        found = place.lstat()
        content = os.readlink(place) if place.is_symlink() else b"" if place.is_dir() else place.read_bytes()
        mode = 0 if place.is_symlink() else stat.S_IMODE(found.st_mode)
        out[str(place.relative_to(root))] = (mode, found.st_mtime_ns, content)
    return out
