"""Small builds with a cache, and other processes that use it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from oci_builder.build import FILES, BuildOptions, BuildResult, build
from oci_builder.cache import DAY, PruneOptions
from oci_builder.execution.staging import Staged, Unpacked, stage
from oci_builder.model.digest import Digest

ALL = PruneOptions(keep_days=0)
CONFIG = b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}'
ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import json, os, sys, time
from pathlib import Path
from oci_builder.cache import removal as module
from oci_builder.build import BuildOptions, build
from oci_builder.cache import PruneOptions, prune_cache
place = Path(sys.argv[1])
def prune(days):
    print(json.dumps(prune_cache(place, PruneOptions(keep_days=days)).to_json()), flush=True)
"""


def python(code: str, argument: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own; ``place`` is its argument, ``prune(days)`` prunes it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-c", PRELUDE + code, str(argument)]
    return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=300, check=False, cwd="/")


def building(place: Path, *, out: str = "out") -> subprocess.Popen[bytes]:
    """A real build in a process of its own, with many small blocks to do."""
    argv = [sys.executable, "-c", "from oci_builder.cli import main; main()", "build", place / "spec.json", "--out", place / out]
    argv += ["--cache", place / "cache", "--jobs", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def write_spec(place: Path, name: str, tag: str = "t", tier: str = "tier") -> Path:
    value = {"name": "n", "tag": tag, "epoch": 0, "base": {"rootfs": "root"}, "prefix": "/opt/rt", "tiers": {"base": {"path": tier}}}
    (place / name).write_text(json.dumps(value))
    return place / name


def built(place: Path, spec: str = "spec.json", out: str = "out") -> BuildResult:
    return build(place / spec, place / out, BuildOptions(place / "cache", 1))


def hashes(out: Path) -> dict[str, str]:
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in FILES}


def age(cache: Path, days: float) -> None:
    """All blobs and what is known of them were last used so long ago."""
    then = time.time() - days * DAY
    for path in [*cache.glob("store/records/*"), *cache.glob("store/blobs/sha256/*"), cache / "build.sqlite"]:
        os.utime(path, (then, then))


def staged_tree(place: Path) -> Staged:
    archive = place / "image.tar"
    archive.write_bytes(b"archive")

    def unpack(_source: Path, folder: Path) -> Unpacked:
        (folder / "file").write_bytes(bytes(100_000))
        return Unpacked(Digest.of(b"manifest"), CONFIG)

    return stage(archive, place / "cache/staged", unpack)


class BlobsOf:
    """Digests of the layers of a built image, hex; on leaving, all of them are in the store."""

    def __init__(self, place: Path, out: str) -> None:
        self.store = place / "cache/store/blobs/sha256"
        layers = json.loads((place / out / "container.json").read_bytes())["layers"]
        self.named = {layer["digest"].removeprefix("sha256:") for layer in layers}

    def __enter__(self) -> BlobsOf:
        assert self.named
        return self

    def __exit__(self, *_: object) -> None:
        assert self.named <= {path.name for path in self.store.iterdir()}
