"""The file that a program's name stands for inside the sandbox, and why it could not be started."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from chroot_exec import elf
from chroot_exec.errors import RunnerError
from chroot_exec.resolve import Root


def find_program(name: str, path: str) -> str:
    """The file that ``name`` names, by ``path`` (PATH) when it has no slash. Inside the sandbox.

    Raises:
        FileNotFoundError, PermissionError: as execvp(3).
        RunnerError: ``exec.magic``: it, or the interpreter or loader that it names, leads through a link of /proc to a
            file outside (runc's CVE-2019-5736: the host's own interpreter could be opened for writing).
    """
    candidates = [name] if "/" in name else [os.path.join(folder or ".", name) for folder in path.split(":")]
    refused: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for candidate in candidates:
        try:
            info = os.stat(candidate)
        except OSError as error:
            refused = error if isinstance(error, PermissionError) else refused
            continue
        if not stat.S_ISREG(info.st_mode) or not info.st_mode & 0o111:
            refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            continue
        _require_inside(os.path.join(os.getcwd(), candidate))
        return candidate
    raise refused


def _require_inside(path: str, depth: int = 5) -> None:
    seen = os.stat(path)
    # The walk reads links as text; the kernel follows a magic link to wherever the file is.
    if _walked(path) != (seen.st_dev, seen.st_ino):
        raise RunnerError("exec.magic", f"{path!r} leads out of the sandbox through a link of /proc")
    with contextlib.suppress(PermissionError):
        wanted = _interpreter(path)
        if wanted and depth and os.path.exists(wanted):
            _require_inside(os.path.join(os.getcwd(), wanted), depth - 1)


def _walked(path: str) -> tuple[int, int]:
    root = Root("/")
    try:
        found = root.open(path)
    except RunnerError:
        return -1, -1
    finally:
        root.close()
    info = os.fstat(found)
    os.close(found)
    return info.st_dev, info.st_ino


def enter_folder(path: str) -> None:
    """Make a folder the working one, by a walk that takes links of /proc as text.

    chdir(2) would follow ``/proc/self/fd/7`` to whatever folder a descriptor is open on (runc's CVE-2024-21626).

    Raises:
        OSError: as chdir(2).
    """
    root = Root("/")
    try:
        found = root.open(path)
    except RunnerError as error:
        raise PermissionError(errno.EACCES, error.message) from None
    finally:
        root.close()
    try:
        os.fchdir(found)
    finally:
        os.close(found)


def explain(name: str, path: str, error: OSError) -> str:
    """Why ``name`` could not be started: what is missing, and where it was looked for. Inside the sandbox.

    Args:
        path: the PATH that holds for it.
        error: what ``find_program`` or execve(2) said.
    """
    if error.errno != errno.ENOENT:
        return f"{name!r} cannot be started: {error.strerror}"
    if "/" not in name and (found := _found(name, path)) is None:
        return f"{name!r} is in none of the folders of PATH ({path})"
    place = name if "/" in name else str(found)
    if not os.path.lexists(place):
        return f"{place!r} is not in the image"
    wanted = _interpreter(place)
    if wanted:
        return f"{place!r} needs {wanted!r} to run, which is not in the image"
    return f"{place!r} is a link to something that is not in the image"


def _found(name: str, path: str) -> str | None:
    candidates = (os.path.join(folder or ".", name) for folder in path.split(":"))
    return next((c for c in candidates if os.path.lexists(c)), None)


def _interpreter(path: str) -> str:
    """What the kernel starts in the place of a file: the word after ``#!``, or an ELF file's loader."""
    try:
        with open(path, "rb") as file:
            line = file.read(256).split(b"\n")[0]
    except OSError:
        return ""
    if line.startswith(b"#!"):
        return os.fsdecode((line[2:].split() or [b""])[0])
    return elf.interpreter(path)
