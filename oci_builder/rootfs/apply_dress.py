"""Owner, mode, extended attributes and times of what was unpacked, in the order in which they survive each other.

chown clears set-user-ID bits and capabilities, so it comes first; writing changes times, so they come last.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from oci_builder.rootfs.apply_notes import Notes
from oci_builder.wire.tar import TarEntry, kept_xattr

# What setxattr says when this file system, or this user, cannot have the attribute (ENOSPC: no room in the inode).
_NO_XATTR = frozenset(
    {errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EDQUOT, errno.EINVAL}
)
_NO_OWNER = frozenset({errno.EPERM, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class Who:
    """Whose the tree is going to be.

    Attributes:
        uid, gid: what new files get by themselves.
        chowns: whether owners can be set; else they are counted and left.
        masked: permission bits that new files do not get by themselves.
    """

    uid: int
    gid: int
    chowns: bool
    masked: int

    @classmethod
    def myself(cls, root: int) -> Who:
        """This process, making files below the folder ``root``, which it has made itself."""
        # A default ACL takes the place of the umask: then every mode is set. Reading the umask otherwise needs /proc,
        # as umask(2) changes it for all threads.
        masked = 0o777 if _has_acl(root) else _umask()
        return cls(os.geteuid(), os.getegid(), os.geteuid() == 0, masked)


def _has_acl(root: int) -> bool:
    # An O_PATH descriptor takes no fgetxattr; its /proc name does.
    try:
        return "system.posix_acl_default" in os.listxattr(f"/proc/self/fd/{root}")
    except OSError:
        return True


def _umask() -> int:
    try:
        with open("/proc/self/status", "rb") as file:
            return next((int(line[6:], 8) for line in file if line.startswith(b"Umask:")), 0o777)
    except OSError:
        return 0o777


class Dresser:
    """Gives files, folders and links what their entries say."""

    def __init__(self, who: Who, notes: Notes) -> None:
        self._who = who
        self._notes = notes
        self._plain = 0o777 & ~who.masked

    def file(self, fd: int, entry: TarEntry) -> None:
        """A new file, made with the entry's permission bits."""
        if entry.uid != self._who.uid or entry.gid != self._who.gid:
            self._own(fd, entry)
        if entry.mode & ~self._plain:
            os.fchmod(fd, entry.mode)
        if entry.xattrs:
            self._xattrs(fd, entry)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def folder(self, fd: int, entry: TarEntry) -> None:
        """A folder with everything in it."""
        if entry.uid != self._who.uid or entry.gid != self._who.gid:
            self._own(fd, entry)
        os.fchmod(fd, entry.mode)
        if entry.xattrs:
            self._xattrs(fd, entry)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def other(self, folder: int, name: bytes, entry: TarEntry, *, mode: bool) -> None:
        """A link, device or fifo: by name, as it must not be opened."""
        if entry.uid != self._who.uid or entry.gid != self._who.gid:
            if self._who.chowns:
                try:
                    os.chown(name, entry.uid, entry.gid, dir_fd=folder, follow_symlinks=False)
                except OSError as error:
                    self._not_owned(error, entry)
            else:
                self._notes.add("entry.owner", entry.name)
        if mode:
            os.chmod(name, entry.mode, dir_fd=folder)
        for key in entry.xattrs:
            # Linux keeps user.* attributes and capabilities on files and folders only.
            self._notes.add("entry.xattr" if kept_xattr(key) else "entry.xattr_policy", entry.name)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=folder, follow_symlinks=False)

    def _own(self, fd: int, entry: TarEntry) -> None:
        if not self._who.chowns:
            # Parents that no entry describes belong to whoever makes them.
            if entry.raw_name:
                self._notes.add("entry.owner", entry.name)
            return
        try:
            os.fchown(fd, entry.uid, entry.gid)
        except OSError as error:
            self._not_owned(error, entry)

    def _not_owned(self, error: OSError, entry: TarEntry) -> None:
        # Root of a user namespace can give files to the users that are mapped into it only.
        if error.errno not in _NO_OWNER:
            raise error
        self._notes.add("entry.owner", entry.name)

    def _xattrs(self, fd: int, entry: TarEntry) -> None:
        for key, value in entry.xattrs.items():
            if not kept_xattr(key):
                self._notes.add("entry.xattr_policy", entry.name)
                continue
            try:
                os.setxattr(fd, key, value)
            except OSError as error:
                if error.errno not in _NO_XATTR:
                    raise
                self._notes.add("entry.xattr", entry.name)
