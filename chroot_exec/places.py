"""Where the sandbox's own file systems stand, and that each of them is still where its name leads.

In a root that nobody trusts ``/dev`` can be a link to a folder below ``/tmp``, and ``/tmp`` one to a folder below
``/dev``. So the outer file system is mounted before the inner one; whatever is covered in spite of that is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from chroot_exec.errors import RunnerError
from chroot_exec.resolve import Root

KERNEL = ("/proc", "/sys", "/dev")
_Identity = tuple[int, int]


class Places:
    """The mounts of a sandbox, by the names under which programs look for them."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._tops: dict[str, _Identity] = {}

    def in_order(self, paths: Iterable[str]) -> Iterator[str]:
        """The paths, those first that the others may lie in; each is mounted before the next is asked for."""
        left = list(paths)
        while left:
            path = min(left, key=lambda p: len(self._root.resolved(p)))
            left.remove(path)
            yield path

    def add(self, path: str) -> None:
        """Note that one of ours has just been mounted at ``path``."""
        fd = self._root.open(path)
        self._tops[path] = found = _identity(fd)
        os.close(fd)
        self._root.foreign.add(found[0])

    def folder(self, path: str) -> int:
        """The folder at which one of ours can be mounted: not the root itself, nor in a kernel file system.

        Raises:
            RunnerError: ``sandbox.target``.
        """
        fd = self._root.directory(path)
        found = _identity(fd)
        if found == _identity(self._root.fd) or found[0] in self._devices(KERNEL):
            os.close(fd)
            raise RunnerError("sandbox.target", f"{path} in the root is a link to the root or into another mount")
        return fd

    def is_scratch(self, fd: int) -> bool:
        """Whether ``fd`` is a scratch folder of ours, which need not be mounted twice."""
        return _identity(fd) in [top for path, top in self._tops.items() if path not in KERNEL]

    def require_free(self, fd: int, path: str) -> None:
        """Refuse a place that may not be covered: a link in the image led there.

        Raises:
            RunnerError: ``sandbox.target``.
        """
        found, own_dev = _identity(fd), path.startswith("/dev/")
        tops = {self._tops.get(p) for p in KERNEL} | {_identity(self._root.fd)}
        node = stat.S_ISCHR(os.fstat(fd).st_mode) and not own_dev
        if found in tops or found[0] in self._devices(KERNEL[:2] if own_dev else KERNEL) or node:
            raise RunnerError("sandbox.target", f"{path} in the root is a link to a place that must not be covered")

    def require_reachable(self, paths: Iterable[str]) -> None:
        """Refuse a sandbox in which one of these names leads to something else than what was mounted for it.

        Raises:
            RunnerError: ``sandbox.target``.
        """
        for path in paths:
            fd = self._root.open(path)
            found = _identity(fd)
            os.close(fd)
            if found != self._tops[path]:
                raise RunnerError("sandbox.target", f"what {path} in the root leads to is covered by another mount")

    def _devices(self, paths: Iterable[str]) -> set[int]:
        return {self._tops[path][0] for path in paths if path in self._tops}


def _identity(fd: int) -> _Identity:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino
