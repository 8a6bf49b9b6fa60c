"""Folders inside a root that nobody trusts, opened on directory descriptors.

A symbolic link is followed as a process inside the root would follow it: an absolute one starts at the root, and ``..``
never leaves it (openat2(2), RESOLVE_IN_ROOT). Two ways give the same answers: one openat2 call, or a walk over the
components for kernels before 5.6 and sandboxes that refuse the call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from typing import Protocol

from oci_builder.model.errors import PolicyError, show

OPEN_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_LINKS = 40  # the kernel's own bound, include/linux/namei.h

_SYS_OPENAT2 = 437  # the same on every architecture
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10
_HOW = struct.pack("QQQ", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_NO_MAGICLINKS | _RESOLVE_IN_ROOT)
_UNAVAILABLE = (errno.ENOSYS, errno.EPERM, errno.E2BIG, errno.EINVAL, errno.EAGAIN)

# Opens the folder ``path`` (bytes, relative) below a descriptor and returns an O_PATH descriptor.
OpenFolder = Callable[[int, bytes], int]


class Make(Protocol):
    """Makes a folder where the walk found none."""

    def __call__(self, folder: int, name: bytes, path: bytes, error: OSError) -> None:
        """Make ``name`` in ``folder``, which is ``path`` below the root.

        Args:
            error: what opening it said: ENOENT, or ENOTDIR where something else is in the way.
        """


def open_by_kernel(root: int, path: bytes) -> int:
    """Open a folder with one openat2 call.

    Raises:
        OSError: ENOENT, ENOTDIR, ELOOP, ENAMETOOLONG as for any path; ENOSYS and others where the call is refused.
    """
    fd = _libc().syscall(_SYS_OPENAT2, root, path or b".", _HOW, len(_HOW))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return int(fd)


def open_by_walk(root: int, path: bytes) -> int:
    """Open a folder component by component, following each link here and not in the kernel.

    Raises:
        OSError: as ``open_by_kernel``.
    """
    return walk(root, path)[0]


def walk(
    root: int, path: bytes, make: Make | None = None, follows: int = MAX_LINKS
) -> tuple[int, bytes]:
    """As ``open_by_walk``; also gives the folder's path free of links, and makes what is missing.

    Raises:
        OSError: as ``open_by_kernel``; what ``make`` raises.
    """
    stack, names = [os.dup(root)], list[bytes]()
    try:
        _walk(stack, names, _components(path), make, path, follows)
        return stack.pop(), b"/".join(names)
    finally:
        for fd in stack:
            os.close(fd)


def _walk(
    stack: list[int], names: list[bytes], rest: list[bytes], make: Make | None, path: bytes, follows: int
) -> None:
    links = 0
    while rest:
        name = rest.pop()
        if name == b"..":
            _up(stack, names, 1)
            continue
        try:
            stack.append(os.open(name, OPEN_FOLDER, dir_fd=stack[-1]))
            names.append(name)
            continue
        except OSError as error:
            target = _link(stack[-1], name)
            if target is None:
                # Something else than a folder is replaced where the path itself names it, not where a link leads to it.
                if make is None or (error.errno != errno.ENOENT and (error.errno != errno.ENOTDIR or links)):
                    raise
                make(stack[-1], name, b"/".join([*names, name]), error)
                rest.append(name)
                continue
        links += 1
        if links > follows:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if target.startswith(b"/"):
            _up(stack, names, len(names))
        rest += _components(target)


def _up(stack: list[int], names: list[bytes], count: int) -> None:
    for _ in range(min(count, len(names))):
        names.pop()
        os.close(stack.pop())


def _components(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part and part != b"."][::-1]


def _link(folder: int, name: bytes) -> bytes | None:
    """Target of a symbolic link; ``None`` when there is none of this name."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None


def kernel_resolves(root: int) -> bool:
    """Whether openat2 can be used here, and /proc to ask where it led."""
    try:
        fd = open_by_kernel(root, b"")
    except OSError:
        return False
    found = _path_of(fd)
    os.close(fd)
    return found is not None and found == _path_of(root)


def _path_of(fd: int) -> bytes | None:
    try:
        return os.readlink(b"/proc/self/fd/%d" % fd)
    except OSError:
        return None


class FolderOpener:
    """Opens folders below a root, by the kernel where it can, making what is missing when asked to.

    Args:
        root: descriptor of the root folder; stays the caller's.
        make: as for the walk.
        use_kernel: ``None`` asks the kernel whether it can.
        follows: most links on one path; the kernel's own bound is 40, and a lower one is counted here.
    """

    def __init__(self, root: int, make: Make, use_kernel: bool | None = None, follows: int = MAX_LINKS) -> None:
        self._root = root
        self._make = make
        self._follows = min(follows, MAX_LINKS)
        self._kernel = kernel_resolves(root) if use_kernel is None else use_kernel
        self._kernel = self._kernel and self._follows == MAX_LINKS

    def open(self, path: bytes, *, create: bool) -> tuple[int, bytes]:
        """The folder that ``path`` names inside the root: an O_PATH descriptor (the caller closes it), and its path.

        Raises:
            PolicyError: ``path.loop`` (too many links), ``path.parent`` (something on the way is no folder).
            FileNotFoundError: absent, without ``create``.
        """
        try:
            found = self._by_kernel(path) if self._kernel else None
            return found or walk(self._root, path, self._make if create else None, self._follows)
        except OSError as error:
            raise _refusal(path, error) from None

    def _by_kernel(self, path: bytes) -> tuple[int, bytes] | None:
        """``None`` where the walk must look: something is missing, or /proc cannot say where the links led."""
        try:
            fd = open_by_kernel(self._root, path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, *_UNAVAILABLE):
                return None
            raise
        top, found = _path_of(self._root), _path_of(fd)
        if top is not None and found is not None and (found == top or found.startswith(top.rstrip(b"/") + b"/")):
            return fd, found[len(top) :].strip(b"/")
        os.close(fd)
        return None


def _refusal(path: bytes, error: OSError) -> Exception:
    place = show(path[:300])
    if error.errno == errno.ELOOP:
        return PolicyError(
            "path.loop", f"{place}: too many symbolic links on one path, or links in a circle", where=place
        )
    if error.errno == errno.ENOTDIR:
        return PolicyError("path.parent", f"{place}: a part of it is no folder", where=place)
    return error


_LIBC: list[ctypes.CDLL] = []


def _libc() -> ctypes.CDLL:
    if not _LIBC:
        _LIBC.append(ctypes.CDLL(None, use_errno=True))
    return _LIBC[0]
