"""check_runtime.py, run as a program with nothing installed."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FILES = Path(__file__).parents[2] / "layers/files"
PYTHON = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


# Python's search path as the program makes it; at the end, so that nothing of the tests is hidden.
sys.path.append(str(FILES))
cluster, host, installation, shipped = (
    importlib.import_module(f"runtime_check.{name}") for name in ("cluster", "host", "installation", "shipped")
)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A runtime whose tiers are venvs of this Python, with the shipped checks and inventories."""
    root = tmp_path / "rt"
    for tier in ("base", "vllm"):
        subprocess.run([PYTHON, "-m", "venv", "--without-pip", root / "envs" / tier], check=True)
        inventory = {"packages": [{"name": "torch", "version": "1"}], "omitted": {"deep-ep": "needs nvcc"} if tier == "base" else {}}
        (root / f"inventory-{tier}.json").write_text(json.dumps(inventory))
    shutil.copytree(FILES / "checks", root / "checks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(FILES / "runtime_check", root / "runtime_check", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("check_runtime.py", "nrl-run-record"):
        shutil.copy(FILES / name, root)
    for tool in installation.TOOLS:
        (root / "cuda/bin").mkdir(parents=True, exist_ok=True)
        shutil.copy("/bin/true", root / "cuda/bin" / tool)
    (root / "cuda/include").mkdir()
    (root / "cuda/include/cuda.h").touch()
    (root / "cuda/nvvm/libdevice").mkdir(parents=True)
    (root / ".nrl-install").mkdir()
    (root / ".nrl-install/installed.json").write_text(json.dumps({"sha256": "ab" * 32, "prefix": str(root)}))
    return root


def run(prefix: Path, *argv: str, **env: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    given = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **env}
    done = subprocess.run(
        [PYTHON, str(prefix / "check_runtime.py"), "--json", "-", *argv], env=given, capture_output=True, text=True
    )
    result = json.loads(done.stdout)
    assert result["ok"] is (done.returncode == 0)
    return done.returncode, {r["name"]: r for r in result["checks"]}, done.stderr


def test_a_fit_host_without_a_driver(prefix: Path) -> None:
    _, rows, text = run(prefix)
    assert {n for n, r in rows.items() if r["outcome"] == "fail"} <= {"compiler", "shm"}, text
    assert rows["interpreter:vllm"]["outcome"] == rows["installed"]["outcome"] == "pass"
    if not os.path.exists("/proc/driver/nvidia/version"):
        assert rows["driver"]["outcome"] == "deferred"
    assert "deferred driver" in text or "pass     driver" in text


@pytest.mark.parametrize("recorded", ["by the link", "by the folder"])
@pytest.mark.parametrize("called", ["by the link", "by the folder"])
def test_a_link_above_the_prefix_is_no_move(prefix: Path, tmp_path: Path, recorded: str, called: str) -> None:
    """Home folders are often behind one. The prefix is what it was called when it was installed."""
    (tmp_path / "home").symlink_to(prefix.parent)
    places = {"by the link": tmp_path / "home/rt", "by the folder": prefix}
    record = {"sha256": "ab" * 32, "prefix": str(places[recorded])}
    (prefix / ".nrl-install/installed.json").write_text(json.dumps(record))
    _, rows, text = run(places[called])
    assert rows["installed"]["outcome"] == "pass", text
    assert rows["prefix"]["reason"] == str(places[recorded])


@pytest.mark.parametrize("how", ["shipped", "given", "relative", "pristine", "none"])
def test_the_source_that_is_imported_needs_the_overlay(prefix: Path, tmp_path: Path, how: str) -> None:
    tree = prefix / "source" if how == "shipped" else tmp_path / "mine"
    (tree / "nemo_rl").mkdir(parents=True)
    if how != "pristine":
        (tree / "nemo_rl/prebuilt_env.py").write_text("NEMO_RL_PREBUILT_ENV_ROOT")
    env = {"given": str(tree), "pristine": str(tree), "relative": "mine"}.get(how)
    _, rows, _ = run(prefix, **({"NEMO_RL_SOURCE_ROOT": env} if env else {}))
    wanted = {"shipped": "pass", "given": "pass", "relative": "fail", "pristine": "fail", "none": None}[how]
    assert (rows["source"]["outcome"] if "source" in rows else None) == wanted
    assert how != "pristine" or "overlay/apply.py" in rows["source"]["reason"]


def test_a_reader_that_leaves_changes_nothing(prefix: Path) -> None:
    for extra in ([], ["--json", "-"]):
        argv = ["bash", "-c", '"$@" | true; exit "${PIPESTATUS[0]}"', "-", PYTHON, str(prefix / "check_runtime.py"), *extra]
        status = run(prefix)[0]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert "Traceback" not in done.stderr and "Broken" not in done.stderr and done.returncode == status


def test_results_are_written_though_the_table_cannot_be_shown(prefix: Path, tmp_path: Path) -> None:
    place = tmp_path / "results.json"
    argv = ["bash", "-c", '"$@" > /dev/full', "-", PYTHON, "-u", str(prefix / "check_runtime.py"), "--json", str(place)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert json.loads(place.read_text())["checks"]


def test_a_terminal_that_lacks_a_letter_gets_the_table(prefix: Path, tmp_path: Path) -> None:
    odd = prefix.rename(prefix.with_name("vé"))
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([PYTHON, str(odd / "check_runtime.py")], capture_output=True, text=True, env=env)
    assert "Traceback" not in done.stderr and "v\\xe9" in done.stdout


@pytest.mark.parametrize(("place", "word"), [("/nonexistent/x", "No such file"), ("/tmp", "a directory")])
def test_a_result_that_cannot_be_written_is_said_before_checks_run(prefix: Path, place: str, word: str) -> None:
    argv = [PYTHON, str(prefix / "check_runtime.py"), "--json", place]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2 and f"{place}: " in done.stderr and word in done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr


def test_checks_that_cannot_be_run_are_a_row(prefix: Path, tmp_path: Path) -> None:
    """A full disk, no folder for temporary files."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tempfile.py").write_text(
        "class TemporaryDirectory:\n def __init__(self, prefix): raise OSError(28, 'No space left on device')\n"
    )
    status, rows, text = run(prefix, "--imports", PYTHONPATH=str(tmp_path / "broken"))
    assert status == 1 and "No space" in rows["checks"]["reason"] and "Traceback" not in text


@pytest.mark.parametrize("version", ["3.9", "3.8"])
def test_an_older_python_is_told_what_to_take(version: str) -> None:
    found = next(Path.home().glob(f".pyenv/versions/{version}*/bin/python3"), None)
    if found is None:
        pytest.skip(f"needs Python {version}")
    done = subprocess.run([found, FILES / "check_runtime.py"], capture_output=True, text=True)
    assert done.returncode == 2 and "envs/base/bin/python" in done.stderr and "Traceback" not in done.stderr


def test_it_writes_no_bytecode_into_the_runtime(prefix: Path) -> None:
    run(prefix, "--gpu", "--imports", NRL_CHECK_LIBCUDA="/nowhere/libcuda.so.1")
    run(prefix, "--imports", "--tier", "base")
    assert [p for place in ("checks", "runtime_check") for p in (prefix / place).rglob("*.pyc")] == []


def test_zero_gpus_is_a_failure(prefix: Path) -> None:
    """B203."""
    status, rows, _ = run(prefix, "--gpu", NRL_CHECK_LIBCUDA="/nowhere/libcuda.so.1")
    assert status == 1 and rows["gpus"]["outcome"] == "fail" and "zero GPUs" in rows["gpus"]["reason"]


def test_imports_run_in_a_network_of_their_own(prefix: Path) -> None:
    """An absent package fails by name; what the build left out is skipped with its reason."""
    (prefix / "envs/automodel").symlink_to("base")
    shutil.copy(prefix / "inventory-base.json", prefix / "inventory-automodel.json")
    status, rows, _ = run(prefix, "--imports", "--tier", "base", "--tier", "automodel")
    assert status == 1 and "torch" in rows["imports:base"]["reason"]
    if os.geteuid() == 0:
        assert "network" not in rows["imports:base"]["reason"]
    assert rows["import:deep_ep"]["outcome"] == "skipped" and "needs nvcc" in rows["import:deep_ep"]["reason"]


def test_what_one_tier_lacks_is_skipped_for_that_tier_only(prefix: Path) -> None:
    """Review 24: a package that this tier has, and that is broken there, is no omission of another tier's."""
    (prefix / "envs/automodel").symlink_to("base")
    (prefix / "inventory-automodel.json").write_text(json.dumps({"packages": [], "omitted": {}}))
    inventory = {"packages": [], "omitted": {"deep-ep": "needs nvcc"}}
    (prefix / "inventory-vllm.json").write_text(json.dumps(inventory))
    _, rows, _ = run(prefix, "--imports", "--tier", "automodel", "--tier", "vllm")
    assert rows["import:deep_ep"]["outcome"] == "fail"
    assert rows["import:deep_ep:vllm"]["outcome"] == "skipped"


def test_a_tier_that_runs_off_another_interpreter_than_the_shipped_one_fails(prefix: Path) -> None:
    """Review 16: it works on the build machine only."""
    (prefix / "python").mkdir()
    _, rows, _ = run(prefix)
    assert rows["interpreter:vllm"]["outcome"] == "fail" and "runs off" in rows["interpreter:vllm"]["reason"]


def test_a_users_full_caches_are_not_the_checks(prefix: Path, tmp_path: Path) -> None:
    """A home that was used before is no reason to fail, and stays as it is."""
    home, hub = tmp_path / "home", tmp_path / "hub"
    for folder in (home / ".cache/vllm", hub):
        folder.mkdir(parents=True)
        (folder / "model").write_text("kept")
    shutil.copy(FILES / "activate.sh", prefix)
    _, rows, _ = run(prefix, "--imports", "--tier", "base", HOME=str(home), HF_HOME=str(hub))
    assert "caches" not in rows["imports:base"]["reason"]
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file() and p.parent in (home / ".cache/vllm", hub)) == [
        "model", "model",
    ]  # fmt: skip


def test_a_host_toolkit_that_lacks_tools_is_for_the_gpu_run_to_judge(prefix: Path, tmp_path: Path) -> None:
    (prefix / "cuda").rename(tmp_path / "host-cuda")
    (tmp_path / "host-cuda/bin/nvcc").unlink()
    _, rows, _ = run(prefix, CUDA_HOME=str(tmp_path / "host-cuda"))
    assert rows["cuda-tools"]["outcome"] == "deferred" and "nvcc" in rows["cuda-tools"]["reason"]


@pytest.mark.parametrize(
    ("damage", "name"),
    [("interpreter", "interpreter:vllm"), ("tool", "cuda-tools"), ("moved", "installed"), ("tiers", "tiers")],
)
def test_what_is_wrong_is_named(prefix: Path, damage: str, name: str) -> None:
    match damage:
        case "interpreter":
            (prefix / "envs/vllm/bin/python").unlink()
        case "tool":
            (prefix / "cuda/bin/cuobjdump").unlink()
        case "moved":
            prefix = prefix.rename(prefix.with_name("moved"))
        case "tiers":
            shutil.rmtree(prefix / "envs")
    status, rows, _ = run(prefix)
    assert status == 1 and rows[name]["outcome"] == "fail"


@pytest.mark.parametrize(
    "env",
    [{"NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"}, {"NRL_CONTAINER": "1"}, {"CUDA_HOME": ":/usr/local/cuda"},
     {"LD_LIBRARY_PATH": "/a::/b"}],
)  # fmt: skip
def test_variables_that_change_what_runs(prefix: Path, env: dict[str, str]) -> None:
    """B194."""
    _, rows, _ = run(prefix, **env)
    assert rows["variables"]["outcome"] == "fail" and next(iter(env)) in rows["variables"]["reason"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
@pytest.mark.parametrize(("name", "outcome"), [("NRL_CACHE", "fail"), ("XDG_CACHE_HOME", "deferred")])
def test_caches_where_nothing_can_be_loaded(prefix: Path, tmp_path: Path, name: str, outcome: str) -> None:
    """Of a shell that is not activated it is a guess."""
    place = tmp_path / "noexec"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec,size=1m", "none", place], check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        rows = run(prefix, **{name: str(place / "new")})[1]
    finally:
        subprocess.run(["umount", place], check=True)
    assert rows["caches"]["outcome"] == outcome and "noexec" in rows["caches"]["reason"]
    assert run(prefix, **{name: str(tmp_path / "new")})[1]["caches"]["outcome"] == "pass"


def test_a_long_folder_for_rays_sockets(prefix: Path, tmp_path: Path) -> None:
    """B197, B198."""
    long = tmp_path / ("t" * 60)
    long.mkdir()
    _, rows, _ = run(prefix, TMPDIR=str(long))
    assert rows["ray-folder"]["outcome"] == "fail"
    _, rows, _ = run(prefix, TMPDIR=str(long), RAY_TMPDIR="/tmp")
    assert rows["ray-folder"]["outcome"] == "pass"


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", True),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.51.03  Wed", False),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.10  Wed", True),
        ("nonsense", False),
    ],
)
def test_driver_releases(tmp_path: Path, text: str, good: bool) -> None:
    (tmp_path / "version").write_text(text)
    assert (host.driver(True, str(tmp_path / "version"))["outcome"] == "pass") is good


def node(host: str, **changes: Any) -> dict[str, Any]:
    return {"host": host, "there": True, "sha256": "a", "inventories": "b", "python": "3.13.13",
            "executable": "/p/envs/base/bin/python", "root": "/p/envs", **changes}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"there": False}, "node:two"), ({"root": "/q/envs"}, "node:two"), ({"root": ""}, "node:two"),
        ({"root": "", "same": True}, "node:two"), ({"root": "/q/envs", "same": False}, "node:two"),
        ({"error": "lost"}, "node:two"), ({"sha256": "c"}, "cluster"), ({"python": "3.12.1"}, "cluster"),
    ],
)  # fmt: skip
def test_nodes_that_differ(change: dict[str, Any], row: str) -> None:
    rows = cluster.judge_cluster(Path("/p"), {"1": node("one"), "2": node("two", **change)})
    assert {r["name"]: r["outcome"] for r in rows}[row] == "fail"


def test_equal_nodes_pass() -> None:
    nodes = {"1": node("one"), "2": node("two"), "3": node("three", root="/link/p/envs", same=True)}
    rows = cluster.judge_cluster(Path("/p"), nodes)
    assert [r["outcome"] for r in rows] == ["pass"] * 4


def test_without_a_cluster_it_fails(prefix: Path) -> None:
    status, rows, _ = run(prefix, "--cluster")
    assert status == 1 and rows["cluster"]["outcome"] == "fail"


@pytest.mark.parametrize("name", ["check_runtime.py", "nrl-run-record", "source_overlay/apply.py", "source_overlay/prebuilt_env.py",
                                  *(f"runtime_check/{p.name}" for p in sorted((FILES / "runtime_check").glob("*.py")))])  # fmt: skip
def test_shipped_programs_compile_on_python_3_10(name: str) -> None:
    old = next(map(str, Path.home().glob(".pyenv/versions/3.10*/bin/python3")), None) or shutil.which("python3.10")
    if old is None:
        pytest.skip("not installed: python3.10")
    code = f"compile(open({str(FILES / name)!r}).read(), 'x', 'exec')"
    subprocess.run([old, "-c", code], check=True)
