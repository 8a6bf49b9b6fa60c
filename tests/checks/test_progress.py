"""A slow machine is told from a hang, while a program runs and in the reason when it is ended."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import types
from pathlib import Path

import checks_lab  # noqa: F401
import pytest
from nrl_checks import generation, process, progress, ray_dispatch, relocation, runner
from nrl_checks.common import CheckFailed, Result


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EVERY", 0.1)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.2)


# A machine too slow for the first gets ten times the time, and then more.
SCALES = (1.0, 10.0, 60.0)


def watched(code: str, timeout: float = 2.5, patience: float = 1.2, *, caches: Path | None = None) -> progress.Progress:
    watch = progress.Progress("part", [caches] if caches else [], patience)
    process.run([sys.executable, "-S", "-c", f"import time\n{code}"], timeout=timeout, watch=watch)
    return watch


def slow(code: str, sign: str, **options: Path) -> str:
    """The verdict of what gets on when its time is over: patience alone would have ended long before."""
    for scale in SCALES:
        verdict = watched(code, 2.5 * scale, 1.2 * scale, **options).verdict()
        if verdict.startswith("slow") and sign in verdict:
            break
    return verdict


@pytest.mark.parametrize("code", ["time.sleep(600)", "while True: pass"])
def test_what_shows_no_sign_is_hung_and_ended_before_its_time(code: str) -> None:
    """CPU time is no sign: waiting for a GPU burns it."""
    verdict = watched(code, timeout=600).verdict()
    assert verdict.startswith("hung: no sign of life for ")


def test_what_still_writes_is_slow() -> None:
    verdict = slow("while True: print('x', flush=True); time.sleep(0.2)", "output")
    assert verdict.startswith("slow")
    assert "output" in verdict


def test_what_fills_a_cache_is_slow(tmp_path: Path) -> None:
    code = f"n = 0\nwhile True: open({str(tmp_path)!r} + f'/{{n}}', 'w').close(); n += 1; time.sleep(0.2)"
    assert "files in the caches" in slow(code, "files in the caches", caches=tmp_path)


@pytest.mark.parametrize("name", ["ptxas", "ptxas-blackwell"])
def test_a_compiler_at_work_is_a_sign(tmp_path: Path, name: str) -> None:
    """Triton has an assembler of its own for a B200."""
    shutil.copy(shutil.which("sleep") or "", tmp_path / name)
    verdict = slow(f"import subprocess; subprocess.run([{str(tmp_path / name)!r}, '600'])", f"1 {name}")
    assert verdict.startswith("slow")
    assert f"1 {name}" in verdict


def test_what_is_read_through_a_mapping_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of a gigabyte load from a slow disk without one call to read."""
    monkeypatch.setattr(Path, "read_text", lambda _: "rchar: 5\nwchar: 0\nsyscr: 0\nsyscw: 0\nread_bytes: 4194304\n")
    assert progress.bytes_read(1) == 4194309


def test_lines_say_where_it_stands(capfd: pytest.CaptureFixture[str]) -> None:
    for scale in SCALES:
        watched("while True: print('x', flush=True); time.sleep(0.2)", 2.5 * scale, 1.2 * scale)
        lines = capfd.readouterr().err.splitlines()
        if len(lines) >= 3:
            break
    assert len(lines) >= 3
    assert all(line.startswith("part: ") and "last sign" in line for line in lines)


def test_the_last_words_are_shown_and_move_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the program writes afterwards stands behind, not in the middle."""
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    watch, shown = progress.Progress("part"), tmp_path / "shown"
    code = r"import os, sys, time; print('loading\x1b[2J weights', file=sys.stderr, flush=True)" + (
        f"\nwhile not os.path.exists({str(shown)!r}): time.sleep(0.01)\nsys.stderr.write('end')"
    )

    def look(seen: process.Look) -> bool:
        going = watch(seen)
        if seen.words:
            shown.touch()
        return going

    done = process.run([sys.executable, "-S", "-c", code], timeout=300, watch=look)
    assert "it says: loading?[2J weights\n" in capfd.readouterr().err
    assert done.stderr == "loading\x1b[2J weights\nend"


def test_a_check_that_ran_out_of_time_says_what_it_did_last() -> None:
    argv = [sys.executable, "-S", "-c", "import time\nwhile True: print('x', flush=True); time.sleep(0.1)"]
    for seconds in (1.5, 15, 90):
        row = runner.run_one({"name": "slow", "argv": argv, "timeout": seconds})
        assert f"not done after {seconds:g} seconds" in row["reason"]
        if "ago: output" in row["reason"]:
            break
    assert "ago: output" in row["reason"]


def test_a_reason_is_one_line_of_the_table() -> None:
    row = {"name": "a", "outcome": "fail", "seconds": 1.0, "reason": "first\nsecond\x1b[31m\tthird"}
    assert runner.table([row]).splitlines()[0].endswith("s  first second?[31m third")


def stand_in(folder: Path, code: str) -> str:
    """An interpreter that runs this instead of a part."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)
    return str(path)


def test_a_part_that_hangs_is_named_and_its_last_words_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result()
    parts = generation.Parts(result, tmp_path)
    for patience in SCALES:
        monkeypatch.setattr(generation, "Progress", functools.partial(progress.Progress, patience=patience))
        with pytest.raises(CheckFailed, match=r"eager \(.*hung: no sign") as failed:
            parts.run(stand_in(tmp_path, "echo loading >&2; exec sleep 600"), "eager")
        if "loading" in str(failed.value):
            break
    assert "last words: loading" in str(failed.value)
    assert result.details["seconds"]["eager"] >= 1


def test_parts_share_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that has too little of it left is slow, not failed for a reason of its own."""
    now = iter([0.0, 0.0, 600.0])
    monkeypatch.setattr(generation, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    parts = generation.Parts(Result(), tmp_path, limit=600.0)
    done = stand_in(tmp_path, """echo '{"outcome": "pass", "details": {"n": 1}}'""")
    assert parts.run(done, "make") == {"n": 1}
    with pytest.raises(CheckFailed, match=r"eager \(.*slow: "):
        parts.run(stand_in(tmp_path, "exec sleep 600"), "eager")


def test_the_list_gives_the_check_more_than_its_parts_take() -> None:
    from nrl_checks import listing

    found = {c["name"]: c for c in listing.checks("single", "/opt/rt", ["base", "vllm"])}
    assert found["generation"]["timeout"] > generation.LIMIT + process.EVERY
    placed = {c["name"]: c for c in listing.checks("single", "/opt/rt", ["base", "vllm"], "/srv/rt")}
    assert placed["relocation"]["timeout"] > 2 * relocation.PROBE_LIMIT
    assert placed["ray_dispatch"]["timeout"] > 3 * ray_dispatch.PATIENCE


def test_what_cannot_be_seen_is_no_sign() -> None:
    gone = 2**22 + 1
    assert (progress.cpu_seconds(gone), progress.bytes_read(gone), progress.program(gone)) == (0.0, 0, "")
    assert progress.bytes_read(os.getpid()) >= 0
