"""Coverage-guided fuzzing of tar, compression framing and documents, for a bounded time in CI.

atheris has wheels for some Pythons only; where it is not installed these tests are skipped, and seeded mutation stays.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed (no wheel for this Python?)"
)


def fuzz(target: str, folder: Path, seconds: int, *options: str) -> subprocess.CompletedProcess[str]:
    corpus = folder / "corpus"
    corpus.mkdir()
    command = [
        sys.executable, "-m", "tests.fuzz.with_atheris", target, str(corpus), f"-max_total_time={seconds}",
        "-rss_limit_mb=4096", "-malloc_limit_mb=1024", "-timeout=60", "-max_len=65536", f"-artifact_prefix={folder}/", *options,
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 600)


def check(ran: subprocess.CompletedProcess[str], folder: Path) -> int:
    left = [path for path in folder.iterdir() if path.is_file()]
    shown = "".join(f"\n{path.name}: {path.read_bytes()[:2000].hex()}" for path in left)
    assert ran.returncode == 0 and not left, ran.stdout[-2000:] + ran.stderr[-4000:] + shown
    found = re.findall(r"Done (\d+) runs", ran.stderr)
    assert found, ran.stderr[-2000:]
    return int(found[0])


@needs_atheris
@pytest.mark.parametrize("target", TARGETS)
def test_coverage_guided(target: str, tmp_path: Path) -> None:
    """Ten seconds with a fixed seed; some hundreds of runs at least, or the target is too slow to be of use.

    A machine that is slow itself gets ten times as long.
    """
    for seconds in (10, 100):
        (tmp_path / str(seconds)).mkdir()
        runs = check(fuzz(target, tmp_path / str(seconds), seconds, "-seed=1"), tmp_path / str(seconds))
        if runs > 300:
            break
    assert runs > 300


@needs_atheris
@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS)
def test_coverage_guided_for_long(target: str, tmp_path: Path) -> None:
    check(fuzz(target, tmp_path, int(os.environ.get("OCI_BUILDER_SOAK", "60"))), tmp_path)
