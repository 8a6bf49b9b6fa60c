"""A layout of two platforms: the one that is asked for is what runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model import media
from oci_builder.model.digest import Digest
from tests.conftest import Built
from tests.test_cli import call

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def two_platforms(quick: Built, runnable: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image for amd64 without a shell, and one that says arm64 (its programs are this machine's) with one."""
    layout = tmp_path_factory.mktemp("layout")
    entries = []
    for built, architecture in ((quick, "amd64"), (runnable, "arm64")):
        subprocess.run(["tar", "-xf", built.oci, "-C", layout], check=True)
        (layout / "manifest.json").unlink()
        index = json.loads((layout / "index.json").read_bytes())
        manifest = read(layout, index["manifests"][0])
        config = {**read(layout, manifest["config"]), "architecture": architecture}
        manifest["config"] = {**manifest["config"], **put(layout, config)}
        platform = {"architecture": architecture, "os": "linux"}
        entries.append({"mediaType": media.OCI_MANIFEST, **put(layout, manifest), "platform": platform})
    (layout / "index.json").write_text(json.dumps({**index, "manifests": entries}))
    return layout


def read(layout: Path, descriptor: dict[str, Any]) -> Any:
    return json.loads((layout / Digest.parse(descriptor["digest"]).blob_path).read_bytes())


def put(layout: Path, value: Any) -> dict[str, Any]:
    data = json.dumps(value).encode()
    (layout / Digest.of(data).blob_path).write_bytes(data)
    return {"digest": Digest.of(data), "size": len(data)}


def test_exec_runs_the_platform_that_is_asked_for(two_platforms: Path, tmp_path: Path) -> None:
    words = ("--cache", tmp_path, two_platforms, "/bin/sh", "-c", "echo from $LAB")
    assert call("exec", *words).returncode == 127
    done = call("exec", "--platform", "linux/arm64", *words)
    assert (done.returncode, done.stdout) == (0, b"from from the spec\n"), done.stderr
    assert call("exec", "--platform", "nonsense", *words).returncode == 2


def test_verify_runs_the_checks_of_the_platform_that_is_asked_for(two_platforms: Path, tmp_path: Path) -> None:
    checks = tmp_path / "checks.json"
    checks.write_text(json.dumps([{"name": "shell", "argv": ["/bin/sh", "-c", "true"]}]))
    words = ("verify", two_platforms, "--exec", "--checks", checks, "--cache", tmp_path / "cache")
    done = call(*words, "--platform", "linux/arm64")
    assert b"pass     shell" in done.stdout, done.stdout + done.stderr
    assert b"pass     shell" not in call(*words).stdout
