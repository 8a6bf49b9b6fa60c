"""The tar of inputs that travels to a container of Modal: written here, unpacked there, the same trees at both ends.

What becomes part of an image arrives as it is, or a build there would give other bytes than one here: every file, with
owners and the extended attributes that layers keep. Projects travel without the caches that tools make in them.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from oci_builder.model.errors import SpecError, TransportError, disk_error, show
from oci_builder.store.removal import clear_folder
from oci_builder.wire.tar import kept_xattr

# A checkout with its history fits; a tier of a real runtime belongs on the volume.
LARGEST = 2 << 30
_XATTR = "SCHILY.xattr."


class As(Enum):
    """How a thing travels: a ``TREE`` that becomes part of an image with its owners and attributes, ``FILES`` without
    them, a ``PROJECT`` without the caches in it, too; a ``HISTORY`` replaces what is called so in a project."""

    TREE = "tree"
    PROJECT = "project"
    FILES = "files"
    HISTORY = "history"


_CACHES = frozenset({".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"})


@dataclass(frozen=True, slots=True)
class Item:
    """A file or folder of the sender. A link is what it leads to."""

    path: Path
    how: As = As.FILES


def write_inputs(target: Path, items: Mapping[str, Item]) -> None:
    """Write the tar; the same inputs give the same bytes, so that Modal uploads them once.

    Args:
        items: name in the tar -> what it holds.

    Raises:
        SpecError: ``modal.project``: more than ``LARGEST``.
        TransportError: ``io.*``.
    """
    total = 0
    try:
        with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
            for place, name, how in _found(items):
                info = _info(tar, place, name, how)
                if info is None:  # a socket: what listened there does not travel
                    continue
                total += info.size
                if total > LARGEST:
                    raise SpecError(
                        "modal.project", f"the spec's inputs are more than {LARGEST >> 30} GiB (at {show(name)}): put "
                        "trees on the volume and name them by their path there", where=name,
                    )  # fmt: skip
                if info.isreg():
                    with open(place, "rb") as file:
                        tar.addfile(info, file)
                else:
                    tar.addfile(info)
    except OSError as error:
        raise disk_error(error, "packing the spec's inputs") from None


def unpack(archive: Path, folder: Path) -> None:
    """Put the inputs into ``folder``, anew: what an interrupted run changed there goes.

    Raises:
        TransportError: ``io.*``, ``modal.project`` (not the sender's tar, or owners cannot be set here).
    """
    try:
        clear_folder(folder)
        folder.mkdir(parents=True)
        # Level 2: an owner that cannot be set is an error, and no other image.
        with tarfile.open(archive, errorlevel=2) as tar:
            tar.extractall(folder, filter="fully_trusted")
            for info in tar:
                # After the owners: the kernel takes capabilities away from a file that changes hands.
                for name in filter(lambda name: name.startswith(_XATTR), info.pax_headers):
                    value = os.fsencode(info.pax_headers[name])
                    os.setxattr(folder / info.name, name.removeprefix(_XATTR), value, follow_symlinks=False)
    except OSError as error:
        raise disk_error(error, "unpacking the sender's inputs") from None
    except tarfile.TarError as error:
        raise TransportError("modal.project", f"the sender's inputs did not arrive whole: {error}") from None


def _found(items: Mapping[str, Item]) -> Iterator[tuple[Path, str, As]]:
    """Place, name in the tar and way of everything that travels, folders before what is in them."""
    seen: set[str] = set()
    replaced = {name for name, item in items.items() if item.how is As.HISTORY}
    for name, item in sorted(items.items()):
        # A lock inside its project, one project for three tiers: what a folder holds is there already.
        if item.how is not As.HISTORY and any(name == other or name.startswith(f"{other}/") for other in seen):
            continue
        seen.add(name)
        left = [(Path(os.path.realpath(item.path)), name)]
        while left:
            place, named = left.pop()
            yield place, named, item.how
            if place.is_dir() and not place.is_symlink():
                names = [n for n in os.listdir(place) if item.how is not As.PROJECT or n not in _CACHES]
                found = ((place / n, f"{named}/{n}") for n in sorted(names, reverse=True))
                left += [pair for pair in found if pair[1] not in replaced]


def _info(tar: tarfile.TarFile, place: Path, name: str, how: As) -> tarfile.TarInfo | None:
    # The stub promises an entry; there is none for a socket.
    info: tarfile.TarInfo | None = tar.gettarinfo(place, name)
    if info is None:
        return None
    info.uname = info.gname = ""
    info.mtime = 0 if how is As.HISTORY else int(info.mtime)  # that was made just now
    if how is not As.TREE:
        info.uid = info.gid = 0
        return info
    if not stat.S_ISLNK(place.lstat().st_mode) and not info.islnk():
        kept = [key for key in sorted(os.listxattr(place)) if kept_xattr(os.fsencode(key))]
        info.pax_headers = {_XATTR + key: os.fsdecode(os.getxattr(place, key)) for key in kept}
    return info
