"""check_runtime.py --gpu takes the GPUs that are visible; eight are what a gate wants, by its own list."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checks_lab import FILES, fake_driver, write_inventory
from nrl_checks import listing


def exchange(tmp_path: Path, gpus: str) -> dict[str, Any]:
    """The row of the exchange, on a node with so many GPUs."""
    root = tmp_path / "rt"
    python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    subprocess.run([python, "-m", "venv", "--without-pip", root / "envs/base"], check=True)
    write_inventory(root / "inventory-base.json", {"torch": "1"})
    for name in ("checks", "runtime_check"):
        shutil.copytree(FILES / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(FILES / "check_runtime.py", root)
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "NRL_CHECK_LIBCUDA": str(fake_driver(tmp_path))}
    done = subprocess.run([python, root / "check_runtime.py", "--gpu", "--json", "-"], env={**env, "FAKE_GPUS": gpus},
                          capture_output=True, text=True)  # fmt: skip
    return next((row for row in json.loads(done.stdout)["checks"] if row["name"] == "nccl"), {})


def test_four_visible_gpus_are_four_ranks(tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES shows half of a node, say; the check goes on to what it finds there: no torch."""
    row = exchange(tmp_path, "4")
    assert row["argv"][-2:] == ["--at-least", "4"]
    assert "wanted" not in row["reason"]


def test_one_visible_gpu_has_nothing_to_exchange_with(tmp_path: Path) -> None:
    assert exchange(tmp_path, "1") == {}


@pytest.mark.parametrize(("given", "wanted"), [({}, "8"), ({"gpus": 4}, "4")])
def test_a_gate_s_list_wants_eight_unless_it_says_otherwise(given: dict[str, int], wanted: str) -> None:
    assert listing.checks("nccl", "/p", ["base"], **given)[-1]["argv"][-2:] == ["--at-least", wanted]
