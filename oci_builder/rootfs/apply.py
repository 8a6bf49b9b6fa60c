"""Apply layers to an empty folder: image-spec layer.md, "Applying Changesets", inside the root whatever names say.

Every system call takes a directory descriptor and one component; files are only ever made anew (O_EXCL) and nothing
that was there is opened. A link that a layer plants is followed only as far as the root goes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from oci_builder.model.errors import PolicyError, disk_error, show
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.apply_common import HardLink, link_late, require_few
from oci_builder.rootfs.apply_dress import Dresser, Who
from oci_builder.rootfs.apply_folders import Folder, Folders
from oci_builder.rootfs.apply_nodes import make_node
from oci_builder.rootfs.apply_notes import Notes
from oci_builder.rootfs.apply_remove import Spare, remove_entry
from oci_builder.rootfs.resolve import OPEN_FOLDER
from oci_builder.rootfs.tree_log import LayerTree, require_judgeable
from oci_builder.rootfs.whiteout import OPAQUE, hidden_by
from oci_builder.wire.tar import KeySet, Kind, TarEntry, TarReader

T = TypeVar("T")

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BITS = (1 << 64) - 1
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ApplyOptions:
    """How layers are applied.

    Attributes:
        where: what is unpacked, for messages.
        strict: refuse devices, fifos, and hard links before their target.
        who: whose the files are going to be; ``None`` asks the process.
    """

    where: str = "image"
    limits: Limits = DEFAULT_LIMITS
    strict: bool = False
    who: Who | None = None


@dataclass(slots=True)
class Counts:
    """What was written."""

    layers: int = 0
    entries: int = 0
    bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


class RootTree:
    """A tree that layers are applied to, lowest first; ``finish`` makes it what the image says.

    Args:
        root: descriptor of an empty folder of our own with mode 0700; stays the caller's.

    Raises (all methods):
        PolicyError: ``entry.whiteout``, ``entry.device``, ``entry.link_target``, ``entry.duplicate``, ``path.loop``,
            ``path.parent``, ``limit.*``.
        TransportError: ``io.*``.
    """

    def __init__(self, root: int, options: ApplyOptions | None = None) -> None:
        self.options = options or ApplyOptions()
        self.notes = Notes(self.options.where)
        self.counts = Counts()
        self._who = self.options.who or Who.myself(root)
        self._dress = Dresser(self._who, self.notes)
        self._layer = _Layer(self.options.limits)
        self._folders = Folders(root, self.options.limits, self._replaced, self._layer.add)
        self._layer.folders = self._folders
        self._make: dict[Kind, Callable[[TarEntry, TarReader], None]] = {
            Kind.FILE: self._file,
            Kind.DIR: self._folder,
            Kind.SYMLINK: self._symlink,
            Kind.HARDLINK: self._hardlink,
            Kind.CHAR: self._node,
            Kind.BLOCK: self._node,
            Kind.FIFO: self._node,
        }

    def apply(self, layer: TarReader) -> None:
        """Apply one layer; all of it is read, its end included."""
        self._layer.clear()
        self.counts.layers += 1
        entry = None
        try:
            for entry in layer:
                self._count()
                if self._layer.trees[-1].note(entry) == "entry.duplicate":
                    raise self._twice(entry)
                self._apply(entry, layer)
            self._late_links()
        except OSError as error:
            raise self._failure(error, entry) from None

    def _count(self) -> None:
        self.counts.entries += 1
        most = self.options.limits.archive_entries
        if self.counts.entries > most:
            raise PolicyError(
                "limit.entries", f"{self.options.where}: more than {most} entries in all its layers",
                where=self.options.where, expected=f"<= {most}",
            )  # fmt: skip

    def finish(self) -> None:
        """Give all folders their owner, mode and times."""
        require_judgeable(self._layer.trees, self.options.where, self.options.limits)
        try:
            self._folders.finish(self._dress.folder)
        except OSError as error:
            raise self._failure(error, None) from None

    def close(self) -> None:
        """Close what is open. Idempotent."""
        self._folders.forget()

    # -- entries ---------------------------------------------------------------------------------------------------

    def _apply(self, entry: TarEntry, layer: TarReader) -> None:
        hidden = hidden_by(entry, self.options.where)
        if hidden is not None:
            self._hide(*hidden)
        elif not entry.name:
            self._folders.describe(self._folders.root, entry)
        else:
            self._make[entry.kind](entry, layer)
            self.counts.kinds[entry.kind] = self.counts.kinds.get(entry.kind, 0) + 1

    def _place(self, entry: TarEntry | HardLink, create: Callable[[Folder, bytes], T]) -> T:
        """Create something new in its parent, in place of what is there."""
        above, _, name = entry.name.rpartition(b"/")
        folder = self._folders.get(above)
        try:
            made = create(folder, name)
        except FileExistsError:
            if self._layer.keeps(folder.inode, name):
                raise self._twice(entry) from None
            remove_entry(folder.fd, name)
            self._folders.forget()
            folder = self._folders.get(above)
            made = create(folder, name)
        self._layer.add(folder.inode, name)
        return made

    def _file(self, entry: TarEntry, layer: TarReader) -> None:
        mode = entry.mode & 0o777
        fd = self._place(entry, lambda folder, name: os.open(name, _NEW_FILE, mode, dir_fd=folder.fd))
        try:
            if entry.size:
                _write(fd, layer.pieces())
                self.counts.bytes += entry.size
            self._dress.file(fd, entry)
        finally:
            os.close(fd)

    def _folder(self, entry: TarEntry, _layer: TarReader) -> None:
        above, _, name = entry.name.rpartition(b"/")
        parent = self._folders.get(above)
        try:
            self._folders.make(parent, name)
        except FileExistsError:
            # Whatever is no folder makes way for it, a link to a folder too: the layer says that this is a folder.
            if self._is_folder(parent, name):
                self._layer.add(parent.inode, name)
            else:
                self._place(entry, self._folders.make)
        self._folders.describe(self._folders.get(entry.name), entry)

    @staticmethod
    def _is_folder(parent: Folder, name: bytes) -> bool:
        try:
            os.close(os.open(name, OPEN_FOLDER, dir_fd=parent.fd))
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            return False
        return True

    def _symlink(self, entry: TarEntry, _layer: TarReader) -> None:
        def create(folder: Folder, name: bytes) -> None:
            os.symlink(entry.link, name, dir_fd=folder.fd)
            self._dress.other(folder.fd, name, entry, mode=False)

        self._place(entry, create)

    def _node(self, entry: TarEntry, _layer: TarReader) -> None:
        if self.options.strict:
            raise self._refuse("entry.device", entry, f"a {entry.kind} entry")
        if not self._place(entry, lambda folder, name: make_node(folder, name, entry, self._dress, self.options.where)):
            self.notes.add("entry.device", entry.name)
            self._layer.left_out.add(entry.name)

    # -- hard links ------------------------------------------------------------------------------------------------

    def _hardlink(self, entry: TarEntry, _layer: TarReader) -> None:
        if entry.link in self._layer.left_out:
            self.notes.add("entry.link_target", entry.name)
            self._layer.left_out.add(entry.name)
        elif not self._link(HardLink(entry.name, entry.link)):
            if self.options.strict:
                raise self._refuse("entry.link_target", entry, f"a hard link to {show(entry.link)} before it is there")
            self._layer.late.append(HardLink(entry.name, entry.link))
            require_few(len(self._layer.late), self.options.limits)

    def _link(self, entry: HardLink) -> bool:
        """Make a hard link; False when its target is not there (yet)."""
        if entry.link.startswith(entry.name + b"/"):
            raise self._refuse("entry.link_target", entry, f"a hard link in place of a folder of {show(entry.link)}")
        above, _, name = entry.link.rpartition(b"/")
        source = self._folders.existing(above)
        status = _lstat(source, name or b".")
        if source is None or status is None:
            if entry.link == entry.name:
                raise self._refuse("entry.link_target", entry, "a hard link to itself")
            return False
        if stat.S_ISDIR(status.st_mode):
            raise self._refuse("entry.link_target", entry, f"a hard link to the folder {show(entry.link)}")

        def create(folder: Folder, new: bytes) -> None:
            if (folder.inode, new) == (source.inode, name):
                if self._layer.keeps(folder.inode, name):
                    raise self._twice(entry)
                return
            # Looked up again: what made way for the link may have closed the descriptor, or taken the target with it.
            origin = self._folders.get(above, create=False)
            os.link(name, new, src_dir_fd=origin.fd, dst_dir_fd=folder.fd, follow_symlinks=False)

        try:
            self._place(entry, create)
        except (FileNotFoundError, PermissionError):
            left = _lstat(self._folders.existing(above), name)
            if left is not None and not stat.S_ISDIR(left.st_mode):
                raise
            raise self._refuse("entry.link_target", entry, f"a hard link that replaces {show(entry.link)}") from None
        return True

    def _late_links(self) -> None:
        left = link_late(self._layer.late, self._link)
        if left is not None:
            raise self._refuse("entry.link_target", left, f"a hard link to {show(left.link)}, which is nowhere")

    # -- whiteouts -------------------------------------------------------------------------------------------------

    def _hide(self, above: bytes, name: bytes) -> None:
        """Remove what lower layers have; what this layer has stays, wherever in it the whiteout stands."""
        folder = self._folders.existing(above)
        if folder is None:
            return
        if name == OPAQUE:
            if self._layer.is_clean(folder.inode):
                return
            fd = os.open(b".", _LIST, dir_fd=folder.fd)
            try:
                for child in os.listdir(fd):
                    remove_entry(fd, os.fsencode(child), self._layer)
            finally:
                os.close(fd)
        else:
            try:
                remove_entry(folder.fd, name, self._layer)
            except FileNotFoundError:
                return
        self._folders.forget()

    # -- what is wrong ---------------------------------------------------------------------------------------------

    def _replaced(self, path: bytes) -> None:
        self.notes.add("entry.parent", path)

    def _twice(self, entry: TarEntry | HardLink) -> PolicyError:
        # image-spec layer.md, "Distributable Format": no duplicate entries; readers differ in which they take (B027).
        return self._refuse("entry.duplicate", entry, "a name that stands twice in its layer")

    def _refuse(self, code: str, entry: TarEntry | HardLink, what: str) -> PolicyError:
        place = f"{self.options.where}: {show(entry.name)}"
        return PolicyError(code, f"{place}: {what}", where=place, actual=what)

    def _failure(self, error: OSError, entry: TarEntry | None) -> Exception:
        doing = f"unpacking {show(entry.name)}" if entry is not None else "unpacking"
        if error.errno == errno.ENAMETOOLONG and entry is not None:
            return self._refuse("limit.name", entry, "a name or link target that this file system cannot hold")
        return disk_error(error, doing)


class _Layer(Spare):
    """What the layer that is being applied has made: the rest is from lower layers."""

    def __init__(self, limits: Limits) -> None:
        self.folders: Folders | None = None
        self._limits = limits
        # Of all layers so far: what nobody could judge who has no disk for it is refused here too.
        self.trees: list[LayerTree] = []
        self._made, self.late, self.left_out = KeySet(), list[HardLink](), set[bytes]()
        self._clean = KeySet()

    def clear(self) -> None:
        """A new layer begins."""
        # Hashes of (inode of the folder, name).
        self._made, self._clean = KeySet(), KeySet()
        before = self.trees[-1].log.folders.count if self.trees else 0
        self.trees.append(LayerTree.within(self._limits, before, keep=False))
        self.late, self.left_out = [], set()

    def add(self, folder: int, name: bytes) -> None:
        """``name`` in the folder with this inode number was made."""
        self._made.add(self._key(folder, name))

    def keeps(self, folder: int, name: bytes) -> bool:
        """Whether it was made by this layer."""
        return self._key(folder, name) in self._made

    @staticmethod
    def _key(folder: int, name: bytes) -> int:
        return hash((folder, name)) & _BITS or 1

    def is_clean(self, folder: int) -> bool:
        """Whether nothing of a lower layer is below it; nothing ever comes to be. Names without end may hide one."""
        return not self._clean.add(folder)

    def stays(self, folder: int) -> None:
        """A folder of a lower layer is hidden, but this layer has put something into it."""
        if self.folders is not None:
            self.folders.undescribe(folder)


def _lstat(folder: Folder | None, name: bytes) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=folder.fd) if folder else None
    except FileNotFoundError:
        return None


def _write(fd: int, pieces: Iterator[memoryview | int]) -> None:
    hole = 0
    for piece in pieces:
        if isinstance(piece, int):
            hole = os.lseek(fd, piece, os.SEEK_CUR)
            continue
        hole = 0
        while len(piece):
            piece = piece[os.write(fd, piece) :]
    if hole:
        os.ftruncate(fd, hole)
