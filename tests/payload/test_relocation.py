"""``relocate`` as a command: what it would do, doing it, and the audit (issue 5, item 2)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.payload.test_relocate import snapshot

PYTHON = Path(getattr(sys, "_base_executable", sys.executable)).resolve()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A runtime whose interpreter is a folder of its own, with a launcher and a link that name where it is."""
    root = tmp_path / "rt"
    (root / "python/bin").mkdir(parents=True)
    shutil.copy("/bin/true", root / "python/bin/python3")
    (root / "envs/base/bin").mkdir(parents=True)
    (root / "envs/base/bin/python").symlink_to(root / "python/bin/python3")
    (root / "envs/base/lib").mkdir()
    (root / "envs/base/lib64").symlink_to(root / "envs/base/lib")
    (root / "envs/base/pyvenv.cfg").write_text("home = /build/python/bin\nversion = 3.13.0\n")
    (root / "envs/base/bin/tool").write_text(f"#!{root}/envs/base/bin/python\nprint('x')\n")
    (root / "envs/base/bin/tool").chmod(0o755)
    return root


def relocate(*argv: object) -> tuple[int, dict[str, Any]]:
    code = "import sys; from oci_builder.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "relocate", *map(str, argv), "--json"], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout.startswith("{") else {"error": done.stderr}


def test_a_dry_run_says_all_and_writes_nothing(tree: Path) -> None:
    before = snapshot(tree)
    status, said = relocate(tree, "--dry-run")
    assert (status, said["applied"], said["ok"]) == (1, False, False)
    assert {(c["rule"], c["path"]) for c in said["changes"]} >= {
        ("link", "envs/base/bin/python"), ("link", "envs/base/lib64"), ("launcher", "envs/base/bin/tool"),
    }  # fmt: skip
    assert {f["code"] for f in said["findings"]} == {"payload.link"}
    assert snapshot(tree) == before


def test_what_was_said_is_done_once(tree: Path) -> None:
    """B141: no link of an environment is absolute into it."""
    dry = relocate(tree, "--dry-run")[1]["changes"]
    status, said = relocate(tree)
    assert (status, said["changes"]) == (0, dry)
    assert os.readlink(tree / "envs/base/lib64") == "lib"
    assert relocate(tree, "--dry-run")[1]["changes"] == []
    assert relocate(tree) == (0, {**said, "changes": []})


def test_parts_that_came_from_elsewhere(tree: Path) -> None:
    (tree / "python/lib").mkdir()
    (tree / "python/lib/x.pc").write_text("prefix=/build/python\n")
    status, said = relocate(tree, "--prefix", "/opt/rt", "--was", "/build/python=python")
    assert (status, said["prefix"]) == (0, "/opt/rt")
    assert (tree / "python/lib/x.pc").read_text() == "prefix=/opt/rt/python\n"


def test_what_still_hangs_on_the_place_is_exit_1(tree: Path) -> None:
    (tree / "envs/base/lib/notes.py").write_text("PLACE = '/build/python/share'\n")
    status, said = relocate(tree, "--was", "/build/python")
    assert status == 1 and [(f["code"], f["where"]) for f in said["findings"]] == [
        ("payload.prefix", "envs/base/lib/notes.py")
    ]


@pytest.mark.parametrize("argv", [["/nonexistent"], ["/etc"], [".", "--prefix", "rt"], [".", "--was", "rt"]])
def test_what_is_no_tree_of_environments_is_left_alone(tmp_path: Path, argv: list[str]) -> None:
    status, said = relocate(*argv)
    assert status == 2 and "error" in said


@pytest.mark.slow
def test_a_tree_is_relocated_by_its_own_interpreter(tmp_path: Path) -> None:
    """B147: files are replaced, not written into, so that the interpreter that runs is no hindrance."""
    root = tmp_path / "rt"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", "--copies", root], check=True)
    running = root / "bin/python3"
    (root / "bin/tool").write_text(f"#!{root}/bin/python3\nprint('x')\n")
    (root / "bin/tool").chmod(0o755)
    code = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from oci_builder.cli import main; main()"
    paths = ":".join(path for path in sys.path if path)
    argv = [str(running), "-c", code, paths, "relocate", str(root), "--external", f"{PYTHON.parent}/*"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "realpath" in (root / "bin/tool").read_text()
    assert subprocess.run([root / "bin/tool"], capture_output=True, text=True).stdout == "x\n"


@pytest.mark.parametrize("count", [1, 30])
def test_stale_bytecode_is_one_line_and_all_of_it_in_the_json(tree: Path, count: int) -> None:
    cache = tree / "envs/base/lib/__pycache__"
    cache.mkdir()
    for number in range(count):
        (cache / f"m{number}.cpython-313.pyc").write_bytes(os.fsencode(tree) + b"/envs/base/lib/m.py")
    code = "import sys; from oci_builder.cli import main; main()"
    argv = [sys.executable, "-c", code, "relocate", str(tree), "--dry-run"]
    lines = subprocess.run(argv, capture_output=True, text=True).stdout.splitlines()
    said = [line for line in lines if line.startswith("bytecode")]
    assert len(said) == 1 and f" {count} files below 'envs/base/lib/__pycache__' -> removed" in said[0], lines
    paths = [c["path"] for c in relocate(tree, "--dry-run")[1]["changes"] if c["rule"] == "bytecode"]
    assert len(paths) == count
