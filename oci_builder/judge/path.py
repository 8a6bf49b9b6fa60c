"""Is there an archive at a path at all? One answer for every verb."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from oci_builder.model.errors import FormatError, PolicyError, SpecError, TransportError, read_error, show
from oci_builder.model.limits import Limits

# The files of a layout folder, apart from its blobs.
_LAYOUT = ("oci-layout", "index.json", "manifest.json")
_MEMBER = re.compile(rb"(?:blobs(?:/.*)?|oci-layout|index\.json|manifest\.json|repositories|[0-9a-f]{64}(?:[./].*)?)\Z")
# Folders of a root file system, none of which an image archive has.
_OF_A_ROOT = frozenset(
    {"bin", "dev", "etc", "home", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "tmp", "usr", "var"}
)


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
    if not any(os.path.lexists(path / name) for name in (*_LAYOUT, "blobs")):
        raise SpecError("spec.path", f"{shown} is a folder, but no OCI layout", where=str(path))
    return True


def is_member_name(name: bytes) -> bool:
    """Whether members of an image archive are called so, of either form; a tree does not begin with one of these."""
    return _MEMBER.match(name) is not None


def tree_hint(name: str) -> str:
    """What to add to a message about a member that a root file system has; else nothing."""
    if name.partition("/")[0] not in _OF_A_ROOT:
        return ""
    return (
        "; this is a root file system, as runtime.tar.gz (for ensure_runtime.sh; portable.json has its SHA-256), or "
        'what docker and crane export: {"rootfs": PATH} takes it as a base'
    )


def is_layout(folder: Path) -> bool:
    """Whether a folder is a layout, whole or half, or a folder of ``dir:``, and no tree for people to run.

    Raises:
        TransportError: ``io.*``: the disk would not say.
    """
    try:
        there = set(os.listdir(folder))
    except OSError as error:
        raise read_error(error, "looking at") from None
    if any(pair <= there for pair in ({"oci-layout"}, {"index.json", "blobs"}, {"manifest.json", "version"})):
        return True
    # What is left of one: nothing runs off a lone index or a folder of blobs.
    return bool(there) and all(is_member_name(os.fsencode(name)) for name in there)


def layout_members(root: Path, limits: Limits) -> tuple[list[str], list[str]]:
    """Names of all files below a layout folder, and of its folders. A link to a folder counts as a file.

    Raises:
        PolicyError: ``limit.members``.
        OSError: from the disk.
    """
    files: list[str] = []
    folders: list[str] = []
    for folder, names, found in os.walk(root, onerror=_raise):
        names.sort()
        above = os.path.relpath(folder, root)
        folders.append("" if above == "." else above)
        found += [name for name in names if os.path.islink(os.path.join(folder, name))]
        files += sorted(name if above == "." else f"{above}/{name}" for name in found)
        if len(files) > limits.archive_members:
            most = f"{root.name}: over {limits.archive_members} files in a layout"
            raise PolicyError("limit.members", most, where=str(root))
    return files, folders


def open_member(path: Path, name: str) -> int:
    """Open a file of a layout folder: a descriptor that is the caller's to close.

    Raises:
        FormatError: ``archive.member``: a symbolic link, or no file.
        OSError: from the disk.
    """
    shown = show(os.fsencode(name))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        what = "a symbolic link; a layout's files are files" if error.errno == errno.ELOOP else "a socket"
        raise FormatError("archive.member", f"{shown} is {what}", where=shown, actual=what) from None
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        what = stat.filemode(mode)
        raise FormatError("archive.member", f"{shown} is not a regular file ({what})", where=shown, actual=what)
    return fd


def _raise(error: OSError) -> None:
    raise error


def _unreadable(error: OSError | ValueError, path: Path) -> SpecError | TransportError:
    if isinstance(error, ValueError) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return SpecError("spec.path", f"{show(str(path))} cannot be a path: {error}", where=str(path))
    return read_error(error, f"looking at {path.name}")
