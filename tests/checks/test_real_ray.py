"""Dispatch with a real Ray: three interpreters, and what a broken one is told by."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("ray", "torch")):
    pytest.skip("test_in_debian.py runs it, or OCI_BUILDER_TORCH: see conftest.py", allow_module_level=True)


def dispatched(fault: str) -> dict[str, Any]:
    """The result of a program of its own."""
    lab, path = Path(__file__).with_name("dispatch_lab.py"), os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, lab, fault], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_each_worker_starts_in_its_own_tier() -> None:
    """The positive control: nobody called uv, pip or git, and transformers tells the tiers apart."""
    found = dispatched("")
    assert found["outcome"] == "pass", found["reason"]
    versions = {tier: worker["transformers"] for tier, (worker,) in found["details"]["workers"].items()}
    assert versions == {"base": "5.8.1", "automodel": "5.5.0", "vllm": "5.8.1"}


def test_one_interpreter_for_all_that_uv_found_and_no_rank_is_seen() -> None:
    reason = dispatched("broken")["reason"]
    for tier in ("automodel", "vllm"):
        assert f"{tier}: ran " in reason and f"{tier}: its prefix is " in reason
    assert "base: ran /" not in reason
    assert "base: ranks are [('7', '1')]" in reason
    assert "transformers does not tell the tiers apart" in reason
    assert "called on the way: uv sync --locked, uv sync --locked, uv sync --locked" in reason
