"""Device nodes: real ones, of the right type and number, on a fresh /dev."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from chroot_exec import syscalls
from chroot_exec.errors import RunnerError
from chroot_exec.resolve import fd_path


@dataclass(frozen=True)
class Node:
    """A character device: its path in the sandbox, the host's node, and its number."""

    path: str
    source: str
    major: int
    minor: int
    mode: int = 0o666


STANDARD = (
    Node("/dev/null", "/dev/null", 1, 3),
    Node("/dev/zero", "/dev/zero", 1, 5),
    Node("/dev/full", "/dev/full", 1, 7),
    Node("/dev/random", "/dev/random", 1, 8),
    Node("/dev/urandom", "/dev/urandom", 1, 9),
    Node("/dev/tty", "/dev/tty", 5, 0),
)
LINKS = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
)


def require_character_device(path: str, info: os.stat_result, major: int, minor: int) -> None:
    """Refuse anything else than the character device of this number.

    Raises:
        RunnerError: ``device.type``.
    """
    actual = (os.major(info.st_rdev), os.minor(info.st_rdev))
    if not stat.S_ISCHR(info.st_mode) or actual != (major, minor):
        kind = f"character device {actual[0]}:{actual[1]}" if stat.S_ISCHR(info.st_mode) else "not a character device"
        raise RunnerError("device.type", f"{path} is {kind}, expected character device {major}:{minor}")


class DeviceFolder:
    """Fills a mounted, empty /dev.

    Args:
        fd: descriptor of the folder.
        note: told what did not go the usual way.
    """

    def __init__(self, fd: int, note: Callable[[str], None]) -> None:
        self._fd = fd
        self._note = note
        self.method = "mknod" if self._mknod_works() else "bind"

    def _mknod_works(self) -> bool:
        name = ".probe"
        try:
            os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(1, 3), dir_fd=self._fd)
        except OSError:
            return False
        try:
            # A node can be made and yet not opened: nodev mounts and device control groups.
            os.close(os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._fd))
            return True
        except OSError:
            return False
        finally:
            os.unlink(name, dir_fd=self._fd)

    def fill(self, nodes: Iterable[Node]) -> None:
        """Make the standard nodes and links and ``nodes``.

        Raises:
            RunnerError: ``device.type``, ``device.path`` (a node outside /dev), ``device.make``.
        """
        for name, target in LINKS:
            os.symlink(target, name, dir_fd=self._fd)
        for node in (*STANDARD, *nodes):
            self.make(node)

    def make(self, node: Node) -> None:
        """Make one node; an equal one that is there already is left."""
        parts = node.path.split("/")
        if parts[:2] != ["", "dev"] or len(parts) < 3 or any(p in ("", ".", "..") for p in parts[1:]):
            raise RunnerError("device.path", f"{node.path!r} is not a path below /dev")
        parent = os.dup(self._fd)
        try:
            for name in parts[2:-1]:
                parent = self._enter(parent, name)
            self._place(node, parent, parts[-1])
        except FileExistsError:
            self._check(node, parent, parts[-1])
        except OSError as error:
            raise RunnerError("device.make", f"cannot make {node.path}: {error}") from None
        finally:
            os.close(parent)

    @staticmethod
    def _enter(parent: int, name: str) -> int:
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            pass
        fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        os.close(parent)
        return fd

    def _place(self, node: Node, parent: int, name: str) -> None:
        if self.method == "mknod":
            os.mknod(name, stat.S_IFCHR | node.mode, os.makedev(node.major, node.minor), dir_fd=parent)
            os.chmod(name, node.mode, dir_fd=parent)
        else:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=parent))
            self._bind(node, parent, name)
        self._check(node, parent, name)

    @staticmethod
    def _bind(node: Node, parent: int, name: str) -> None:
        source = os.open(node.source, os.O_PATH | os.O_CLOEXEC)
        target = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            require_character_device(node.source, os.fstat(source), node.major, node.minor)
            syscalls.mount(fd_path(source), fd_path(target), "", syscalls.MS_BIND)
        finally:
            os.close(source)
            os.close(target)

    @staticmethod
    def _check(node: Node, parent: int, name: str) -> None:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        require_character_device(node.path, info, node.major, node.minor)
