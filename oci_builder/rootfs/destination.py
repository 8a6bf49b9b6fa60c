"""The folder that a tree is unpacked into: filled beside, then renamed, so that it is whole or not there.

Where the folder itself is a mount point, or its parent cannot be written to, the tree is filled inside it and its
entries are renamed one by one; a failure removes them again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path

from oci_builder.model.errors import ConflictError, OciBuilderError, TransportError, disk_error, show
from oci_builder.rootfs.apply_remove import remove_entry

_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS = 5


class Destination:
    """A folder to fill. Use ``with``; what is not committed is removed.

    Args:
        folder: absent, or an empty folder. Missing parents are made.

    Attributes:
        fd: descriptor of the folder to fill, of mode 0700.

    Raises:
        ConflictError: ``unpack.not_empty`` from ``__enter__`` and ``commit``.
        TransportError: ``io.*``.
    """

    def __init__(self, folder: Path) -> None:
        self._given = folder
        self._dangling = folder.is_symlink() and not folder.exists()
        self.folder = Path(os.path.realpath(folder))
        self.fd = -1
        self._parent = -1
        self._name = b""
        self._inside = False
        self._committed = False

    def __enter__(self) -> Destination:
        try:
            self._open()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise disk_error(error, f"preparing {show(str(self.folder))}") from None
            raise
        return self

    def _open(self) -> None:
        self._require_empty()
        above = self.folder.parent
        above.mkdir(parents=True, exist_ok=True)
        self._inside = self.folder.is_dir() and self.folder.lstat().st_dev != above.lstat().st_dev
        if not self._inside:
            try:
                self._begin(above)
            except PermissionError:
                if not self.folder.is_dir():
                    raise
                self._inside = True
        if self._inside:
            self._begin(self.folder)

    def _require_empty(self) -> None:
        if self._dangling:
            raise ConflictError(
                "unpack.not_empty", f"{show(str(self._given))} is a link to nothing; name the folder itself",
                where=str(self._given),
            )  # fmt: skip
        try:
            found = os.listdir(os.fsencode(self.folder))
        except FileNotFoundError:
            return
        except NotADirectoryError:
            found = [b"(not a folder)"]
        if any(not name.startswith(self._prefix()) for name in found):
            raise ConflictError(
                "unpack.not_empty", f"{show(str(self.folder))} is not an empty folder; name another, or empty it",
                where=str(self.folder), actual=show(sorted(found)[0]),
            )  # fmt: skip

    def _prefix(self) -> bytes:
        return b".%b.partial-" % os.fsencode(self.folder.name[:100])

    def _begin(self, above: Path) -> None:
        if self._parent >= 0:
            os.close(self._parent)
        self._parent = os.open(above, _LIST & ~os.O_NOFOLLOW)
        self._sweep()
        for _ in range(_ATTEMPTS):
            self._name = self._prefix() + secrets.token_hex(6).encode()
            os.mkdir(self._name, 0o700, dir_fd=self._parent)
            if self._lock():
                # mkdir takes a set-group-ID bit and a default ACL from the parent.
                os.fchmod(self.fd, 0o700)
                with contextlib.suppress(OSError):
                    os.removexattr(self.fd, "system.posix_acl_default")
                return
        raise OSError(errno.EAGAIN, "somebody else removes what is made here", os.fsdecode(self._name))

    def _lock(self) -> bool:
        """Lock the new folder, unless another process took it for a dead one's in between."""
        try:
            self.fd = os.open(self._name, _LIST, dir_fd=self._parent)
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.lstat(self._name, dir_fd=self._parent).st_ino == os.fstat(self.fd).st_ino
        except (FileNotFoundError, BlockingIOError):
            return False

    def _sweep(self) -> None:
        """Remove what dead processes left of this folder."""
        for name in os.listdir(self._parent):
            if not os.fsencode(name).startswith(self._prefix()):
                continue
            with contextlib.suppress(OSError, TransportError):
                fd = os.open(name, _LIST, dir_fd=self._parent)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_entry(self._parent, os.fsencode(name))
                finally:
                    os.close(fd)

    def commit(self) -> None:
        """Make the folder what was filled."""
        try:
            if self._inside:
                self._move_in()
            else:
                os.rename(self._name, self.folder.name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
                os.fsync(self._parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise ConflictError(
                    "unpack.not_empty", f"{show(str(self.folder))} was filled by somebody else meanwhile",
                    where=str(self.folder),
                ) from None  # fmt: skip
            raise disk_error(error, f"finishing {show(str(self.folder))}") from None
        self._committed = True

    def _move_in(self) -> None:
        status = os.fstat(self.fd)
        for name in os.listdir(self.fd):
            os.rename(name, name, src_dir_fd=self.fd, dst_dir_fd=self._parent)
        os.rmdir(self._name, dir_fd=self._parent)
        # The folder may be a mount point of somebody else's: what of the image's root it can be, it becomes.
        with contextlib.suppress(PermissionError):
            os.fchown(self._parent, status.st_uid, status.st_gid)
            os.fchmod(self._parent, stat.S_IMODE(status.st_mode))
            os.utime(self._parent, ns=(status.st_mtime_ns, status.st_mtime_ns))

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if not self._committed:
                self._abandon()
        except (OSError, OciBuilderError):
            if error is None:
                raise
        finally:
            self._close()

    def _abandon(self) -> None:
        names = os.listdir(self._parent) if self._inside else [os.fsdecode(self._name)]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                remove_entry(self._parent, os.fsencode(name))

    def _close(self) -> None:
        for fd in (self.fd, self._parent):
            if fd >= 0:
                os.close(fd)
        self.fd = self._parent = -1
