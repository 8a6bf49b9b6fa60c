"""Device nodes and fifos of foreign images: the standard character devices and nothing else, never opened."""

from __future__ import annotations

import errno
import os
import stat

from oci_builder.model.errors import PolicyError, show
from oci_builder.rootfs.apply_dress import Dresser
from oci_builder.rootfs.apply_folders import Folder
from oci_builder.wire.tar import Kind, TarEntry

# null, zero, full, random, urandom, tty, console, ptmx (the kernel's devices.txt): what every runtime makes by itself.
# Any other node is a way to the machine's hardware.
STANDARD_NODES = frozenset({(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2)})


def make_node(folder: Folder, name: bytes, entry: TarEntry, dress: Dresser, where: str) -> bool:
    """Make a fifo or standard device node; False when this user may not make nodes.

    Raises:
        PolicyError: ``entry.device`` for any other device.
        FileExistsError: something is there.
    """
    try:
        if entry.kind is Kind.FIFO:
            os.mkfifo(name, 0o600, dir_fd=folder.fd)
        elif entry.kind is Kind.CHAR and (entry.major, entry.minor) in STANDARD_NODES:
            device = os.makedev(entry.major, entry.minor)
            os.mknod(name, stat.S_IFCHR | 0o600, device, dir_fd=folder.fd)
        else:
            place = f"{where}: {show(entry.name)}"
            raise PolicyError(
                "entry.device",
                f"{place}: {entry.kind} device {entry.major}:{entry.minor} is not one of the standard ones",
                where=place, actual=f"{entry.major}:{entry.minor}",
            )  # fmt: skip
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        _require_absent(folder, name)
        return False
    dress.other(folder.fd, name, entry, mode=True)
    return True


def _require_absent(folder: Folder, name: bytes) -> None:
    """What cannot be made still hides what lower layers have: answer as if it could."""
    try:
        os.lstat(name, dir_fd=folder.fd)
    except FileNotFoundError:
        return
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
