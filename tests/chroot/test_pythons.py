"""The runner under every Python from 3.10 on: its own tests, with nothing installed beside the interpreter.

On every one those that touch what differs between versions: start, protocol, devices, mounts, teardown; on the oldest
also processes, signals and hostile roots. OCI_BUILDER_PYTHONS names interpreters (with colons) in place of those that are found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
ALWAYS = ("tests.chroot.test_protocol", "tests.chroot.test_teardown", "tests.chroot.test_sandbox")
OLDEST = (
    "tests.chroot.test_process", "tests.chroot.test_hostile", "tests.chroot.test_fallbacks",
    "tests.chroot.test_request_fuzz", "tests.chroot.test_leaks",
)  # fmt: skip


def candidates(version: str) -> list[str]:
    """Interpreters that may be of a version: by name, and those of a version manager."""
    given = [p for p in os.environ.get("OCI_BUILDER_PYTHONS", "").split(":") if p]
    if given:
        return given
    managed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    return [p for p in (shutil.which(f"python{version}"), *map(str, managed)) if p]


def interpreter(version: str) -> str:
    """One that starts and is of the version."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in candidates(version):
        # A shim of a version manager can be there and yet start nothing.
        done = subprocess.run([path, "-I", "-c", code], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return path
    pytest.skip(f"no Python {version} here")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_runner_s_tests_pass(version: str) -> None:
    modules = ALWAYS + (OLDEST if version == VERSIONS[0] else ())
    done = subprocess.run(
        [interpreter(version), "-s", "-m", "unittest", *modules], capture_output=True, text=True, cwd=ROOT,
        timeout=600, env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Ran 0 tests" not in done.stderr
