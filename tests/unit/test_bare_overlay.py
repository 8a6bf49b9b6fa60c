"""The source overlay on a small stand-in: applied once, refused on another source, and each worker has its interpreter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import unittest
from pathlib import Path

from bare import FILES, PYTHON, Case, load, sha256

OVERLAY = FILES / "source_overlay"
REGISTRY = b"""R = {
    "a.V": "uv run --locked --extra vllm --directory /src", "a.A": "uv run --locked --extra automodel --directory /src",
    "a.B": "uv run --locked --directory /src", "a.M": "uv run --locked --extra mcore --directory /src",
    "a.Own": "/somewhere/python",
}
def get(fqn):
    return R[fqn]
"""
INSERT = [
    {"after": 5, "lines": ["from nemo_rl.distributed import prebuilt_env", "prebuilt_env.enabled()"]},
    {"after": 6, "lines": ["    if prebuilt_env.enabled():", "        return prebuilt_env.resolve(R[fqn], fqn)"]},
]


class Overlay(Case):
    def setUp(self) -> None:
        super().setUp()
        self.tree, self.overlay = self.place / "src", self.place / "overlay"
        package = self.tree / "nemo_rl/distributed"
        package.mkdir(parents=True)
        for folder in (package, package.parent):
            (folder / "__init__.py").write_text("")
        self.registry = package / "registry.py"
        self.registry.write_bytes(REGISTRY)
        shutil.copytree(OVERLAY, self.overlay, ignore=shutil.ignore_patterns("__pycache__"))
        patched = load(self.overlay / "apply.py").patched(REGISTRY, INSERT)
        target = {"path": "nemo_rl/distributed/registry.py", "sha256": sha256(REGISTRY), "patched": sha256(patched),
                  "insert": INSERT}  # fmt: skip
        new = [{"path": "nemo_rl/distributed/prebuilt_env.py", "from": "prebuilt_env.py"}]
        text = json.dumps({"name": "stand-in", "commit": "0" * 40, "files": [target], "new": new})
        (self.overlay / "overlay.json").write_text(text)
        self.envs = self.place / "envs"
        for tier in ("base", "automodel", "vllm"):
            (self.envs / tier / "bin").mkdir(parents=True)
            (self.envs / tier / "bin/python").symlink_to(PYTHON)

    def apply(self, *more: str) -> int:
        return self.call(PYTHON, "-I", self.overlay / "apply.py", self.tree, *more).returncode

    def ask(self, actor: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The interpreter of an actor, with tripwires for uv, pip and git first on PATH."""
        wires = self.place / "wires"
        wires.mkdir(exist_ok=True)
        for name in ("uv", "pip", "git"):
            (wires / name).write_text(f"#!/bin/sh\necho {name} >> {wires}/called\nexit 97\n")
            (wires / name).chmod(0o755)
        code = f"from nemo_rl.distributed.registry import get; print(get({actor!r}))"
        path = f"{wires}:{os.environ.get('PATH', os.defpath)}"
        done = self.call(PYTHON, "-c", code, **{"PATH": path, "PYTHONPATH": str(self.tree), **env})
        self.assertFalse((wires / "called").exists())
        return done

    def test_it_is_applied_once(self) -> None:
        self.assertEqual(self.apply("--check"), 1)
        self.assertEqual(self.apply(), 0)
        once = self.registry.read_bytes()
        self.assertEqual((self.apply(), self.apply("--check")), (0, 0))
        self.assertEqual(self.registry.read_bytes(), once)
        self.assertEqual([line for line in REGISTRY.splitlines() if line not in once.splitlines()], [])

    def test_another_source_is_refused_and_untouched(self) -> None:
        self.registry.write_bytes(REGISTRY + b"# changed\n")
        self.assertEqual(self.apply(), 3)
        self.assertEqual(self.registry.read_bytes(), REGISTRY + b"# changed\n")
        self.assertFalse((self.tree / "nemo_rl/distributed/prebuilt_env.py").exists())

    def test_each_tier_has_its_interpreter(self) -> None:
        self.apply()
        for actor, tier in (("a.V", "vllm"), ("a.A", "automodel"), ("a.B", "base")):
            done = self.ask(actor, NEMO_RL_PREBUILT_ENV_ROOT=str(self.envs))
            self.assertEqual(done.stdout, f"{self.envs}/{tier}/bin/python\n", done.stderr)
        self.assertEqual(self.ask("a.Own", NEMO_RL_PREBUILT_ENV_ROOT=str(self.envs)).stdout, "/somewhere/python\n")

    def test_without_the_variable_nothing_changes(self) -> None:
        self.apply()
        self.assertIn("uv run --locked --extra vllm", self.ask("a.V").stdout)

    def test_tiers_out_of_scope_are_refused_with_advice(self) -> None:
        self.apply()
        done = self.ask("a.M", NEMO_RL_PREBUILT_ENV_ROOT=str(self.envs))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("mcore", done.stderr)
        self.assertIn("policy.dtensor_cfg._v2=true", done.stderr)

    def test_both_variables_are_an_error(self) -> None:
        self.apply()
        both = {"NEMO_RL_PREBUILT_ENV_ROOT": str(self.envs), "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"}
        self.assertIn("exclude each other", self.ask("a.V", **both).stderr)

    def test_the_shipped_list_fits_the_shipped_module(self) -> None:
        value = json.loads((OVERLAY / "overlay.json").read_text())
        for new in value["new"]:
            self.assertTrue((OVERLAY / new["from"]).is_file())
        for target in value["files"]:
            self.assertFalse(Path(target["path"]).is_absolute())
            self.assertNotEqual(target["sha256"], target["patched"])


if __name__ == "__main__":
    unittest.main()
