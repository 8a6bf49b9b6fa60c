"""Where a build may write: not into what it reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from oci_builder.model.errors import SpecError, show
from oci_builder.model.spec import OciBase, PathTier, RootfsBase, Spec


def check_places(spec: Spec, folder: Path, out: Path, cache: Path) -> None:
    """Refuse an output or cache folder inside a tree that becomes part of the image: each build would hold the last.

    What stands there already and is no folder is refused too.

    Args:
        folder: relative paths of the spec are relative to it.
        out, cache: need not exist.

    Raises:
        SpecError: ``spec.path``.
    """
    for option, place in (("--out", out), ("--cache", cache)):
        if os.path.lexists(place) and not place.is_dir():
            raise SpecError("spec.path", f"{option} {show(str(place))} is not a folder", where=option)
        for where, tree, exclude in _trees(spec, folder):
            inside = _below(place, tree)
            if inside is not None and not _excluded(inside, exclude):
                raise SpecError(
                    "spec.path",
                    f"{option} {show(str(place))} lies in {where} ({show(str(tree))}), which becomes part of the image;"
                    " choose a folder beside it",
                    where=where, actual=str(place),
                )  # fmt: skip


def check_products(out: Path, names: Iterable[str]) -> None:
    """Refuse an output folder where a folder has the name of a file that the build writes.

    Raises:
        SpecError: ``spec.path``.
    """
    for name in names:
        if (out / name).is_dir() and not (out / name).is_symlink():
            raise SpecError("spec.path", f"{show(str(out / name))} is a folder; a file goes there", where="--out")


def _trees(spec: Spec, folder: Path) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    for name, tier in spec.tiers.items():
        if isinstance(tier, PathTier):
            yield f"tiers.{name}.path", folder / tier.path, ()
    match spec.base:
        case RootfsBase() as base:
            yield "base.rootfs", folder / base.rootfs, base.exclude
        case OciBase() as base:
            yield "base.oci", folder / base.oci, ()
    if spec.files is not None:
        yield "files", folder / spec.files, ()


def _below(place: Path, tree: Path) -> Path | None:
    """The path below ``tree``, symbolic links followed; None when it is elsewhere."""
    try:
        resolved, root = place.resolve(), tree.resolve()
        return resolved.relative_to(root) if root.is_dir() and resolved.is_relative_to(root) else None
    except (OSError, RuntimeError) as error:  # Python < 3.13 has RuntimeError for links in circles
        reason = error.strerror if isinstance(error, OSError) else "symbolic links go in circles"
        message = f"cannot tell if {show(str(place))} lies in {show(str(tree))}: {reason}"
        raise SpecError("spec.path", message, where=str(tree)) from None


def _excluded(inside: Path, patterns: tuple[str, ...]) -> bool:
    paths = [inside, *inside.parents]
    return any(fnmatchcase(str(path), pattern) for path in paths for pattern in patterns)
