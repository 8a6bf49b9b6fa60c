"""Where a layer and the base want the same path: what no layer can hold without loss is refused before it is written.

A later layer's file hides a folder with all below it, its folder takes a file's place, and two folders are mixed
(image-spec layer.md): nothing of that is an error to any client.
"""

from __future__ import annotations

from oci_builder.model.errors import SpecError, show
from oci_builder.rootfs.layers_plan import BaseTree, LayerPlan, PlannedEntry
from oci_builder.wire.tar import Kind


def check_against_base(plan: LayerPlan, base: BaseTree) -> None:
    """Refuse a plan, its links followed, that would turn a file of the base into a folder, or the reverse.

    Raises:
        SpecError: ``layers.base``.
    """
    if not base.files:
        return
    for item in plan.items:
        name = item.name
        if item.source.kind is Kind.DIR:
            if base.has_file(name):
                _refuse(name, f"layer {plan.name} needs a folder {_path(name)}, the base has a file there")
        elif base.has_folder(name):
            _refuse(name, f"layer {plan.name} has {_path(name)}, which is a folder in the base")


def check_room(path: bytes, base: BaseTree) -> None:
    """Refuse a base that holds something where a whole tree of ours goes: the image would have both, mixed.

    An empty folder is no obstacle.

    Args:
        path: where the tree goes, the base's links followed.

    Raises:
        SpecError: ``layers.base``.
    """
    stands = base.below(path) if base.has_folder(path) else None
    if stands is not None:
        _refuse(path, f"the base already has {_path(stands)}: {_path(path)} of the image would be a mixture of both")


def is_tree_root(item: PlannedEntry) -> bool:
    """Whether an entry is the top of a tree that was scanned, other than the image's own."""
    return bool(item.origin.root and not item.source.path and item.name)


def _path(name: bytes) -> str:
    return show(b"/" + name)


def _refuse(name: bytes, reason: str) -> None:
    raise SpecError("layers.base", f"{reason}; choose another prefix or another base", where=show(name))
