"""The bytes of one layer of an awkward tree, pinned: whoever changes them changes every digest that was ever shipped.

A change here is a new release of the format: say so in the changelog, and raise the version.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from oci_builder.model.media import LAYER_COMPRESSION
from oci_builder.rootfs.layers import WriteOptions, write_layer
from oci_builder.rootfs.layers_plan import LayerPlan, Normal
from oci_builder.rootfs.plan import PlanOptions, plan_layers
from oci_builder.rootfs.scan import scan_tree
from oci_builder.rootfs.scan_content import content_digests
from oci_builder.store.blobs import DirStore
from oci_builder.wire.compress import Codec

EPOCH = 1_700_000_000
DIFF_ID = "sha256:9af7a83eebd8572b25fbdf011d4d6d7008d1702d7b8552111649ee1378cc95d5"
# The compressed bytes are those of these libraries; another version may make others, never another diff_id.
LIBRARIES = {"gzip": {"isa-l": "2.32.1", "libdeflate (deflate)": "0.9.0"}, "zstd": {"zstd": "1.5.7"}}
BLOBS = {
    "gzip": "sha256:7a54d94ccb802564dc5833a6c87d823d6f6e162dfea14efb1035b5b074ea5e5d",
    "zstd": "sha256:7f3a3f062cec6e2d425847b2dc144eb1dff8fb8593cbf6cacccb990606aba505",
}


def pattern(size: int, seed: int) -> bytes:
    """Bytes that do not compress to nothing, the same everywhere."""
    out = bytearray()
    while len(out) < size:
        out += hashlib.sha256(b"%d %d" % (seed, len(out))).digest() + b"some text that repeats\n" * 3
    return bytes(out[:size])


def grow(root: Path) -> Path:
    """One of everything that a tier can hold."""
    files = {
        b"bin/tool": b"#!/bin/sh\nexit 0\n", b"empty": b"", b"big": pattern(2_500_000, 1), b"a/b/c/d/e": b"deep",
        b"caf\xe9": b"latin 1", "café".encode(): b"utf-8", b"new\nline": b"1", b"quote'\"\\": b"2", b" space ": b"3",
        b"l" * 101: b"101", b"m" * 255: b"255", b"/".join([b"n" * 99] * 3): b"300", b"x" * 60 + b"/" + b"y" * 60: b"121",
        b"..git": b"dots", b"...": b"more dots", b"block": pattern(512, 2), b"block-and-one": pattern(513, 3),
    }  # fmt: skip
    for name, data in files.items():
        path = root / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (root / "bin/tool").chmod(0o755)
    (root / "a/b").chmod(0o700)
    (root / "empty").chmod(0o400)
    (root / "void").mkdir(mode=0o711)
    os.link(root / "big", root / "zz-again")
    os.link(root / "big", root / ("k" * 255))
    for name, target in {
        "rel": "a/b",
        "abs": "/etc/passwd",
        "far": "z" * 300,
        "up": "../../..",
        "gone": "no/such",
    }.items():
        (root / name).symlink_to(target)
    with open(root / "holes", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"data")
    _times(root)
    return root


def _times(root: Path) -> None:
    """Old times stay, new ones are clamped to the epoch, fractions go."""
    for folder, folders, names in os.walk(os.fsencode(root), topdown=False):
        for name in [*names, *folders]:
            os.utime(os.path.join(folder, name), ns=((EPOCH + 99) * 10**9 + 5,) * 2, follow_symlinks=False)
    for name, seconds in {"empty": 0, "bin/tool": EPOCH - 5, "rel": 5}.items():
        os.utime(root / name, (seconds, seconds), follow_symlinks=False)


def plan_of(root: Path) -> LayerPlan:
    trees = {"awkward": scan_tree(root)}
    (plan,) = plan_layers(trees, PlanOptions("/opt/rt", Normal(EPOCH, 0, 0)), content_digests(list(trees.values())))
    return plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> LayerPlan:
    root = grow(tmp_path_factory.mktemp("golden") / "awkward")
    try:
        os.setxattr(root / "big", "user.kept", b"value\0with a NUL")
        os.setxattr(root / "void", "user.empty", b"")
    except OSError:
        pytest.skip("the folder for temporary files keeps no attributes")
    return plan_of(root)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_the_layer_s_bytes(plan: LayerPlan, codec: str, threads: int, tmp_path: Path) -> None:
    kind = Codec(codec)  # type: ignore[arg-type]
    with DirStore(tmp_path / "store") as store:
        layer = write_layer(plan, store, WriteOptions(kind, threads))
        blob = store.path(layer.descriptor.id).read_bytes()
    assert layer.diff_id == DIFF_ID
    assert LAYER_COMPRESSION[layer.descriptor.media_type] == codec
    if kind.describe()["libraries"] == LIBRARIES[codec]:
        assert "sha256:" + hashlib.sha256(blob).hexdigest() == BLOBS[codec]
