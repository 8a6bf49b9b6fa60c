"""Awkward trees, and a listing that two equal trees share."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import time
from pathlib import Path

from oci_builder.rootfs.layers_plan import LayerPlan, Normal
from oci_builder.rootfs.plan import PlanOptions, plan_layers
from oci_builder.rootfs.scan import scan_tree
from oci_builder.rootfs.scan_content import content_digests
from oci_builder.rootfs.scan_fingerprint import SETTLE_NS

EPOCH = 1_700_000_000


def settle() -> None:
    """Wait until file times vouch for what was just written."""
    time.sleep(SETTLE_NS / 1e9 * 1.5)


def fill(root: Path, files: dict[str, bytes]) -> Path:
    """Write files below ``root``; names in ``os.fsdecode`` form."""
    root.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return root


def awkward(root: Path) -> Path:
    """One of each kind that a tier may hold."""
    fill(root, {
        "bin/tool": b"#!/bin/sh\n", "empty": b"", "lib/big": os.urandom(3_000_001), "lib/a/b/c/d": b"deep",
        os.fsdecode(b"caf\xe9"): b"not utf-8", "sp ace\nline": b"1", "l" * 101: b"101", "m" * 255: b"255",
    })  # fmt: skip
    fill(root, {"/".join(["n" * 99] * 3): b"300", "x" * 60 + "/" + "y" * 60: b"splits"})
    (root / "bin/tool").chmod(0o755)
    (root / "lib/a").chmod(0o700)
    (root / "void").mkdir()
    os.link(root / "lib/big", root / "bin/big2")
    os.link(root / "sp ace\nline", root / "aaa")
    os.link(root / ("m" * 255), root / ("k" * 255))
    (root / "rel").symlink_to("lib/a")
    (root / "abs").symlink_to("/etc/passwd")
    (root / "far").symlink_to("z" * 300)
    with open(root / "holes", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"data")
    os.utime(root / "empty", (EPOCH - 5, EPOCH - 5))
    return root


def listing(root: Path, *, owners: bool = False) -> dict[bytes, tuple[object, ...]]:
    """Path -> type, mode, time in seconds, content, link target, first name of its hard-link group, attributes."""
    out: dict[bytes, tuple[object, ...]] = {}
    first: dict[tuple[int, int], bytes] = {}
    for folder, folders, files in os.walk(os.fsencode(root)):
        folders.sort()
        for name in sorted([*folders, *files, b""]):
            if name == b"" and folder != os.fsencode(root):
                continue
            place = os.path.join(folder, name).rstrip(b"/")
            found = os.lstat(place)
            path = os.path.relpath(place, os.fsencode(root))
            content: object = None
            group = path
            if stat.S_ISREG(found.st_mode):
                content = hashlib.sha256(Path(os.fsdecode(place)).read_bytes()).hexdigest()
                group = first.setdefault((found.st_dev, found.st_ino), path)
            elif stat.S_ISLNK(found.st_mode):
                content = os.readlink(place)
            seconds = min(found.st_mtime_ns // 10**9, EPOCH)
            attributes = {key: os.getxattr(place, key, follow_symlinks=False)
                          for key in os.listxattr(place, follow_symlinks=False) if key.startswith("user.")}  # fmt: skip
            owner = (found.st_uid, found.st_gid) if owners else ()
            out[path] = (oct(found.st_mode), seconds, content, group, sorted(attributes.items()), owner)
    return out


def plan_of(tiers: dict[str, Path], epoch: int = EPOCH, **options: object) -> tuple[LayerPlan, ...]:
    """Scan, compare and plan."""
    trees = {name: scan_tree(root) for name, root in tiers.items()}
    return plan_layers(
        trees,
        PlanOptions("/opt/rt", Normal(epoch), **options),
        content_digests(list(trees.values())),  # type: ignore[arg-type]
    )


def untar(tar: Path, dest: Path) -> Path:
    """Unpack with GNU tar, keeping what it can."""
    dest.mkdir(exist_ok=True)
    subprocess.run(
        ["tar", "--xattrs", "--xattrs-include=user.*", "-xpf", tar, "-C", dest], check=True, capture_output=True
    )
    return dest
