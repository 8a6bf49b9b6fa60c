"""Plans for layers other than the tiers': copied trees, small files made on the spot, and moved paths."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from oci_builder.model.errors import SpecError, show
from oci_builder.rootfs.layers_collide import check_against_base, check_room, is_tree_root
from oci_builder.rootfs.layers_plan import (
    NO_BASE,
    PLAIN,
    BaseTree,
    LayerPlan,
    Normal,
    Origin,
    PlannedEntry,
    leading_folders,
    order,
)
from oci_builder.rootfs.scan import SourceEntry, Tree
from oci_builder.wire.tar import Kind

_MAX_FOLLOWS = 40


@dataclass(frozen=True, slots=True)
class InlineFile:
    """A small file, or a symbolic link, that stands in no tree.

    Attributes:
        data: content; ignored for a link.
        link: target when it is a symbolic link.
    """

    data: bytes = b""
    mode: int = 0o644
    link: bytes = b""


def place_tree(tree: Tree, prefix: bytes, normal: Normal = PLAIN) -> Iterator[PlannedEntry]:
    """Everything below a tree's root, under ``prefix`` in the image; hard links of the tree stay hard links."""
    origin = Origin.of_scan(os.fsencode(tree.root), prefix, normal, tree.started_ns)
    first: dict[tuple[int, int], PlannedEntry] = {}
    for entry in tree.entries:
        item = PlannedEntry(origin, entry)
        if entry.kind is Kind.FILE and entry.nlink > 1:
            carrier = first.setdefault(entry.inode, item)
            item.target = carrier if carrier is not item else None
        if item.name:
            yield item


def place_files(
    files: Mapping[bytes, InlineFile], prefix: bytes = b"", normal: Normal = PLAIN
) -> Iterator[PlannedEntry]:
    """Files given by content: clean path -> file, under ``prefix``. They carry the epoch as their time."""
    origin = Origin(b"", prefix, normal)
    for path, file in files.items():
        if file.link:
            yield PlannedEntry(origin, replace(_inline(path, Kind.SYMLINK, 0o777), link=file.link))
        else:
            source = replace(_inline(path, Kind.FILE, file.mode), size=len(file.data))
            yield PlannedEntry(origin, source, data=file.data)


def _inline(path: bytes, kind: Kind, mode: int) -> SourceEntry:
    return SourceEntry(path, kind, mode, 0, 0, 0, 1 << 62, 0, 0, 0, 1)


def assemble(
    name: str,
    items: Iterable[PlannedEntry],
    *,
    normal: Normal = PLAIN,
    base: BaseTree = NO_BASE,
    tiers: tuple[str, ...] = (),
) -> LayerPlan:
    """A layer plan from placed entries: sorted, with every folder that leads to one of them (B100).

    A folder that several sources bring is taken from the first; one that the base has keeps the base's metadata.

    Raises:
        SpecError: ``layers.overlap`` when two entries other than folders want the same path, or one stands where
            another needs a folder; ``layers.base`` when the base holds something where a scanned tree goes.
    """
    placed: dict[bytes, PlannedEntry] = {}
    for item in items:
        path = item.name
        if is_tree_root(item):
            check_room(follow(path, base), base)
        known = placed.setdefault(path, item)
        if known is not item and not (known.source.kind is Kind.DIR and item.source.kind is Kind.DIR):
            raise SpecError("layers.overlap", f"layer {name}: {show(path)} is given twice", where=show(path))
    for path in list(placed):
        for folder in leading_folders(path, normal, base):
            stands = placed.setdefault(folder.name, folder)
            if stands.source.kind is not Kind.DIR:
                above = show(folder.name)
                raise SpecError(
                    "layers.overlap", f"layer {name}: {show(path)} needs a folder {above}, a file is there", where=above
                )
    _keep_base_folders(placed, normal, base)
    ordered = sorted(placed.items(), key=lambda pair: order(pair[0]))
    return LayerPlan(name, tiers, carriers_first([item for _, item in ordered]))


def _keep_base_folders(placed: dict[bytes, PlannedEntry], normal: Normal, base: BaseTree) -> None:
    kept = Origin(b"", b"", Normal(normal.epoch, None, None))
    for path, item in placed.items():
        known = base.folders.get(path)
        if known is not None and item.source.kind is Kind.DIR:
            placed[path] = PlannedEntry(kept, known)


def carriers_first(items: list[PlannedEntry]) -> tuple[PlannedEntry, ...]:
    """Let the first name of each hard-link group carry the content, whichever did before the order changed.

    A link whose carrier is not among the items becomes a full file itself (B099).
    """
    now: dict[int, PlannedEntry] = {}
    out = []
    for item in items:
        if item.source.kind is not Kind.FILE:
            out.append(item)
            continue
        # Entries are replaced when they move; what they were scanned from stays.
        group = id(item.source if item.target is None else item.target.source)
        carrier = now.get(group)
        if carrier is None and item.target is None:
            now[group] = item
        elif carrier is None:
            item = now[group] = replace(item, target=None)
        elif item.target is not carrier:
            item = replace(item, target=carrier)
        out.append(item)
    return tuple(out)


def rewrite_parents(plan: LayerPlan, base: BaseTree, normal: Normal = PLAIN) -> LayerPlan:
    """Move entries whose folders are symbolic links in the base to where those point (merged /usr: B104, B105).

    A folder entry would otherwise replace the base's link and hide everything behind it. Returns the plan itself when
    nothing has to move.

    Raises:
        SpecError: ``layers.symlink`` (a loop), ``layers.overlap``, ``layers.base`` (a file of the base would become a
            folder, or the reverse).
    """
    moved = {
        name: target
        for item in plan.items
        if item.source.kind is Kind.DIR and (name := item.name) and (target := follow(name, base)) != name
    }
    if moved:
        items = [item for item in (_moved(item, moved) for item in plan.items) if item.name]
        plan = assemble(plan.name, items, normal=normal, base=base, tiers=plan.tiers)
    check_against_base(plan, base)
    return plan


def _moved(item: PlannedEntry, moved: Mapping[bytes, bytes]) -> PlannedEntry:
    name = item.name
    if name in moved:
        return replace(item, renamed=moved[name])
    folder, _, last = name.rpartition(b"/")
    if folder not in moved:
        return item
    target = moved[folder]
    # Links keep pointing at the item they pointed at; carriers_first maps both to their new selves.
    return replace(item, renamed=target + b"/" + last if target else last)


def follow(path: bytes, base: BaseTree) -> bytes:
    """Where a path of the image really lies once the base's symbolic links are followed, its own name included.

    Raises:
        SpecError: ``layers.symlink`` after 40 links.
    """
    done: list[bytes] = []
    todo = path.split(b"/")[::-1]
    follows = 0
    while todo:
        part = todo.pop()
        if part in (b"", b"."):
            continue
        if part == b"..":
            del done[-1:]
            continue
        target = base.symlinks.get(b"/".join([*done, part]))
        if target is None:
            done.append(part)
            continue
        follows += 1
        if follows > _MAX_FOLLOWS:
            raise SpecError(
                "layers.symlink", f"{show(path)}: the base's symbolic links go in circles", where=show(path)
            )
        if target.startswith(b"/"):
            done.clear()
        todo += target.split(b"/")[::-1]
    return b"/".join(done)
