"""The folders of a tree that is being unpacked: open descriptors, and what they shall look like in the end.

Folders stay 0700 and ours until everything is in them: an image's own mode may keep us out, its times would not
survive the next file, and a set-group-ID bit would be inherited.
"""

from __future__ import annotations

import errno
import os
import resource
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from oci_builder.model.errors import PolicyError, show
from oci_builder.model.limits import Limits
from oci_builder.rootfs.apply_common import if_there
from oci_builder.rootfs.apply_remove import remove_entry
from oci_builder.rootfs.resolve import OPEN_FOLDER, FolderOpener
from oci_builder.wire.tar import Kind, TarEntry

# Parents that no entry describes.
IMPLICIT = TarEntry(b"", Kind.DIR, mode=0o755)
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_AT_MOST = 128


@dataclass(frozen=True, slots=True)
class Folder:
    """An open folder: O_PATH descriptor, inode number, path below the root free of links."""

    fd: int
    inode: int
    path: bytes


class Folders:
    """Opens, makes and finally dresses the folders below a root.

    Args:
        root: descriptor of the root; stays the caller's.
        replaced: told the path of a non-folder that had to make way for a parent folder.
        made: told the folder and name of each folder that is made.
    """

    def __init__(
        self, root: int, limits: Limits, replaced: Callable[[bytes], None], made: Callable[[int, bytes], None]
    ) -> None:
        self._limits = limits
        self._replaced = replaced
        self._made = made
        self._opener = FolderOpener(root, self._make_parent, follows=limits.symlink_follows)
        self._open: OrderedDict[bytes, Folder] = OrderedDict()
        # The rest is for what is read and written meanwhile, and for trees that are removed, a descriptor a level.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = _OPEN_AT_MOST if files == resource.RLIM_INFINITY else max(1, min(_OPEN_AT_MOST, files // 4))
        self._wanted: dict[int, tuple[bytes, TarEntry]] = {}
        self.root = Folder(root, os.fstat(root).st_ino, b"")
        self.describe(self.root, IMPLICIT)

    def get(self, path: bytes, *, create: bool = True) -> Folder:
        """The folder that an entry's path names, links followed inside the root. It stays open for the next call.

        Raises:
            PolicyError: ``path.loop``, ``path.parent``, ``limit.depth``.
            FileNotFoundError: absent, without ``create``.
        """
        if not path:
            return self.root
        known = self._open.get(path)
        if known is not None:
            self._open.move_to_end(path)
            return known
        above, _, name = path.rpartition(b"/")
        parent = self._open.get(above) if above else self.root
        if parent is not None:
            try:
                fd = os.open(name, OPEN_FOLDER, dir_fd=parent.fd)
            except OSError:
                pass
            else:
                return self._remember(path, fd, parent.path + b"/" + name if parent.path else name)
        return self._remember(path, *self._opener.open(path, create=create))

    def existing(self, path: bytes) -> Folder | None:
        """As ``get`` without ``create``; ``None`` when there is no such folder.

        Raises:
            PolicyError: ``path.loop``.
        """
        return if_there(lambda: self.get(path, create=False))

    def make(self, parent: Folder, name: bytes) -> None:
        """Make a folder, not described by any entry yet.

        Raises:
            FileExistsError: something is there.
            PolicyError: ``limit.depth``: links lead deeper than an entry may stand.
        """
        self._mkdir(parent.fd, name, parent.path + b"/" + name if parent.path else name)
        self._made(parent.inode, name)

    def describe(self, folder: Folder, entry: TarEntry) -> None:
        """What the folder shall look like in the end; the last word counts."""
        self._wanted[folder.inode] = (folder.path, entry)

    def undescribe(self, inode: int) -> None:
        """The folder's description was hidden; it is there because of what is in it."""
        path, _ = self._wanted[inode]
        self._wanted[inode] = (path, IMPLICIT)

    def forget(self) -> None:
        """Close all: a folder or a link was removed, and the paths may lead elsewhere now."""
        while self._open:
            os.close(self._open.popitem()[1].fd)

    def finish(self, dress: Callable[[int, TarEntry], None]) -> None:
        """Call ``dress`` with a descriptor for each folder that still is where it was described, children first."""
        for inode, (path, entry) in sorted(self._wanted.items(), key=lambda item: item[1][0], reverse=True):
            above, _, name = path.rpartition(b"/")
            try:
                parent = self.existing(above)
            except PolicyError:
                parent = None  # a link stands in its place now, and leads in a circle
            if parent is None:
                continue
            try:
                fd = os.open(name or b".", _LIST, dir_fd=parent.fd)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
                continue
            try:
                if os.fstat(fd).st_ino == inode:
                    dress(fd, entry)
            finally:
                os.close(fd)
        self.forget()

    def _remember(self, path: bytes, fd: int, real: bytes) -> Folder:
        folder = self._open[path] = Folder(fd, os.fstat(fd).st_ino, real)
        if len(self._open) > self._most:
            os.close(self._open.popitem(last=False)[1].fd)
        return folder

    def _make_parent(self, folder: int, name: bytes, path: bytes, error: OSError) -> None:
        if isinstance(error, NotADirectoryError):
            self._replaced(path)
            remove_entry(folder, name)
        self._mkdir(folder, name, path)
        self._made(os.fstat(folder).st_ino, name)

    def _mkdir(self, above: int, name: bytes, path: bytes) -> None:
        if path.count(b"/") >= self._limits.depth:
            raise PolicyError(
                "limit.depth", f"{show(path[:300])}: links lead deeper than {self._limits.depth} folders",
                where=show(path[:300]), expected=f"<= {self._limits.depth}",
            )  # fmt: skip
        os.mkdir(name, 0o700, dir_fd=above)
        inode = os.lstat(name, dir_fd=above).st_ino
        self._wanted[inode] = (path, IMPLICIT)
