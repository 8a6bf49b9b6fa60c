"""Read a live tree into values: what is there, never what a link points at.

Links are never followed and only directories are opened, by descriptor (C8-14, B124). What a tree may hold is a
policy: our own trees are held to more than a base is.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from oci_builder.model.errors import OciBuilderError, PolicyError, SpecError, TransportError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.report import Finding
from oci_builder.wire.tar import Kind, kept_xattr, leads_deep

_KINDS = {
    stat.S_IFREG: Kind.FILE,
    stat.S_IFDIR: Kind.DIR,
    stat.S_IFLNK: Kind.SYMLINK,
    stat.S_IFCHR: Kind.CHAR,
    stat.S_IFBLK: Kind.BLOCK,
    stat.S_IFIFO: Kind.FIFO,
}
_SETID = stat.S_ISUID | stat.S_ISGID
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Nodes that every bootstrapped root has and every runtime makes for itself: names below dev/.
_STANDARD_NODES = frozenset(b"console full null ptmx random tty urandom zero".split())
_NAMED = 5


@dataclass(slots=True)
class SourceEntry:
    """One entry of a live tree, as ``lstat`` saw it. Not to be changed after the scan.

    Attributes:
        path: relative to the tree's root, ``b""`` for the root itself.
        mode: permission bits (07777).
        mtime_ns, ctime_ns: nanoseconds since 1970.
        link: target of a symbolic link, verbatim.
        xattrs: allowed extended attributes, sorted by name.
    """

    # Not frozen: 190,000 of these are made in one scan, and a frozen one costs twice as much.
    path: bytes
    kind: Kind
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int
    dev: int
    ino: int
    nlink: int
    link: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def inode(self) -> tuple[int, int]:
        """Equal pairs mean the same file: equal inode numbers on two devices do not (C6-15)."""
        return self.dev, self.ino

    @property
    def identity(self) -> tuple[int, int, int, int, int]:
        """Changes whenever content can have changed: (dev, ino, size, mtime_ns, ctime_ns)."""
        return self.dev, self.ino, self.size, self.mtime_ns, self.ctime_ns


@dataclass(frozen=True, slots=True)
class ScanPolicy:
    """What a tree may hold.

    Attributes:
        setid: keep set-user-ID and set-group-ID files; else they are refused.
        nodes: leave standard device nodes out with a warning; else every device is refused.
        exclude: ``fnmatch`` patterns of paths to leave out, with all below them; ``*`` matches ``/`` too.
        excluder: where the user writes such patterns, for messages; empty where nobody can.
    """

    setid: bool = False
    nodes: bool = False
    exclude: tuple[str, ...] = ()
    excluder: str = ""

    @property
    def remove(self) -> str:
        """What to do about an entry that cannot be kept."""
        return f"remove it, or leave it out with {self.excluder}" if self.excluder else "remove it"


TIER_POLICY = ScanPolicy()
BASE_POLICY = ScanPolicy(setid=True, nodes=True)


@dataclass(frozen=True, slots=True)
class Tree:
    """A scanned tree.

    Attributes:
        root: the folder.
        entries: the root first, then everything below it, sorted by path, component by component.
        warnings: what was left out or noticed.
        started_ns: clock before the first entry was read; a file that changed later than shortly before this may
            change again without its times telling.
    """

    root: Path
    entries: tuple[SourceEntry, ...]
    warnings: tuple[Finding, ...] = ()
    started_ns: int = 0


def scan_tree(
    root: Path, *, emit: Emit = silent, limits: Limits = DEFAULT_LIMITS, policy: ScanPolicy = TIER_POLICY
) -> Tree:
    """Scan the tree below ``root``. Reads no file content.

    Raises:
        SpecError: ``scan.root`` (no such folder), ``layers.whiteout`` (a name that begins with ``.wh.``, which a layer
            cannot hold), ``scan.changed`` (an entry vanished meanwhile).
        PolicyError: ``entry.special`` (fifo), ``entry.device``, ``entry.setuid``, ``limit.name``, ``limit.depth``,
            ``limit.entries``, ``limit.entry``.
        TransportError: ``io.error``.
    """
    started = time.time_ns()
    task = f"scan {show(str(root))}"
    emit(Event("start", task, unit="items"))
    scan = _Scan(root, limits, policy)
    entries = scan.run()
    for finding in scan.findings():
        emit(Event("warning", task, message=finding.message.removeprefix(f"{show(str(root))}: ")))
    emit(Event("done", task, amount=len(entries), unit="items"))
    return Tree(root, tuple(entries), scan.findings(), started)


class _Scan:
    """One walk over a tree."""

    def __init__(self, root: Path, limits: Limits, policy: ScanPolicy) -> None:
        self.root = root
        self.limits = limits
        self.policy = policy
        self.entries: list[SourceEntry] = []
        self.noticed: dict[str, list[bytes]] = {}
        self.no_xattrs: set[int] = set()
        self.dropped: set[bytes] = set()
        self.linked: dict[tuple[int, int], tuple[tuple[bytes, bytes], ...]] = {}
        self.numbers: dict[int, int] = {}
        self.prefix = os.fsencode(root) + b"/"

    def run(self) -> list[SourceEntry]:
        try:
            descriptor = os.open(self.root, _OPEN_DIR & ~os.O_NOFOLLOW)
        except OSError as error:
            raise _no_root(self.root, error) from None
        try:
            top = self._entry(b"", os.fstat(descriptor))
            self.entries.append(top)
            self._directory(descriptor, b"", 1, top.dev)
        finally:
            os.close(descriptor)
        return self.entries

    def _directory(self, descriptor: int, above: bytes, depth: int, device: int) -> None:
        path = above
        try:
            with os.scandir(descriptor) as found:
                children = sorted([(os.fsencode(child.name), child) for child in found])
            for name, child in children:
                path = above + name
                if self.policy.exclude and self._excluded(path):
                    continue
                status = child.stat(follow_symlinks=False)
                if stat.S_ISSOCK(status.st_mode):
                    self._notice("scan.socket", path)
                    continue
                entry = self._entry(path, status, descriptor)
                if entry.kind is Kind.DIR:
                    self._check_name(path, name)
                    self.entries.append(entry)
                    self._descend(descriptor, entry, depth, device)
                elif self._admit(entry, name):
                    self.entries.append(entry)
        except OSError as error:
            raise input_failure(error, self.prefix + path) from None
        if len(self.entries) > self.limits.entries:
            raise PolicyError(
                "limit.entries", f"{show(str(self.root))} has over {self.limits.entries} entries; raise limits.entries",
                where=str(self.root), expected=f"<= {self.limits.entries}",
            )  # fmt: skip

    def _descend(self, parent: int, entry: SourceEntry, depth: int, device: int) -> None:
        if depth >= self.limits.depth:
            self._refuse("limit.depth", entry.path, f"more than {self.limits.depth} directories deep")
        if entry.dev != device:
            self._notice("scan.mount", entry.path)
        name = entry.path.rpartition(b"/")[2]
        descriptor = os.open(name, _OPEN_DIR, dir_fd=parent)
        try:
            now = os.fstat(descriptor)
            if (now.st_dev, now.st_ino) != entry.inode:
                raise changed(self.prefix + entry.path, "was replaced")
            self._directory(descriptor, entry.path + b"/", depth + 1, entry.dev)
        finally:
            os.close(descriptor)

    def _entry(self, path: bytes, found: os.stat_result, parent: int = -1) -> SourceEntry:
        full, dev = found.st_mode, found.st_dev
        kind, mode = _KINDS[full & 0o170000], full & 0o7777
        share = self.numbers.setdefault
        mode = share(mode, mode)
        entry = SourceEntry(
            path, kind, mode, found.st_uid, found.st_gid, 0,
            found.st_mtime_ns, found.st_ctime_ns, share(dev, dev), found.st_ino, found.st_nlink,
        )  # fmt: skip
        if kind is Kind.FILE:
            entry.size = found.st_size
            entry.xattrs = self._xattrs(entry)
        elif kind is Kind.DIR:
            entry.xattrs = self._xattrs(entry)
            if mode & _SETID and not self.policy.setid:
                # Inherited from the folder that the tree was made in, as with a shared group folder.
                entry.mode = mode & ~_SETID
                self._notice("scan.setgid", path)
        elif kind is Kind.SYMLINK:
            entry.link = os.readlink(path.rpartition(b"/")[2], dir_fd=parent)
        return entry

    def _admit(self, entry: SourceEntry, name: bytes) -> bool:
        """Whether a non-directory belongs into the tree."""
        self._check_name(entry.path, name)
        if entry.kind is Kind.FILE:
            if entry.mode & _SETID and not self.policy.setid:
                self._refuse("entry.setuid", entry.path, "set-user-ID or set-group-ID; clear it with chmod ug-s")
            if entry.size > self.limits.entry_size:
                self._refuse("limit.entry", entry.path, f"{entry.size} bytes, the limit is {self.limits.entry_size}")
        elif entry.kind is Kind.FIFO:
            self._refuse("entry.special", entry.path, f"a fifo cannot be shipped; {self.policy.remove}")
        elif entry.kind is Kind.SYMLINK:
            if leads_deep(entry.link, self.limits):
                self._refuse("limit.depth", entry.path, f"a link to more than {self.limits.depth} components")
        else:
            if not (self.policy.nodes and entry.kind is Kind.CHAR and self._standard_node(entry.path)):
                self._refuse("entry.device", entry.path, f"a device node cannot be shipped; {self.policy.remove}")
            self._notice("scan.node", entry.path)
            return False
        return True

    def _check_name(self, path: bytes, name: bytes) -> None:
        if name.startswith(b".wh."):
            raise SpecError(
                "layers.whiteout",
                f"{show(self.prefix + path)}: in a layer, a name that begins with .wh. means a deletion "
                f"(OCI image spec, layer.md); rename it or {self.policy.remove}",
                where=show(path),
            )
        if len(path) > self.limits.name or len(name) > self.limits.component:
            self._refuse("limit.name", path[:80], f"a name of {len(path)} bytes, the limit is {self.limits.name}")

    def _refuse(self, code: str, path: bytes, reason: str) -> None:
        raise PolicyError(code, f"{show(self.prefix + path)}: {reason}", where=show(path))

    def _standard_node(self, path: bytes) -> bool:
        folder, _, name = path.rpartition(b"/")
        return folder == b"dev" and name in _STANDARD_NODES

    def _excluded(self, path: bytes) -> bool:
        text = os.fsdecode(path)
        return any(fnmatch.fnmatchcase(text, pattern) for pattern in self.policy.exclude)

    def _xattrs(self, entry: SourceEntry) -> tuple[tuple[bytes, bytes], ...]:
        if entry.dev in self.no_xattrs:
            return ()
        if entry.nlink > 1 and entry.kind is Kind.FILE:
            known = self.linked.get(entry.inode)
            if known is None:
                known = self.linked[entry.inode] = self._read_xattrs(entry)
            return known
        return self._read_xattrs(entry)

    def _read_xattrs(self, entry: SourceEntry) -> tuple[tuple[bytes, bytes], ...]:
        place = self.prefix + entry.path
        try:
            names = os.listxattr(place, follow_symlinks=False)
            if not names:
                return ()
            found = [os.fsencode(name) for name in names]
            kept = sorted(name for name in found if kept_xattr(name))
            if len(kept) < len(found):
                self._notice("scan.xattr", entry.path)
                self.dropped.update(name for name in found if not kept_xattr(name))
            return tuple((name, os.getxattr(place, name, follow_symlinks=False)) for name in kept)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOSYS):
                raise input_failure(error, place) from None
            self.no_xattrs.add(entry.dev)
            return ()

    def _notice(self, code: str, path: bytes) -> None:
        self.noticed.setdefault(code, []).append(path)

    def findings(self) -> tuple[Finding, ...]:
        """One finding a kind, with the first names."""
        names = _some(sorted(self.dropped))
        count = len(self.noticed.get("scan.xattr", ()))
        entries = "1 entry" if count == 1 else f"{count} entries"
        notes = _NOTES | {"scan.xattr": f"extended attributes of {entries} are not kept ({names})"}
        return tuple(_finding(code, notes[code], self.root, paths) for code, paths in sorted(self.noticed.items()))


_NOTES = {
    "scan.socket": "sockets left out",
    "scan.node": "device nodes left out (a runtime makes its own)",
    "scan.setgid": "set-group-ID bits of directories cleared",
    "scan.mount": "other file systems are mounted inside; their content is included",
}


def _finding(code: str, note: str, root: Path, paths: list[bytes]) -> Finding:
    named = _some(paths)
    message = f"{show(str(root))}: {note}: {named}"
    return Finding(code, "warning", str(root), actual=named, message=message, exit_status=0)


def _some(names: list[bytes]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(show(name or b".") for name in names[:_NAMED]) + more


def _no_root(root: Path, error: OSError) -> OciBuilderError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
        return SpecError("scan.root", f"no such folder: {show(str(root))} ({error.strerror})", where=str(root))
    return input_failure(error, os.fsencode(root))


def changed(place: bytes, how: str) -> SpecError:
    """The error for a file that is not what the scan saw."""
    return SpecError(
        "scan.changed", f"{show(place)} {how} while it was being read; build again when nothing writes to it",
        where=show(place),
    )  # fmt: skip


def input_failure(error: OSError, place: bytes) -> OciBuilderError:
    """Our error for an ``OSError`` met while reading a source tree."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE):
        return changed(place, "vanished or was replaced")
    if error.errno == errno.ENAMETOOLONG:
        return PolicyError(
            "limit.name", f"{show(place[:80])}…: a path of {len(place)} bytes is longer than this system reads",
            where=show(place[:80]), actual=len(place),
        )  # fmt: skip
    return TransportError("io.error", f"cannot read {show(place)}: {error.strerror}", where=show(place))
