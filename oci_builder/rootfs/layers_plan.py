"""What a layer will hold, decided before a byte of it is written.

A planned entry keeps a reference to what the scan saw and derives its tar entry on demand: a plan of 190,000 entries
stays well under the memory limit.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from oci_builder.model.errors import PolicyError, SpecError, show
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.scan import SourceEntry
from oci_builder.rootfs.scan_fingerprint import SETTLE_NS
from oci_builder.wire.tar import NO_XATTRS, Kind, TarEntry

_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Normal:
    """How metadata is normalised, so that builds repeat.

    Attributes:
        epoch: newest time in a layer, seconds since 1970; older times are kept, to the second.
        uid, gid: owner of everything; ``None`` keeps what the tree has (a base).
    """

    epoch: int = 0
    uid: int | None = 0
    gid: int | None = 0

    def seconds(self, mtime_ns: int) -> int:
        """A time as the layer will hold it. Negative ones become 0: readers disagree about those."""
        value = mtime_ns // _SECOND
        # Asked a million times for a large plan: no call of min and max.
        return self.epoch if value > self.epoch else value if value > 0 else 0


PLAIN = Normal()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a group of planned entries comes from, and where it goes.

    Attributes:
        root: folder on disk (bytes), empty for inline entries.
        prefix: clean path in the image under which the tree lands, ``b""`` for the image's root.
        settled_ns: files with a ctime from then on were too fresh when scanned for their times to vouch for them.
    """

    root: bytes
    prefix: bytes
    normal: Normal
    settled_ns: int = 0

    @classmethod
    def of_scan(cls, root: bytes, prefix: bytes, normal: Normal, started_ns: int) -> Origin:
        """The origin for a tree scanned at ``started_ns``."""
        return cls(root, prefix, normal, started_ns - SETTLE_NS)


@dataclass(slots=True)
class PlannedEntry:
    """One entry of a layer. Not to be changed after planning.

    Attributes:
        origin, source: what it is made from; ``source.path`` is relative to both of ``origin``'s folders.
        target: for a hard link, the entry in the same layer that carries the content.
        data: content of an inline file.
        renamed: its name in the image where that is not ``origin.prefix`` and ``source.path``.
    """

    origin: Origin
    source: SourceEntry
    target: PlannedEntry | None = None
    data: bytes | None = None
    renamed: bytes | None = None

    @property
    def name(self) -> bytes:
        """Clean path in the image; ``b""`` is the image's root."""
        if self.renamed is not None:
            return self.renamed
        prefix, path = self.origin.prefix, self.source.path
        return prefix + b"/" + path if prefix and path else prefix or path

    @property
    def place(self) -> bytes:
        """Path on disk; meaningless for inline entries."""
        path = self.source.path
        return self.origin.root + b"/" + path if path else self.origin.root

    @property
    def carries(self) -> int:
        """Bytes of content that follow its header."""
        return self.source.size if self.source.kind is Kind.FILE and self.target is None else 0

    @property
    def identity(self) -> bytes | None:
        """Names its content without reading it; ``None`` when it is too fresh for that."""
        if self.data is not None:
            return b"="
        source = self.source
        if source.ctime_ns >= self.origin.settled_ns:
            return None
        return b"%d %d %d %d %d" % source.identity

    @property
    def entry(self) -> TarEntry:
        """Its tar entry, normalised."""
        source, normal, target = self.source, self.origin.normal, self.target
        kind = source.kind if target is None else Kind.HARDLINK
        # By position: a plan of 300,000 entries makes twice as many of these.
        return TarEntry(
            self.name, kind, source.size if kind is Kind.FILE else 0, source.mode,
            source.uid if normal.uid is None else normal.uid,
            source.gid if normal.gid is None else normal.gid,
            normal.seconds(source.mtime_ns) * _SECOND, source.link if target is None else target.name,
            0, 0, dict(source.xattrs) if source.xattrs else NO_XATTRS,
        )  # fmt: skip

    @property
    def facts(self) -> bytes:
        """All that its header is made of, other bytes for each value: names it at a fifth of what the header costs."""
        source, normal, target = self.source, self.origin.normal, self.target
        # Bytes and numbers only: how a string is written depends on whether it was interned.
        return marshal.dumps(
            (
                self.name, None if target is None else target.name, source.kind.value.encode(), source.mode,
                source.uid if normal.uid is None else normal.uid,
                source.gid if normal.gid is None else normal.gid,
                self.carries, normal.seconds(source.mtime_ns), source.link, source.xattrs,
            ),
            2,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer, planned.

    Attributes:
        name: short name, such as ``base+vllm``.
        tiers: the tiers whose content it holds, sorted; empty for a layer that belongs to all.
        items: every entry once, parents first, sorted by name component by component; hard links point at entries of
            the same layer that come earlier.
    """

    name: str
    tiers: tuple[str, ...]
    items: tuple[PlannedEntry, ...]

    @property
    def content_size(self) -> int:
        """Bytes of file content."""
        return sum(item.carries for item in self.items)


@dataclass(frozen=True, slots=True)
class BaseTree:
    """What planning needs to know of the base's file tree.

    Attributes:
        folders: clean path -> the folder as the base has it.
        symlinks: clean path -> target.
        files: every folder, also one that only a path below it tells of -> the names in it that are neither folders
            nor symbolic links, sorted.
    """

    folders: Mapping[bytes, SourceEntry] = field(default_factory=dict)
    symlinks: Mapping[bytes, bytes] = field(default_factory=dict)
    files: Mapping[bytes, tuple[bytes, ...]] = field(default_factory=dict)

    def has_file(self, path: bytes) -> bool:
        """Whether something stands at a path that is neither a folder nor a symbolic link."""
        folder, _, name = path.rpartition(b"/")
        return name in self.files.get(folder, ())

    def has_folder(self, path: bytes) -> bool:
        """Whether a folder stands at a path."""
        return path in self.folders or path in self.files

    def below(self, folder: bytes) -> bytes | None:
        """The first path below a folder, ``None`` when there is none."""
        within = [folder + b"/" + names[0] for folder, names in self.files.items() if names]
        paths = chain(self.folders, self.symlinks, self.files, within)
        return min((path for path in paths if is_below(path, folder)), default=None)


NO_BASE = BaseTree()


def order(name: bytes) -> bytes:
    """Sort key that orders paths component by component, so that a folder is followed by what is below it."""
    return name.replace(b"/", b"\0")


def folder_entry(path: bytes, mode: int = 0o755) -> SourceEntry:
    """A folder that no scan saw. Its time is the epoch: the newest that a layer can hold."""
    return SourceEntry(path, Kind.DIR, mode, 0, 0, 0, 1 << 62, 0, 0, 0, 2)


def parents(name: bytes) -> list[bytes]:
    """The folders above a path, outermost first, without the root.

    >>> parents(b"a/b/c")
    [b'a', b'a/b']
    """
    parts = name.split(b"/")
    return [b"/".join(parts[:count]) for count in range(1, len(parts))]


def is_below(path: bytes, folder: bytes) -> bool:
    """Whether a path lies below a folder (and is not the folder itself)."""
    return path.startswith(folder + b"/") if folder else path != b""


def leading_folders(name: bytes, normal: Normal, base: BaseTree = NO_BASE) -> list[PlannedEntry]:
    """Entries for the folders above a path: as the base has them, else 0755 with the newest time allowed.

    That keeps, say, the base's ``/tmp`` at 1777 when something is put below it (B120).
    """
    made = Origin(b"", b"", normal)
    kept = Origin(b"", b"", Normal(normal.epoch, None, None))
    out = []
    for path in parents(name):
        known = base.folders.get(path)
        out.append(PlannedEntry(made, folder_entry(path)) if known is None else PlannedEntry(kept, known))
    return out


def check_disjoint(plans: Iterable[LayerPlan], limits: Limits = DEFAULT_LIMITS) -> None:
    """Layers may share folders and nothing else, and hold no name that a reader would refuse.

    Raises:
        SpecError: ``layers.overlap`` naming the path and both layers.
        PolicyError: ``limit.name``, ``limit.depth``: with the prefix before it, a path has become too long.
    """
    owner: dict[bytes, str] = {}
    folders: set[bytes] = set()
    for plan in plans:
        for item in plan.items:
            name = item.name
            if len(name) > limits.name or name.count(b"/") >= limits.depth:
                raise _too_long(name, limits)
            is_folder = item.source.kind is Kind.DIR
            other = owner.setdefault(name, plan.name)
            if other == plan.name and (is_folder or name not in folders):
                pass
            elif not (is_folder and name in folders):
                raise SpecError(
                    "layers.overlap", f"{show(name)} is in layer {other} and in layer {plan.name}", where=show(name)
                )
            if is_folder:
                folders.add(name)


def _too_long(name: bytes, limits: Limits) -> PolicyError:
    code, have, most = "limit.name", f"{len(name)} bytes", limits.name
    if len(name) <= most:
        code, have, most = "limit.depth", f"{name.count(b'/') + 1} components", limits.depth
    return PolicyError(
        code, f"{show(name[:80])}…: a path of {have} in the image, the limit is {most}; take a shorter prefix",
        where=show(name[:80]), expected=f"<= {most}", actual=have,
    )  # fmt: skip
