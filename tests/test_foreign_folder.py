"""Where one stands decides nothing: an unpacked image or a downloads folder must not lend modules to our processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Built

ROOT = Path(__file__).resolve().parent.parent
# As the console script starts: the caller's folder is not on the path of this process itself.
START = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from oci_builder.cli import main; sys.exit(main())"
SHADOWS = ("selectors.py", "json.py", "argparse.py", "chroot_exec/__init__.py", "chroot_exec/__main__.py",
           "oci_builder/__init__.py", "oci_builder/engines/local_worker.py")  # fmt: skip


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder whose modules leave a mark when they are imported."""
    for name in SHADOWS:
        path = tmp_path / "trap" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write({name!r} + chr(10))\n")
    return tmp_path / "trap"


def run(trap: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-P", "-c", START, *map(str, words)], cwd=trap, env=env, capture_output=True, text=True, timeout=300
    )


def test_the_runner_imports_nothing_from_the_callers_folder(runnable: Built, tmp_path: Path, trap: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    done = run(trap, "exec", "--cache", tmp_path / "cache", runnable.oci, "--", "/bin/sh", "-c", "exit 7")
    assert (done.returncode, (tmp_path / "mark").exists()) == (7, False), done.stderr


def test_a_stages_process_imports_nothing_from_the_callers_folder(quick: Built, tmp_path: Path, trap: Path) -> None:
    done = run(
        trap, "stage", "package", "--on", "local", "--spec", quick.spec, "--out", tmp_path / "out", "--cache", tmp_path / "cache",
        "--yes",
    )  # fmt: skip
    assert not (tmp_path / "mark").exists(), (tmp_path / "mark").read_text()
    assert done.returncode == 0, done.stderr
