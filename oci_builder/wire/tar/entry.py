"""What one tar entry is, free of the format it came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

NO_XATTRS: Mapping[bytes, bytes] = MappingProxyType({})


class Kind(StrEnum):
    """The kinds of entries that a layer may hold (image-spec layer.md, "File Types")."""

    FILE = "file"
    DIR = "dir"
    SYMLINK = "symlink"
    HARDLINK = "hardlink"
    CHAR = "char"
    BLOCK = "block"
    FIFO = "fifo"


@dataclass(slots=True)
class TarEntry:
    """One entry. Not to be changed once made.

    Attributes:
        name: clean path: relative, no ``.`` parts, no final slash; ``b""`` is the root itself.
        size: bytes of content, holes of a sparse file included.
        mode: permission bits and setuid, setgid, sticky (07777).
        mtime_ns: nanoseconds since 1970.
        link: target of a symlink, verbatim; clean name for a hard link.
        major, minor: device numbers.
        xattrs: name (``user.x``) to value.
        offset: where the entry's first header block stands in the tar.
        raw_name: the name as it was written.
    """

    # Not frozen: a layer has 190,000 of these, and a frozen one takes twice as long to make.
    name: bytes
    kind: Kind
    size: int = 0
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    link: bytes = b""
    major: int = 0
    minor: int = 0
    xattrs: Mapping[bytes, bytes] = field(default_factory=lambda: NO_XATTRS)
    uname: bytes = b""
    gname: bytes = b""
    offset: int = 0
    raw_name: bytes = b""


# Extended attributes that belong to a file wherever it goes. The others describe the machine that it was on:
# security.selinux and trusted.* are labels and overlayfs bookkeeping (a trusted.overlay.opaque that is restored hides
# files), system.nfs4_acl and POSIX ACLs name local users. Source: umoci's xattr_test.go, image-tools.
_KEPT = (b"user.",)
_KEPT_NAMES = frozenset({b"security.capability"})


def kept_xattr(name: bytes) -> bool:
    """Whether an extended attribute is kept in layers and restored from them."""
    return name in _KEPT_NAMES or (name.startswith(_KEPT) and not name.startswith(b"user.overlay."))
