"""What is shipped is checked with ``python3 -m unittest`` under bare interpreters: no package, no variable of ours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chroot.test_pythons import interpreter

ROOT = Path(__file__).resolve().parents[1]


RUNNING = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.parametrize("version", sorted({"3.10", "3.11", RUNNING}))
def test_shipped_parts_by_unittest_alone(version: str) -> None:
    done = subprocess.run(
        [sys.executable if version == RUNNING else interpreter(version), "-I", "-S", "-m", "unittest", "discover", "-s", "tests/unit"],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    ran = re.search(r"^Ran (\d+) tests", done.stderr, re.MULTILINE)
    assert ran and int(ran[1]) > 30


def test_they_cover_each_shipped_part() -> None:
    names = {p.name for p in (ROOT / "tests/unit").glob("test_*.py")}
    parts = ("relocate", "ensure_runtime", "activate", "overlay", "chroot_exec", "check_runtime")
    assert names == {f"test_bare_{part}.py" for part in parts}


def test_none_of_them_needs_a_package() -> None:
    """Nothing but the standard library, this folder, and what is shipped or pure."""
    known = {*sys.stdlib_module_names, "bare", "chroot_exec"}
    for path in (ROOT / "tests/unit").glob("*.py"):
        for name in re.findall(r"^\s*(?:from|import) +([\w.]+)", path.read_text(), re.MULTILINE):
            assert name.split(".")[0] in known or name.startswith("oci_builder.payload"), f"{path.name} imports {name}"
