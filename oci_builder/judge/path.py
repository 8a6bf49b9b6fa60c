"""Is there an archive at a path at all? One answer for every verb."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from oci_builder.model.errors import SpecError, TransportError, disk_error, show

# The files of a layout folder, apart from its blobs.
LAYOUT_FILES = ("oci-layout", "index.json", "manifest.json")


def is_folder(path: Path) -> bool:
    """True for a folder that holds (part of) a layout, False for a file. Opens nothing, waits for nothing.

    Raises:
        SpecError: ``spec.path``: nothing there, a pipe or device, or a folder of other things.
        TransportError: ``io.*``: the disk would not say.
    """
    shown = show(str(path))
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise SpecError("spec.path", f"no such archive or layout: {shown}", where=str(path)) from None
    except (OSError, ValueError) as error:
        raise _unreadable(error, path) from None
    if stat.S_ISREG(mode):
        return False
    if not stat.S_ISDIR(mode):
        raise SpecError("spec.path", f"{shown} is neither a file nor a folder", where=str(path))
    if not any(os.path.lexists(path / name) for name in (*LAYOUT_FILES, "blobs")):
        raise SpecError("spec.path", f"{shown} is a folder, but no OCI layout", where=str(path))
    return True


def _unreadable(error: OSError | ValueError, path: Path) -> SpecError | TransportError:
    if isinstance(error, ValueError) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return SpecError("spec.path", f"{show(str(path))} cannot be a path: {error}", where=str(path))
    return disk_error(error, f"looking at {path.name}")
