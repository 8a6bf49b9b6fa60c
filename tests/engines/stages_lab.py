"""A small release that runs: the lab's tiers on this machine's own Python and shell, with checks, gates and a key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.engines.stages import Request
from oci_builder.model.gates import TrustPolicy
from oci_builder.receipt import make_key
from tests.conftest import small_tiers, write_spec

ROOT = Path(__file__).resolve().parents[2]
LAYER = """name = "runtime"
[[file]]
from = "files/activate.sh"
to = "activate.sh"
[[file]]
from = "files/checks.json"
to = "checks.json"
[[file]]
from = "files/marker.json"
to = "marker.json"
"""
CHECKS = [{"name": "hello", "argv": ["/opt/rt/envs/one/bin/hello"], "stdout": ["one"], "timeout": 60}]
GATES = [
    {"name": "bytes", "stage": "container", "also": ["container-check"],
     "checks": ["container-archive", "container-assembly"]},
    {"name": "runs", "stage": "container-check", "checks": ["container-exec", "hello"]},
]  # fmt: skip
NCCL = {"name": "nccl8", "stage": "nccl8", "checks": ["nccl"],
        "hardware": {"name": "B200", "capability": "10.0", "count": 8}, "os": ["ubuntu 22.04"]}  # fmt: skip


@dataclass(frozen=True)
class Lab:
    """Folders of one release."""

    root: Path

    @property
    def out(self) -> Path:
        return self.root / "dist"

    @property
    def release(self) -> Path:
        return self.root / "releases/v1-r1"

    @property
    def key(self) -> Path:
        return self.root / "key"

    @property
    def trust(self) -> Path:
        return self.root / "trust.json"

    def receipts(self) -> list[Path]:
        return sorted((self.release / "receipts").glob("*.json"))

    def request(self, **changes: Any) -> Request:
        values: dict[str, Any] = {
            "spec": str(self.root / "spec.json"), "out": str(self.out), "cache": str(self.root / "cache"),
            "release": str(self.release), "key": str(self.key), **changes,
        }  # fmt: skip
        return Request.parse(values)

    def stage(self, name: str, *more: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """``oci-builder stage NAME`` as a user types it."""
        here = () if "modal" in more else ("--out", "dist", "--cache", "cache")  # there they are the volume's
        return self.command("stage", name, *here, "--release", "releases/v1-r1", *more, env=env)

    def command(self, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """A command that takes a spec, a trust policy and a key."""
        run = [sys.executable, "-c", "from oci_builder.cli import main; main()"]
        command = [*run, words[0], "--spec", "spec.json", "--trust", "trust.json", "--key", "key", *words[1:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=300, env=environment)

    def result(self, name: str, *more: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        """The stage's ``--json``."""
        done = self.stage(name, "--json", *more, env=env)
        assert done.stdout, done.stderr
        value: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == value["exit"]
        return value


def make_lab(root: Path, gates: list[dict[str, Any]] | None = None, **changes: Any) -> Lab:
    """The lab's files; nothing is built yet."""
    (root / "layers/files").mkdir(parents=True)
    (root / "layers/runtime.toml").write_text(LAYER)
    (root / "layers/files/activate.sh").write_text("echo 1\n")
    (root / "layers/files/checks.json").write_text(json.dumps(CHECKS))
    (root / "layers/files/marker.json").write_text('{"name": "lab/stages", "prefix": "/opt/rt"}')
    tiers = {name: path.relative_to(root) for name, path in small_tiers(root).items()}
    write_spec(root, tiers, **{
        "name": "lab/stages", "release": "v1-r1", "base": {"host": True}, "files": "layers",
        "gates": GATES if gates is None else gates, **changes,
    })  # fmt: skip
    made = make_key(root / "key")
    entry = {
        "name": "lab", "public": made["public"], "not_before": "2020-01-01T00:00:00Z",
        "not_after": "2099-01-01T00:00:00Z",
    }  # fmt: skip
    policy = TrustPolicy.model_validate({"keys": [entry]})
    (root / "trust.json").write_text(policy.model_dump_json(exclude_none=True))
    return Lab(root)
