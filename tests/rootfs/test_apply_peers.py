"""The unpacked tree equals what umoci and GNU tar make of the same layers.

The random layers have what both must agree on: no hard link before its target (umoci 0.4.7 fails on it), no whiteout of
something that its own layer has. Times of folders are compared where the peer restores them.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.unpack import unpack_image
from tests.lab.archives import Lab, entry, tar
from tests.lab.oracle import Node, differences, tree

needs_umoci = pytest.mark.skipif(not shutil.which("umoci") or os.geteuid() != 0, reason="needs umoci and root")
FOLDERS = ["a", "b", "a/c", "a/c/d", "usr", "usr/lib"]
NAMES = ["x", "y", "z", "c", "lib"]


def layout(folder: Path, layers: list[bytes]) -> Path:
    """An OCI layout with an image ``t``."""
    lab = Lab(layers=layers)
    lab.edit_descriptor = lambda d: d | {"annotations": {"org.opencontainers.image.ref.name": "t"}}
    for name, data in lab.oci().items():
        if name != "manifest.json":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    return folder


def random_layer(rng: random.Random, below: set[str]) -> bytes:
    """Entries over a few names, so that layers get into each other's way; ``below``: what lower layers may have."""
    items = []
    folders = sorted(rng.sample(FOLDERS, rng.randrange(1, len(FOLDERS))))
    here: list[str] = []
    for name in folders:
        items.append(entry(name, type=tarfile.DIRTYPE, mode=rng.choice([0o755, 0o700, 0o1777, 0o555, 0]),
                           uid=rng.randrange(3), gid=rng.randrange(3), mtime=rng.randrange(10**9)))  # fmt: skip
    for _ in range(rng.randrange(1, 8)):
        folder = rng.choice(folders)
        name = f"{folder}/{rng.choice(NAMES)}"
        # GNU tar 1.34 makes links that lead upwards last: a file that came after one of its name is lost.
        if name in FOLDERS or any(item.name == name for item, _ in items):
            continue
        kind = rng.choice(["file", "file", "symlink", "hardlink", "whiteout"])
        common = {"uid": rng.randrange(3), "mtime": rng.randrange(10**9), "mode": rng.choice([0o644, 0o4755, 0o600])}
        if kind == "file":
            items.append(entry(name, rng.randbytes(rng.randrange(3000)), **common))
            here.append(name)
        elif kind == "symlink":
            target = rng.choice(["x", "/usr/lib", "../b", "nowhere"])
            items.append(entry(name, type=tarfile.SYMTYPE, linkname=target, **common | {"mode": 0o777}))
        elif kind == "hardlink" and here:
            target = rng.choice(here)
            fields = next(i for i, _ in items if i.name == target)
            items.append(entry(name, type=tarfile.LNKTYPE, linkname=target, uid=fields.uid, mtime=fields.mtime,
                               mode=fields.mode))  # fmt: skip
        elif kind == "whiteout" and below:
            hidden = rng.choice(sorted(below))
            if hidden in here or hidden in folders or any(f.startswith(hidden + "/") for f in folders + here):
                continue
            above, _, last = hidden.rpartition("/")
            if above in folders:
                items.append(entry(f"{above}/.wh.{last}"))
    below |= set(here) | set(folders)
    return tar(*items)


def without_clock(nodes: dict[bytes, Node]) -> dict[bytes, Node]:
    """umoci leaves the clock's time on folders that no entry describes, and on some that a later layer writes into."""
    now = time.time_ns() - 3600 * 10**9
    return {p: replace(n, mtime=0) if n.kind == "dir" and n.mtime > now else n for p, n in nodes.items()}


def same_times(ours: dict[bytes, Node], theirs: dict[bytes, Node]) -> dict[bytes, Node]:
    """Ours, without the folder times that theirs do not tell."""
    return {p: replace(n, mtime=0) if p in theirs and n.kind == "dir" and not theirs[p].mtime else n
            for p, n in ours.items()}  # fmt: skip


@needs_umoci
@pytest.mark.parametrize("seed", range(25))
def test_umoci_makes_the_same_tree(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    below: set[str] = set()
    image = layout(tmp_path / "image", [random_layer(rng, below) for _ in range(rng.randrange(1, 5))])
    unpack_image(image, tmp_path / "ours")
    subprocess.run(["umoci", "raw", "unpack", "--image", f"{image}:t", tmp_path / "theirs"], check=True,
                   capture_output=True)  # fmt: skip
    theirs = without_clock(tree(tmp_path / "theirs"))
    assert not differences(theirs, same_times(tree(tmp_path / "ours"), theirs))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for owners")
@pytest.mark.parametrize("seed", range(100, 110))
def test_gnu_tar_makes_the_same_tree_of_one_layer(tmp_path: Path, seed: int) -> None:
    layer = random_layer(random.Random(seed), set())
    unpack_image(layout(tmp_path / "image", [layer]), tmp_path / "ours")
    (tmp_path / "theirs").mkdir()
    subprocess.run(["tar", "xpf", "-", "--numeric-owner"], input=layer, cwd=tmp_path / "theirs", check=True)
    theirs = without_clock(tree(tmp_path / "theirs"))
    assert not differences(theirs, same_times(tree(tmp_path / "ours"), theirs))
