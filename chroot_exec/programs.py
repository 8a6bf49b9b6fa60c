"""The file that a program's name stands for inside the sandbox, and why it could not be started."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat

from chroot_exec import elf
from chroot_exec.errors import RunnerError
from chroot_exec.resolve import Root

_SCRIPT = re.compile(rb"#![ \t]*([^ \t\n\0]+)")


def find_program(name: str, path: str) -> str:
    """The file that ``name`` names, by ``path`` (PATH) when it has no slash. Inside the sandbox.

    Raises:
        FileNotFoundError, PermissionError: as execvp(3).
        RunnerError: ``exec.magic``: it, or the interpreter or loader that it names, leads through a link of /proc to a
            file outside (runc's CVE-2019-5736: the host's own interpreter could be opened for writing).
    """
    candidates = _candidates(name, path)
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
        with contextlib.suppress(PermissionError):  # whoever may not read it: it was looked at before (require_inside)
            _require_inside(os.path.join(os.getcwd(), candidate), os.getcwd())
        return candidate
    raise refused


def require_inside(name: str, path: str, workdir: str) -> None:
    """As ``find_program`` refuses, of every file that the name may turn out to stand for, by who may read them all.

    Raises:
        RunnerError: ``exec.magic``; also of a file that cannot be read: a user that may not read it may run it.
    """
    for candidate in _candidates(name, path):
        place = os.path.join("/", workdir, candidate)
        with contextlib.suppress(OSError):  # what is not there, or no way to it: it will not start
            if stat.S_ISREG(os.stat(place).st_mode):
                try:
                    _require_inside(place, os.path.join("/", workdir))
                except PermissionError:
                    told = f"{place!r} cannot be read, so nobody can say where it leads"
                    raise RunnerError("exec.magic", told) from None


def _candidates(name: str, path: str) -> list[str]:
    return [name] if "/" in name else [os.path.join(folder or ".", name) for folder in path.split(":")]


def _require_inside(path: str, folder: str, seen: tuple[str, ...] = ()) -> None:
    found = os.stat(path)
    # The walk reads links as text; the kernel follows a magic link to wherever the file is.
    if _walked(path) != (found.st_dev, found.st_ino):
        raise RunnerError("exec.magic", f"{path!r} leads out of the sandbox through a link of /proc")
    for wanted in _interpreters(path):
        place = os.path.join(folder, wanted)
        if place not in seen and os.path.exists(place):
            _require_inside(place, folder, (*seen, place))


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
    found = name if "/" in name else _found(name, path)
    if error.errno == errno.ENOEXEC and found:
        return f"{found!r} cannot be started: {error.strerror}: {_form(found)}"
    if error.errno != errno.ENOENT:
        return f"{name!r} cannot be started: {error.strerror}"
    if found is None:
        return f"{name!r} is in none of the folders of PATH ({path})"
    if not os.path.lexists(found):
        return f"{found!r} is not in the image"
    with contextlib.suppress(PermissionError):
        if wanted := _interpreters(found):
            return f"{found!r} needs {wanted[0]!r} to run, which is not in the image"
    return f"{found!r} is a link to something that is not in the image"


def _found(name: str, path: str) -> str | None:
    return next((c for c in _candidates(name, path) if os.path.lexists(c)), None)


def _form(path: str) -> str:
    number = elf.machine(path)
    if number and elf.machine_name(number) != os.uname().machine:
        return f"it is for {elf.machine_name(number)}, and this is {os.uname().machine}"
    return "a program of a damaged form" if number else "neither a program nor a script that begins with #!"


def _interpreters(path: str) -> list[str]:
    """What the kernel starts in the place of a file: the word after ``#!``, or an ELF file's loader.

    As fs/binfmt_script.c has it: the word ends at a space, tab, line feed or NUL, and a carriage return is part of it.

    Raises:
        PermissionError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            script = _SCRIPT.match(file.read(256))
        if script:
            return [os.fsdecode(script[1])]
        return elf.interpreters(path)
    except PermissionError:
        raise
    except OSError:
        return []
