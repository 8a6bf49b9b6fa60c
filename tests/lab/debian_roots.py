"""Folders with a Debian of another release, made once and kept between runs by the scripts that know what is in them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def lab_folder() -> Path:
    """Where they are kept: ``$OCI_BUILDER_LAB``, else the user's cache folder."""
    if found := os.environ.get("OCI_BUILDER_LAB"):
        return Path(found)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oci-builder-lab"


def made(command: Sequence[str | Path], what: str) -> None:
    """Run a script that makes one, unless it is there; where this machine cannot have it, the test is skipped."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        pytest.skip(f"no {what} on this machine: {done.stderr.strip()[-500:]}")
