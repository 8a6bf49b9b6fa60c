"""The tree in memory refuses what the tree on disk refuses, and has the same paths otherwise."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.apply import ApplyOptions, RootTree
from oci_builder.rootfs.tree_model import TreeModel
from oci_builder.rootfs.tree_nodes import Folder, Link
from oci_builder.wire.tar import TarReader
from tests.hostile.cases_tar import CASES
from tests.lab import tarlang as t

NAMES = [b"a", b"b", b"c", b"a/b", b"a/c", b"b/a", b"a/b/c", b"l", b"l/a", b"l/b/c", b"m/a"]
TARGETS = [b"a", b"/b", b"..", b"l", b"m", b"../a/b", b"/", b"c", b"nowhere"]


def on_disk(folder: Path, layers: list[bytes], limits: Limits) -> tuple[str, dict[bytes, object]]:
    folder.mkdir(mode=0o700)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    tree = RootTree(fd, ApplyOptions(limits=limits))
    try:
        for layer in layers:
            tree.apply(TarReader([layer], limits=limits))
        tree.finish()
    except OciBuilderError as error:
        return error.code, {}
    finally:
        tree.close()
        os.close(fd)
    seen: dict[bytes, object] = {}
    top = os.fsencode(folder)
    for above, folders, files in os.walk(top):
        for name in folders + files:
            full = os.path.join(above, name)
            link = os.readlink(full) if os.path.islink(full) else None
            seen[os.path.relpath(full, top)] = link if link is not None else os.path.isdir(full)
    return "", seen


def in_memory(layers: list[bytes], limits: Limits) -> tuple[str, dict[bytes, object]]:
    model = TreeModel(limits=limits)
    try:
        for layer in layers:
            model.apply(TarReader([layer], limits=limits))
    except OciBuilderError as error:
        return error.code, {}
    seen: dict[bytes, object] = {}
    waiting = [(b"", model.root)]
    while waiting:
        path, folder = waiting.pop()
        for name, node in folder.children.items():
            full = path + name
            seen[full] = node.target if isinstance(node, Link) else isinstance(node, Folder)
            if isinstance(node, Folder):
                waiting.append((full + b"/", node))
    return "", seen


def random_layer(rng: random.Random) -> bytes:
    """Entries over few names, so that they meet; no name stands twice."""
    parts: dict[bytes, bytes] = {}
    for name in rng.sample(NAMES, rng.randrange(1, 6)):
        above, _, base = name.rpartition(b"/")
        match rng.randrange(7):
            case 0 | 1:
                parts[name] = t.file(name, b"x")
            case 2:
                parts[name] = t.folder(name)
            case 3 | 4:
                parts[name] = t.symlink(name, rng.choice(TARGETS))
            case 5:
                parts[name] = t.hardlink(name, rng.choice(NAMES))
            case _:
                hidden = b".wh..wh..opq" if rng.random() < 0.3 else b".wh." + base
                full = above + b"/" + hidden if above else hidden
                parts[full] = t.file(full)
    return t.tar(*parts.values())


@pytest.mark.parametrize("seed", range(40))
def test_random_layers(tmp_path: Path, seed: int) -> None:
    """C5-11, C6: 1,000 images of layers that meet, on disk and in memory."""
    rng = random.Random(seed)
    limits = DEFAULT_LIMITS if seed % 2 else Limits(symlink_follows=2, depth=3)
    for number in range(25):
        layers = [random_layer(rng) for _ in range(rng.randrange(1, 4))]
        assert in_memory(layers, limits) == on_disk(tmp_path / str(number), layers, limits), layers


@pytest.mark.parametrize(
    "case", [c for c in CASES if c[0].startswith(("C4", "C5-1", "C6", "B0", "B1"))], ids=lambda c: c[0]
)
def test_hostile_trees(tmp_path: Path, case: tuple[str, str, list[bytes], object]) -> None:
    """The catalogue's trees."""
    layers = case[2]
    memory, disk = in_memory(layers, DEFAULT_LIMITS), on_disk(tmp_path / "d", layers, DEFAULT_LIMITS)
    # What the ledger of names finds needs no tree.
    if disk[0] != "entry.duplicate":
        assert memory == disk
