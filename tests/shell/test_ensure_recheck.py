"""ensure_runtime.sh on what is there already: installations that were changed or moved, and what killed starts left."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.waits import until
from tests.shell.ensure import PYTHON, SCRIPT, archive_of, member, script, sha

LIB = "envs/base/lib/python3.13/site-packages"
VLLM = f"{LIB}/vllm/v1/executor"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """With bytecode of some modules, as real ones have it."""
    names = (f"{LIB}/six.py", f"{LIB}/__pycache__/six.cpython-313.pyc", f"{LIB}/plain.py", f"{VLLM}/ray_executor.py",
             f"{VLLM}/__pycache__/ray_executor.cpython-313.pyc")  # fmt: skip
    return archive_of(tmp_path, *(member(f"opt/rt/{name}", data=b"shipped") for name in names))


@pytest.fixture
def root(archive: Path, tmp_path: Path) -> Path:
    place = tmp_path / "in/rt"
    assert script(archive, sha(archive), place).returncode == 0
    return place


CACHE = f"{LIB}/__pycache__"


@pytest.mark.parametrize(
    "change",
    [
        f"printf evilevi > {CACHE}/six.cpython-313.pyc",
        f": > {CACHE}/six.cpython-313.pyc",
        f"rm {CACHE}/six.cpython-313.pyc",
        f"echo x > {CACHE}/plain.cpython-313.pyc",
        f"echo x > {CACHE}/six.cpython-313.opt-1.pyc",
        f"echo x > {CACHE}/absent.cpython-310.pyc",
        f"mkdir -p {LIB}/new/__pycache__; echo x > {LIB}/new/__pycache__/evil.py",
        f"echo x > {CACHE}/evil.so",
        f"mkdir {LIB}/namespace",
        f"chmod 000 {LIB}",
        f"chmod 777 {LIB}",
        "chmod 700 .",
        f"mv {LIB} elsewhere; ln -s $PWD/elsewhere {LIB}",
        f"printf evilevi > {VLLM}/__pycache__/ray_executor.cpython-313.pyc",
    ],
)
def test_bytecode_and_folders_belong_to_the_installation(archive: Path, root: Path, change: str) -> None:
    """Python believes bytecode: what stands in it is what runs."""
    subprocess.run(["bash", "-euc", change], cwd=root, check=True)
    done = script(archive, sha(archive), root)
    assert done.returncode == 3 and "install.damaged" in done.stderr, done.stderr


def test_bytecode_that_no_python_of_the_archive_reads_is_no_damage(archive: Path, root: Path) -> None:
    """The host's Python writes it where nobody forbids it."""
    (root / CACHE / "six.cpython-310.pyc").write_text("x")
    assert script(archive, sha(archive), root).returncode == 0


def test_a_module_that_is_patched_at_run_time_may_get_new_bytecode(archive: Path, root: Path) -> None:
    (root / VLLM / "ray_executor.py").write_text("patched")
    (root / VLLM / "__pycache__/ray_executor.cpython-313.pyc").write_text("of the patched one")
    assert script(archive, sha(archive), root).returncode == 0


def test_stray_bytecode_can_be_removed_and_all_is_well(archive: Path, root: Path) -> None:
    stray = root / VLLM / "__pycache__/other.cpython-313.pyc"
    stray.write_text("x")
    assert "remove only these" in script(archive, sha(archive), root).stderr
    stray.unlink()
    (root / LIB / "vllm/__pycache__").mkdir()
    assert script(archive, sha(archive), root).returncode == 0


def test_an_installation_that_lists_no_folders_is_still_good(archive: Path, root: Path) -> None:
    """As earlier versions of the script left them."""
    own = root / ".nrl-install"
    listed = json.loads(gzip.decompress((own / "files.json.gz").read_bytes()))
    packed = gzip.compress(json.dumps({k: v for k, v in listed.items() if v[0] != "d"}).encode())
    (own / "files.json.gz").write_bytes(packed)
    record = json.loads((own / "installed.json").read_text())
    record |= {"schema": 1, "list_sha256": hashlib.sha256(packed).hexdigest()}
    (own / "installed.json").write_text(json.dumps(record))
    assert script(archive, sha(archive), root).returncode == 0


def test_a_moved_installation_is_at_home_after_the_check(archive: Path, root: Path) -> None:
    moved = root.rename(root.with_name("moved"))
    done = script(archive, sha(archive), moved)
    assert done.returncode == 0 and "moved here" in done.stderr
    assert json.loads((moved / ".nrl-install/installed.json").read_text())["prefix"] == str(moved)
    assert "moved here" not in script(archive, sha(archive), moved).stderr


@pytest.mark.parametrize(
    "given",
    [{"NRL_JOBS": "abc"}, {"NRL_JOBS": "0"}, {"NRL_JOBS": "-1"}, {"NRL_LOCK_TIMEOUT": "abc"}, {"NRL_RETRIES": "abc"},
     {"NRL_RETRIES": "08"}, {"NRL_RETRY_SECONDS": "x"}, {"NRL_STALL_SECONDS": "1 2"}, {"NRL_RECHECK": "Quick"}],
)  # fmt: skip
def test_variables_are_looked_at_before_work(archive: Path, tmp_path: Path, given: dict[str, str]) -> None:
    for source in (archive, "https://huggingface.co/x/y"):
        done = script(source, sha(archive), tmp_path / "in/rt", **given)
        assert done.returncode == 2 and next(iter(given)) in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "in").exists()


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Takes a while: its files are many, and its gzip has no members."""
    path = tmp_path / "large.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as out:
        for number in range(20000):
            out.addfile(tarfile.TarInfo(f"opt/rt/envs/base/lib/{number % 50}/{number}.py"))
    return path


def ended_midway(archive: Path, prefix: Path, end: Callable[[int], None]) -> tuple[int, str]:
    """Status and words of a start in a session of its own that ``end`` met in the middle of unpacking.

    One that was done before we got to it does not count.
    """
    prefix.parent.mkdir()
    argv = ["bash", str(SCRIPT), str(archive), sha(archive), str(prefix)]
    env = {"PATH": os.environ["PATH"], "NRL_PYTHON": PYTHON}
    for _ in range(20):
        run = subprocess.Popen(
            argv, env=env, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        until(lambda: any(prefix.parent.glob(".rt.staging-*/opt/rt/envs/base/lib/1")) or prefix.exists())
        end(run.pid)
        _, said = run.communicate(timeout=300)
        if not prefix.exists():
            return run.returncode, said
        shutil.rmtree(prefix)
    raise AssertionError("it is always done before")


@pytest.mark.parametrize("whom", ["group", "script"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_with_a_word(large: Path, tmp_path: Path, number: signal.Signals, whom: str) -> None:
    """Slurm sends SIGTERM to all or to the script alone, a terminal SIGINT to all."""
    kill = os.killpg if whom == "group" else os.kill
    status, said = ended_midway(large, tmp_path / "in/rt", lambda pid: kill(pid, number))
    assert status == 128 + number and "Traceback" not in said
    assert "stopped by SIG" in said and "the next start removes it" in said
    assert [p.name for p in (tmp_path / "in").iterdir()] == [".rt.failed"]


def test_what_a_killed_start_left_is_removed_by_the_next(large: Path, archive: Path, tmp_path: Path) -> None:
    ended_midway(large, tmp_path / "in/rt", lambda pid: os.killpg(pid, signal.SIGKILL))
    left = [p.name for p in (tmp_path / "in").iterdir() if "staging" in p.name]
    strange = tmp_path / "in/.rt.staging-another.host-7"
    strange.mkdir()
    done = script(archive, sha(archive), tmp_path / "in/rt")
    assert done.returncode == 0 and len(left) == 1 and left[0] in done.stderr and strange.name in done.stderr
    assert sorted(p.name for p in (tmp_path / "in").iterdir()) == [strange.name, "rt"]
    assert stat.S_IMODE((tmp_path / "in/rt").stat().st_mode) == 0o755


def test_what_is_mounted_in_what_a_start_left_is_not_removed(large: Path, archive: Path, tmp_path: Path) -> None:
    """Kept for diagnosis: whoever looks into it with something of the host's mounted there keeps that (B199)."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("x")
    ended_midway(large, tmp_path / "in/rt", lambda pid: os.killpg(pid, signal.SIGKILL))
    (left,) = [p for p in (tmp_path / "in").iterdir() if "staging" in p.name]
    (left / "a b").mkdir()
    mounted = f'mount --bind "{tmp_path}/precious" "{left}/a b" && exec bash "$@"'
    words = ["unshare", "-rm", "sh", "-c", mounted, "sh", str(SCRIPT), str(archive), sha(archive), f"{tmp_path}/in/rt"]
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "NRL_PYTHON": PYTHON}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{left} stays" in done.stderr and (tmp_path / "precious/file").read_text() == "x"
