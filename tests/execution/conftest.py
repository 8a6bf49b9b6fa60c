"""What tests of exec and of its gates share: a small root, of this machine's own programs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from oci_builder.execution.run import ExecOptions
from tests.chroot.lab import tiny_root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if subprocess.run(["unshare", "-mpf", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    path = tiny_root(tmp_path_factory.mktemp("exec") / "root")
    (path / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\n')
    (path / "opt/rt").mkdir(parents=True)
    (path / "opt/rt/checks.json").write_text(json.dumps({"checks": [{"name": "own", "argv": ["echo", "hello"]}]}))
    return path


@pytest.fixture
def options(tmp_path: Path) -> ExecOptions:
    (tmp_path / "state").mkdir(mode=0o700)
    return ExecOptions(state=str(tmp_path / "state"))
