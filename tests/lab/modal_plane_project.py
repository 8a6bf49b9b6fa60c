"""A small release for stages on the stand-in: two tiers on its volume, packaging files, gates, a key and its trust."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.receipt import make_key
from tests.conftest import small_tiers
from tests.lab.modal_plane_client import ROOT, RunningPlane

VOLUME = "oci-builder"
PREFIX = "/opt/rt"
LAYER = """name = "runtime"
description = "What stands beside the tiers."
[[file]]
from = "files/checks.json"
to = "checks.json"
[[file]]
from = "files/runtime.json"
to = "runtime.json"
[[file]]
from = "files/ensure_runtime.sh"
to = "ensure_runtime.sh"
mode = "755"
"""
CHECKS = [{"name": "hello", "argv": [f"{PREFIX}/envs/one/bin/hello"], "timeout": 30}]
GATES = [
    {"name": "archive", "stage": "container", "subjects": ["runtime.tar.gz", "runtime.oci.tar"],
     "checks": ["container-archive", "container-assembly"]},
    {"name": "exec", "stage": "container-check", "checks": ["container-exec", "hello"]},
    {"name": "nccl8", "stage": "nccl8", "checks": ["nccl"], "required": False,
     "hardware": {"name": "B200", "capability": "10.0", "count": 8}},
]  # fmt: skip


@dataclass(frozen=True)
class Project:
    """Paths of the sender.

    Attributes:
        spec: its spec file; packaging files lie in ``layers`` beside it.
        release: its release folder, made by the first stage.
        key, trust: a signing key, and the policy that trusts it.
    """

    spec: Path
    release: Path
    key: Path
    trust: Path

    @property
    def words(self) -> list[str]:
        """Options of the stage command."""
        return ["--spec", str(self.spec), "--release", str(self.release), "--trust", str(self.trust), "--yes",
                "--key", str(self.key)]  # fmt: skip


def make_project(folder: Path, plane: RunningPlane) -> Project:
    """The project below ``folder``; its tiers go onto the volume, as large trees do on Modal."""
    home = plane.volume(VOLUME) / "tiers"
    if not home.exists():
        home.mkdir(parents=True)
        small_tiers(home)
    files = folder / "layers/files"
    files.mkdir(parents=True)
    (folder / "layers/runtime.toml").write_text(LAYER)
    (files / "checks.json").write_text(json.dumps(CHECKS))
    (files / "runtime.json").write_text(json.dumps({"name": "lab/quick", "prefix": PREFIX}))
    shutil.copy(ROOT / "layers/files/ensure_runtime.sh", files)
    spec: dict[str, Any] = {
        "name": "lab/quick", "tag": "t1", "release": "lab-r1", "epoch": 1_700_000_000, "base": {"host": True},
        "prefix": PREFIX, "files": "layers", "cmd": ["/bin/sh"], "gates": GATES,
        "tiers": {name: {"path": f"/vol/tiers/envs/{name}"} for name in ("one", "two")},
    }  # fmt: skip
    (folder / "spec.json").write_text(json.dumps(spec))
    made = make_key(folder / "key")
    trust = {"keys": [{"name": "lab", "public": made["public"], "not_before": "2020-01-01T00:00:00Z",
                       "not_after": "2099-01-01T00:00:00Z"}]}  # fmt: skip
    (folder / "trust.json").write_text(json.dumps(trust))
    # The secret that docs/modal.md has its reader make.
    plane.secrets = {"oci-builder-key": {"OCI_BUILDER_KEY": (folder / "key").read_text()}}
    plane.faults()
    return Project(folder / "spec.json", folder / "releases/lab-r1", folder / "key", folder / "trust.json")
