"""Paths inside a root that nobody trusts, walked one component at a time on directory descriptors.

A symbolic link is followed as a process inside the root would follow it: an absolute one starts at the root, ``..``
never leaves it. That is what openat2(2) calls RESOLVE_IN_ROOT; the walk needs no kernel 5.6 and creates what is
missing on the way.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from chroot_exec.errors import RunnerError

_MAX_LINKS = 40
_WALK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

Made = Callable[[str], None]


class Root:
    """A root directory, held by a descriptor.

    Args:
        path: the directory; the caller vouches for it.
        made: told the path below the root of everything that is created, outermost first.
    """

    def __init__(self, path: str, made: Made | None = None) -> None:
        self.fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        # Devices of file systems that are mounted over the tree: what is made there is not made in the tree.
        self.foreign: set[int] = set()
        self._made = made or (lambda _path: None)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def open(self, path: str, create: str = "") -> int:
        """An O_PATH descriptor of what ``path`` names inside the root; the caller closes it.

        Args:
            create: ``dir`` or ``file`` makes what is missing, parents included; empty makes nothing.

        Raises:
            RunnerError: ``sandbox.target``: absent, a loop, or a parent that is no directory.
        """
        stack = [os.dup(self.fd)]
        names: list[str] = []
        try:
            self._walk(_parts(path), create, stack, names)
            return os.dup(stack[-1])
        except OSError as error:
            raise RunnerError("sandbox.target", f"{path!r} in the root: {error.strerror}") from None
        finally:
            for fd in stack:
                os.close(fd)

    def resolved(self, path: str) -> tuple[str, ...]:
        """The names that lead to ``path`` once links are followed, as far as it is there; nothing is made."""
        names: list[str] = []
        stack, rest = [os.dup(self.fd)], _parts(path)
        try:
            self._walk(rest, "", stack, names)
        except (OSError, RunnerError):
            for name in reversed(rest):
                names[len(names) - 1 if name == ".." else len(names) :] = [] if name == ".." else [name]
        finally:
            for fd in stack:
                os.close(fd)
        return tuple(names)

    def _walk(self, rest: list[str], create: str, stack: list[int], names: list[str]) -> None:
        """Follow the names of ``rest``, whose last is the next; what an error leaves in it was not followed."""
        links = 0
        while rest:
            name = rest[-1]
            if name == "..":
                rest.pop()
                if names:
                    names.pop()
                    os.close(stack.pop())
                continue
            fd = self._step(stack[-1], name, ("dir" if rest[1:] else create) if create else "", names)
            rest.pop()
            if not stat.S_ISLNK(os.fstat(fd).st_mode):
                stack.append(fd)
                names.append(name)
                continue
            links += 1
            target = os.readlink("", dir_fd=fd)
            os.close(fd)
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            rest += _parts(target)
            if target.startswith("/"):
                while names:
                    names.pop()
                    os.close(stack.pop())

    def _step(self, parent: int, name: str, create: str, names: list[str]) -> int:
        try:
            return os.open(name, _WALK, dir_fd=parent)
        except FileNotFoundError:
            if not create:
                raise
        if create == "dir":
            os.mkdir(name, 0o755, dir_fd=parent)
        else:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644, dir_fd=parent))
        if os.fstat(parent).st_dev not in self.foreign:
            self._made("/".join([*names, name]))
        return os.open(name, _WALK, dir_fd=parent)

    def directory(self, path: str) -> int:
        """As ``open`` with ``dir``.

        Raises:
            RunnerError: ``sandbox.target`` also when something else than a directory stands there.
        """
        fd = self.open(path, "dir")
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            raise RunnerError("sandbox.target", f"{path!r} in the root is not a directory")
        return fd

    def read(self, path: str, limit: int) -> bytes | None:
        """At most ``limit`` bytes of a regular file inside the root; None when there is none."""
        try:
            found = self.open(path)
        except RunnerError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                return None
            # A link can lead to a file of /proc that has nothing to give yet, and would be waited for.
            with open(os.open(fd_path(found), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                return file.read(limit)
        except OSError:
            return None
        finally:
            os.close(found)

    def listdir(self, path: str) -> list[str]:
        """Names in a directory inside the root, sorted; none when there is no such directory."""
        try:
            found = self.open(path)
        except RunnerError:
            return []
        try:
            return sorted(os.listdir(f"/proc/self/fd/{found}"))
        except OSError:
            return []
        finally:
            os.close(found)


def _parts(path: str) -> list[str]:
    return [p for p in path.split("/") if p not in ("", ".")][::-1]


def fd_path(fd: int) -> str:
    """A path that names what ``fd`` is open on, for calls that take only paths."""
    return f"/proc/self/fd/{fd}"
