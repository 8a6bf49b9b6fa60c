"""Decide which layer holds what. Pure: scanned trees and digests in, planned layers out, nothing read or written.

Files are grouped by the set of tiers that hold identical content and metadata. What several tiers share goes once into
a shared layer, as one hard-link group with all its paths; the rest goes into its tier's own layer. Hard links never
leave their layer (Docker and overlayfs do not support it), and layers are disjoint, so their order does not matter.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oci_builder.rootfs.layers_assemble import follow
from oci_builder.rootfs.layers_collide import check_room
from oci_builder.rootfs.layers_plan import (
    NO_BASE,
    PLAIN,
    BaseTree,
    LayerPlan,
    Normal,
    Origin,
    PlannedEntry,
    is_below,
    leading_folders,
)
from oci_builder.rootfs.scan import SourceEntry, Tree
from oci_builder.rootfs.scan_content import LINK_FLOOR, Contents
from oci_builder.wire.tar import Kind

# ext4 allows 65,000 links to one file; a group ends long before, and its content is simply stored again.
MAX_LINKS = 1024


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How tiers become layers.

    Attributes:
        prefix: absolute path in the image; a tier lands in ``<prefix>/envs/<tier>``.
        normal: owner and times.
        never_share: ``fnmatch`` patterns of paths inside a tier (``*`` matches ``/`` too) whose files are patched at
            run time: stored for each path separately, never a hard link of anything.
        base: its folders keep their metadata where our layers repeat them.
    """

    prefix: str
    normal: Normal = PLAIN
    never_share: tuple[str, ...] = ()
    base: BaseTree = NO_BASE


def plan_layers(
    tiers: Mapping[str, Tree], options: PlanOptions, contents: Contents | None = None
) -> tuple[LayerPlan, ...]:
    """The layers for these tiers, most shared first, then by name; independent of the mapping's order.

    Args:
        contents: digests by inode from ``content_digests``; files without one equal only their own inode.

    Raises:
        SpecError: ``layers.base`` (the base holds something where a tier goes), ``layers.symlink``.
    """
    names = sorted(tiers)
    planner = _Planner(options, names, contents or {})
    for index, name in enumerate(names):
        planner.note_holders(index, tiers[name])
    for index, name in enumerate(names):
        planner.place_tier(index, tiers[name])
    return planner.layers()


@dataclass(slots=True)
class _Draft:
    """A layer being planned."""

    mask: int
    items: list[PlannedEntry] = field(default_factory=list)
    # How many of the folders that lead to the current entry it has already.
    depth: int = 0


class _Planner:
    def __init__(self, options: PlanOptions, names: Sequence[str], contents: Contents) -> None:
        self.options = options
        self.names = names
        self.contents = contents
        self.holders: dict[tuple[object, ...], int] = {}
        self.carriers: dict[tuple[object, ...], tuple[PlannedEntry, int]] = {}
        self.drafts: dict[int, _Draft] = {}
        self.top = options.prefix.encode().strip(b"/")

    def note_holders(self, index: int, tree: Tree) -> None:
        """First pass: which tiers hold each content with equal metadata."""
        bit = 1 << index
        holders = self.holders
        for entry in tree.entries:
            if entry.kind is Kind.FILE and entry.size:
                key = self._content_key(entry)
                holders[key] = holders.get(key, 0) | bit

    def place_tier(self, index: int, tree: Tree) -> None:
        """Second pass, in the order that layers have: every entry goes to its layer, after its folders."""
        prefix = b"/".join(part for part in (self.top, b"envs", self.names[index].encode()) if part)
        check_room(follow(prefix, self.options.base), self.options.base)
        origin = Origin.of_scan(os.fsencode(tree.root), prefix, self.options.normal, tree.started_ns)
        chain = leading_folders(prefix, self.options.normal, self.options.base)
        for draft in self.drafts.values():
            draft.depth = len(chain)
        above = len(chain)
        pending: PlannedEntry | None = None
        for entry in tree.entries:
            item = PlannedEntry(origin, entry)
            if pending is not None and not is_below(entry.path, pending.source.path):
                self._put(1 << index, chain, None)
            pending = None
            depth = above + (entry.path.count(b"/") + 1 if entry.path else 0)
            if depth < len(chain):
                del chain[depth:]
                for draft in self.drafts.values():
                    draft.depth = min(draft.depth, depth)
            if entry.kind is Kind.DIR:
                chain.append(item)
                pending = item
            else:
                self._put(self._mask(index, item), chain, item)
        if pending is not None:
            self._put(1 << index, chain, None)

    def _put(self, mask: int, chain: list[PlannedEntry], item: PlannedEntry | None) -> None:
        """Append the folders that the layer lacks, then the entry."""
        draft = self.drafts.get(mask)
        if draft is None:
            draft = self.drafts[mask] = _Draft(mask)
        if draft.depth < len(chain):
            draft.items += chain[draft.depth :]
            draft.depth = len(chain)
        if item is not None:
            draft.items.append(item)

    def _mask(self, index: int, item: PlannedEntry) -> int:
        """The layer of a non-folder, as a set of tiers; turns it into a hard link when its content is there already."""
        own = 1 << index
        entry = item.source
        if entry.kind is not Kind.FILE or self._never_shared(entry.path):
            return own
        key = self._content_key(entry)
        mask = self.holders.get(key, own) if entry.size else own
        if mask == own and entry.size < LINK_FLOOR:
            if entry.nlink == 1:
                return own
            key = (index, *entry.inode)
        known = self.carriers.get(key)
        if known is None or known[1] >= MAX_LINKS:
            self.carriers[key] = (item, 1)
        else:
            item.target = known[0]
            self.carriers[key] = (known[0], known[1] + 1)
        return mask

    def _content_key(self, entry: SourceEntry) -> tuple[object, ...]:
        seconds = self.options.normal.seconds(entry.mtime_ns)
        return (self.contents.get(entry.inode, entry.inode), entry.mode, seconds, entry.xattrs)

    def _never_shared(self, path: bytes) -> bool:
        if not self.options.never_share:
            return False
        text = os.fsdecode(path)
        return any(fnmatch.fnmatchcase(text, pattern) for pattern in self.options.never_share)

    def layers(self) -> tuple[LayerPlan, ...]:
        """The finished plans."""
        plans = []
        for draft in self.drafts.values():
            tiers = tuple(name for index, name in enumerate(self.names) if draft.mask >> index & 1)
            plans.append(LayerPlan("+".join(tiers), tiers, tuple(draft.items)))
        return tuple(sorted(plans, key=lambda plan: (-len(plan.tiers), plan.tiers)))
