"""The CPU's relocation check (the gate ``relocation-cpu``): judged on real environments at two places."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from chroot_exec.protocol import Check
from oci_builder.engines.stages_relocation import NAME, with_relocation


def judge(first: Path, second: Path) -> tuple[int, dict[str, object]]:
    (check,) = with_relocation((), "/opt/rt", ("one", "two"), True)
    argv = [sys.executable, *check.argv[1:4], str(first), str(second), check.argv[6]]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def prefixes(tmp_path: Path) -> tuple[Path, Path]:
    """Two tiers, and the same under another name."""
    for tier in ("one", "two"):
        venv.create(tmp_path / "a/rt/envs" / tier, symlinks=True)
    subprocess.run(["cp", "-a", str(tmp_path / "a"), str(tmp_path / "b")], check=True)
    return tmp_path / "a/rt", tmp_path / "b/rt"


def test_what_works_from_both_passes(prefixes: tuple[Path, Path]) -> None:
    status, found = judge(*prefixes)
    assert (status, found["outcome"]) == (0, "pass"), found
    assert len(found["details"]) == 4  # type: ignore[arg-type]


def test_a_path_into_the_other_prefix_fails(prefixes: tuple[Path, Path]) -> None:
    first, second = prefixes
    site = next((second / "envs/two/lib").glob("python*/site-packages"))
    (first / "shared").mkdir()
    (site / "shared.pth").write_text(f"{first}/shared\n")
    status, found = judge(first, second)
    assert (status, found["outcome"]) == (1, "fail")
    assert "of the other prefix" in str(found["reason"])


def test_an_interpreter_that_does_not_start_fails(prefixes: tuple[Path, Path]) -> None:
    python = prefixes[1] / "envs/one/bin/python3"
    python.unlink()
    python.write_text("#!/nonexistent/python\n")
    python.chmod(0o755)
    status, found = judge(*prefixes)
    assert (status, found["outcome"]) == (1, "fail")


def test_an_interpreter_of_the_first_place_fails(prefixes: tuple[Path, Path]) -> None:
    python = prefixes[1] / "envs/one/bin/python3"
    python.unlink()
    python.write_text(f'#!/bin/sh\nexec {prefixes[0]}/envs/one/bin/python3 "$@"\n')
    python.chmod(0o755)
    status, found = judge(*prefixes)
    assert (status, found["outcome"]) == (1, "fail")
    assert "its prefix is" in str(found["reason"])


def test_it_is_added_where_it_is_asked_for_and_absent() -> None:
    own = Check(NAME, ("/x",))
    assert [c.name for c in with_relocation((), "/opt/rt", ("one",), False)] == []
    assert with_relocation((own,), "/opt/rt", ("one",), True) == (own,)
    assert [c.name for c in with_relocation((Check("a", ("/x",)),), "/opt/rt", ("one",), True)] == ["a", NAME]
