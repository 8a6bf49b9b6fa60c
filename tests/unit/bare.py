"""For checks that need nothing but an interpreter: where things are, and how shipped programs are run.

    python3 -I -S -m unittest discover -s tests/unit -p 'test_bare_*.py'

runs them with Python 3.10 or later and no package installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "layers" / "files"
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def load(path: Path) -> ModuleType:
    """A shipped file as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"shipped_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Case(unittest.TestCase):
    """A test with a folder of its own and none of the caller's variables."""

    def setUp(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="bare-"))
        self.addCleanup(shutil.rmtree, self.place)

    def call(self, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, whatever its exit status."""
        given = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", **env}
        return subprocess.run(
            [str(w) for w in words], env=given, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )
