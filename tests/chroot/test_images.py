"""Whole images through the command line, as root and as an ordinary user: the quickstart, and Debian by mmdebstrap."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.model.errors import OciBuilderError
from tests.chroot.distribution import debian
from tests.chroot.lab import mount_points
from tests.chroot.ordinary import ROOT, UID, Caller

PYTHON = "/opt/quickstart/envs/vllm/bin/python"
DEBIAN_CHECKS: list[dict[str, Any]] = [
    {"name": "python", "argv": ["python3", "-c", "import ssl, ctypes; print('fine')"], "stdout": ["^fine$"]},
    {"name": "compiler", "argv": ["sh", "-c", "echo 'int main(void){return 7;}' | gcc -xc - -o /tmp/a; /tmp/a"], "exit": 7},
    {"name": "names", "argv": ["sh", "-c", "id -un; hostname"], "stdout": ["^root$", "^sandbox$"]},
    {"name": "anybody", "argv": ["python3", "-c", "import os; print(os.getuid())"], "user": "12345", "stdout": ["^12345$"]},
    {"name": "tier", "argv": ["/opt/rt/envs/one/bin/hello"], "stdout": ["^hello$"]},
]  # fmt: skip


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="ob-images-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=["root", "ordinary user"])
def caller(request: pytest.FixtureRequest, place: Path) -> Caller:
    if os.geteuid():
        if request.param == "root":
            pytest.skip("needs root")
    elif any(shutil.which(p) is None for p in ("unshare", "setpriv")):
        pytest.skip("needs unshare and setpriv")
    folder = place / request.param.replace(" ", "-")
    folder.mkdir()
    return Caller(folder, request.param != "root" and os.geteuid() == 0)


@pytest.fixture(scope="module")
def quickstart(place: Path) -> Path:
    """The quickstart's archives."""
    try:
        build(ROOT / "examples/quickstart/spec.json", place / "quickstart", BuildOptions(place / "cache", 2))
    except OciBuilderError as error:
        if error.code.startswith("tiers.") or isinstance(error.__cause__, socket.gaierror):
            pytest.skip(f"the quickstart's packages are not in reach: {error.message[:200]}")
        raise
    return place / "quickstart"


@pytest.fixture(scope="module")
def distribution(place: Path) -> Path:
    """An image of Debian and one small tier."""
    try:
        tree = debian()
    except unittest.SkipTest as error:
        pytest.skip(str(error))
    tier = place / "tier"
    (tier / "bin").mkdir(parents=True)
    (tier / "bin/hello").write_text("#!/usr/bin/env python3\nprint('hello')\n")
    (tier / "bin/hello").chmod(0o755)
    spec = {"name": "lab/debian", "tag": "t1", "epoch": 1_700_000_000, "base": {"rootfs": str(tree)},
            "prefix": "/opt/rt", "tiers": {"one": {"path": str(tier)}}}  # fmt: skip
    (place / "debian.json").write_text(json.dumps(spec))
    (place / "checks.json").write_text(json.dumps(DEBIAN_CHECKS))
    build(place / "debian.json", place / "debian", BuildOptions(place / "cache", 2))
    return place / "debian"


def gates(caller: Caller, archives: list[Path], *words: str | Path) -> dict[str, Any]:
    """``verify --exec``, which must end well; its receipt."""
    receipt = caller.home / f"{len(list(caller.home.glob('*.json')))}.json"
    done = caller("verify", *archives, "--exec", "--receipt", receipt, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    value: dict[str, Any] = json.loads(receipt.read_text())
    return value


def outcomes(receipt: dict[str, Any]) -> dict[str, str]:
    return {c["name"]: c["outcome"] for c in receipt["predicate"]["checks"]}


@pytest.fixture(scope="module")
def receipt(caller: Caller, quickstart: Path) -> dict[str, Any]:
    """Of the quickstart's first run."""
    return gates(caller, [quickstart / "runtime.oci.tar", quickstart / "runtime.docker.tar.gz"])


def test_the_quickstart_passes_all_three_gates(caller: Caller, receipt: dict[str, Any]) -> None:
    names = ["container-archive", "container-assembly", "container-exec", "base", "automodel", "vllm"]
    assert outcomes(receipt) == dict.fromkeys(names, "pass")
    sandbox = receipt["predicate"]["details"]["sandbox"]
    assert sandbox["isolation"] == caller.isolation
    assert bool(sandbox["differs"]) == (caller.isolation == "rootless")
    assert {"mount", "pid", "ipc", "uts", "network"} <= set(sandbox["namespaces"])


def test_the_receipt_names_all_three_archives(receipt: dict[str, Any], quickstart: Path) -> None:
    """A release is known by its portable archive."""
    container = json.loads((quickstart / "container.json").read_text())
    wanted = {name: record["sha256"] for name, record in container["archives"].items()}
    wanted["runtime.tar.gz"] = json.loads((quickstart / "portable.json").read_text())["sha256"]
    assert {s["name"]: s["digest"]["sha256"] for s in receipt["subject"]} == wanted
    assert receipt["predicate"]["details"]["config"] == container["config"]["digest"]


def test_a_second_run_uses_the_staged_tree_again(caller: Caller, receipt: dict[str, Any], quickstart: Path) -> None:
    again = gates(caller, [quickstart / "runtime.oci.tar"])
    assert [r["predicate"]["details"]["staged_again"] for r in (receipt, again)] == [True, False]


def test_a_receipt_is_never_written_anew(caller: Caller, quickstart: Path) -> None:
    """C12-08; and nothing is run for it."""
    there = caller.home / "there"
    there.write_text("kept")
    done = caller("verify", quickstart / "runtime.oci.tar", "--exec", "--receipt", there)
    assert (done.returncode, there.read_text()) == (6, "kept")
    assert "release.exists" in done.stderr


def test_exec_runs_a_tier(caller: Caller, quickstart: Path) -> None:
    code = "import numpy, sys; print(numpy.arange(4).sum(), sys.prefix); sys.exit(9)"
    done = caller("exec", quickstart / "runtime.oci.tar", "--", PYTHON, "-c", code)
    assert (done.returncode, done.stdout) == (9, "6 /opt/quickstart/envs/vllm\n"), done.stderr


def test_exec_options(caller: Caller, quickstart: Path) -> None:
    (caller.home / "shared").mkdir(exist_ok=True)
    (caller.home / "shared/file").write_text("shared\n")
    done = caller(
        "exec", "--env", "A=1", "--user", "7777", "--bind", f"{caller.home}/shared:/mnt", "--workdir", "/mnt",
        quickstart / "runtime.oci.tar", "--", "/bin/sh", "-c", "echo $A $PWD; id -u; cat file; echo x > new || exit 4",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (4, "1 /mnt\n7777\nshared\n"), done.stderr


def test_exec_of_a_missing_program_names_it(caller: Caller, quickstart: Path) -> None:
    done = caller("exec", quickstart / "runtime.oci.tar", "--", "no-such-program")
    assert (done.returncode, done.stdout) == (127, "")
    assert "'no-such-program'" in done.stderr and "/usr/bin" in done.stderr


def test_nothing_stays(caller: Caller, quickstart: Path) -> None:
    """No mount, no record of a run and no folder for them; only the staged tree and what was asked for."""
    state = caller.home / "state"
    state.mkdir()
    if caller.ordinary:
        os.chown(state, UID, UID)
    before = mount_points(state, caller.cache)
    words = ("exec", quickstart / "runtime.oci.tar", "--", "/bin/sh", "-c", "echo x > /x")
    assert caller(*words, TMPDIR=str(state)).returncode == 0
    assert mount_points(state, caller.cache) == before
    assert list(state.iterdir()) == []
    assert not list(caller.cache.glob("staged/*/rootfs/x"))


def test_debian_passes_its_checks(caller: Caller, distribution: Path) -> None:
    receipt = gates(caller, [distribution / "runtime.oci.tar"], "--checks", distribution.parent / "checks.json")
    assert set(outcomes(receipt).values()) == {"pass"}
    assert [c["name"] for c in DEBIAN_CHECKS] == list(outcomes(receipt))[3:]
    assert receipt["predicate"]["host"]["os"] == "debian 12"
