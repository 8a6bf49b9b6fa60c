"""activate.sh in real shells: what it sets, keeps and gives back."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "layers/files/activate.sh"
PYTHON = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
DUMP = f"{PYTHON} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
# More shells to try, separated by colons: Ubuntu 22.04 has Bash 5.1.
MORE = [f"{shell} -euo pipefail -c" for shell in os.environ.get("OCI_BUILDER_BASHES", "").split(":") if shell]
SHELLS = ["bash -eu -c", "zsh -f -eu -c", "bash -c", *MORE]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A prefix with what activate.sh looks at."""
    place = tmp_path / "rt"
    site = place / "envs/base/lib/python3.13/site-packages/nvidia"
    for folder in ("cudnn/lib", "cu13/lib"):
        (site / folder).mkdir(parents=True)
    (place / "envs/base/bin").mkdir()
    (place / "envs/base/bin/python").symlink_to(shutil.which("true") or "/bin/true")
    (place / "cuda").mkdir()
    (place / "source/nemo_rl").mkdir(parents=True)
    overlaid(place / "source")
    (place / ".nrl-install").mkdir()
    (place / ".nrl-install/installed.json").write_text(json.dumps({"sha256": "ab" * 32}, indent=1))
    shutil.copy(SCRIPT, place)
    return place


def overlaid(tree: Path) -> None:
    (tree / "nemo_rl").mkdir(parents=True, exist_ok=True)
    (tree / "nemo_rl/prebuilt_env.py").write_text('VARIABLE = "NEMO_RL_PREBUILT_ENV_ROOT"\n')


def run(shell: str, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = shell.split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"not installed: {words[0]}")
    given = {"PATH": os.environ["PATH"], "HOME": "/home/lab", **env}
    return subprocess.run([*words, script], env=given, capture_output=True, text=True, timeout=300)


def environment(shell: str, script: str, **env: str) -> dict[str, str]:
    done = run(shell, f"{script}; {DUMP}", **env)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return {k: v for k, v in found.items() if k not in ("_", "SHLVL", "OLDPWD", "PWD")}


@pytest.mark.parametrize("shell", SHELLS)
def test_sets_paths_caches_and_offline(root: Path, shell: str) -> None:
    """B157: no JIT cache is shipped, and one of another archive is in another folder whatever the times say."""
    env = environment(shell, f". {root}/activate.sh", CUDA_VISIBLE_DEVICES="3,5", NCCL_DEBUG="INFO", PYTHONHOME="/x")
    assert env["NEMO_RL_PREBUILT_ENV_ROOT"] == f"{root}/envs" and env["VIRTUAL_ENV"] == f"{root}/envs/base"
    assert env["PATH"].split(":")[:3] == [f"{root}/envs/base/bin", f"{root}/bin", f"{root}/cuda/bin"]
    assert (env["PYTHONPATH"], env["CUDA_HOME"]) == (f"{root}/source", f"{root}/cuda")
    assert (env["CUDA_VISIBLE_DEVICES"], env["NCCL_DEBUG"], env["HF_HUB_OFFLINE"]) == ("3,5", "INFO", "1")
    assert "PYTHONHOME" not in env and "NRL_CONTAINER" not in env
    site = f"{root}/envs/base/lib/python3.13/site-packages/nvidia"
    assert env["LD_LIBRARY_PATH"] == f"{site}/cudnn/lib:{site}/cu13/lib"
    caches = [env[n] for n in ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT")]
    assert all(c.startswith("/home/lab/.cache/nrl-runtime/abababababababab/") for c in caches)
    assert not any("stubs" in v or "::" in v for v in env.values())


@pytest.mark.parametrize("shell", SHELLS)
def test_deactivate_gives_everything_back(root: Path, shell: str) -> None:
    given = {"LD_LIBRARY_PATH": "/a b:/c", "NRL_CONTAINER": "1", "PYTHONPATH": "it's $x \"q\"", "HF_HOME": ""}
    before = environment(shell, ":", **given)
    after = environment(shell, f". {root}/activate.sh; . {root}/activate.sh; deactivate_nrl", **given)
    assert after == before
    left = run(shell, f". {root}/activate.sh; deactivate_nrl; set", **given)
    assert left.returncode == 0
    assert [line for line in left.stdout.splitlines() if line.lower().startswith("_nrl")] == []


@pytest.mark.parametrize("shell", SHELLS)
def test_twice_is_once(root: Path, shell: str) -> None:
    given = {"LD_LIBRARY_PATH": ":/keep::", "CPLUS_INCLUDE_PATH": ""}
    once = environment(shell, f". {root}/activate.sh", **given)
    assert environment(shell, f". {root}/activate.sh; . {root}/activate.sh", **given) == once
    assert once["LD_LIBRARY_PATH"].endswith("/cu13/lib:/keep")
    assert once["CPLUS_INCLUDE_PATH"] == f"{root}/cuda/include/cccl"


@pytest.mark.parametrize("shell", ["bash -eu -c", "zsh -f -eu -c"])
def test_a_shell_that_an_activated_one_started_gets_the_same(root: Path, shell: str) -> None:
    """tmux, a job that takes the login's environment over: no longer paths, no other caches."""
    here = f". {root}/activate.sh"
    once = environment(shell, here, LD_LIBRARY_PATH="/mine:/also", LC_CTYPE="C.UTF-8")
    words = shell.rpartition(" ")[0]
    inner = f"{here}; {words} -c '. {root}/activate.sh; {words} -c \". {root}/activate.sh; env -0 > {root}/../found\"'"
    done = run(shell, inner, LD_LIBRARY_PATH="/mine:/also", LC_CTYPE="C.UTF-8")
    assert done.returncode == 0, done.stderr
    pairs = (entry.partition("=") for entry in (root.parent / "found").read_text().split("\0") if entry)
    found = {name: value for name, _, value in pairs if name not in ("_", "SHLVL", "OLDPWD", "PWD")}
    assert found == once


def test_another_runtime_in_such_a_shell_has_caches_of_its_own(root: Path) -> None:
    other = root.parent / "other"
    shutil.copytree(root, other, symlinks=True)
    (other / ".nrl-install/installed.json").write_text(json.dumps({"sha256": "cd" * 32}, indent=1))
    done = run("bash -eu -c", f". {root}/activate.sh; bash -c '. {other}/activate.sh; echo $HF_HOME $WANDB_DIR $NRL_CACHE'")
    place = "/home/lab/.cache/nrl-runtime/" + "cd" * 8
    assert done.stdout.split() == [f"{place}/hf", f"{place}/wandb", place]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("call", [". ./activate.sh", ". ../rt/activate.sh", "cd /; . {root}/activate.sh", ". ../link.sh"])
def test_the_prefix_does_not_depend_on_the_call(root: Path, shell: str, call: str) -> None:
    """B146. A link elsewhere is not the prefix: that is said."""
    (root.parent / "link.sh").symlink_to(root / "activate.sh")
    done = run(shell, f"cd {root}; {call.format(root=root)}; echo \"$NRL_RUNTIME_ROOT\"")
    if "link" in call:
        assert "holds no runtime" in done.stderr
    else:
        assert done.stdout.strip() == str(root), done.stderr


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"}, "exclude each other"),
        ({"NEMO_RL_SOURCE_ROOT": "/nowhere"}, "no nemo_rl"),
        ({"NRL_CACHE_ROOT": "{root}/cache"}, "inside the prefix"),
        ({"NRL_CACHE_ROOT": "cache"}, "not an absolute path"),
    ],
)
def test_refusals_change_nothing(root: Path, shell: str, given: dict[str, str], word: str) -> None:
    given = {k: v.format(root=root) for k, v in given.items()}
    before = environment(shell, ":", **given)
    done = run(shell, f". {root}/activate.sh || {{ {DUMP}; }}", **given)
    assert word in done.stderr
    after = json.loads(done.stdout.splitlines()[-1])
    assert {k: v for k, v in after.items() if k not in ("_", "SHLVL", "OLDPWD", "PWD")} == before


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("spelled", ["cache", "prefix"])
def test_a_cache_in_the_prefix_is_found_through_links(root: Path, tmp_path: Path, shell: str, spelled: str) -> None:
    (tmp_path / "link").symlink_to(root)
    cache, prefix = (tmp_path / "link", root) if spelled == "cache" else (root, tmp_path / "link")
    done = run(shell, f". {prefix}/activate.sh || exit 9", NRL_CACHE_ROOT=str(cache / "new/c"))
    assert done.returncode == 9 and "inside the prefix" in done.stderr


def test_overlay_online_and_short_ray_folder(root: Path, tmp_path: Path) -> None:
    """B197, B198: a scheduler's TMPDIR does not lengthen Ray's sockets."""
    overlaid(tmp_path / "mine")
    given = {"NEMO_RL_SOURCE_ROOT": str(tmp_path / "mine"), "NRL_ONLINE": "1", "TMPDIR": "/t" * 45}
    env = environment("bash -eu -c", f". {root}/activate.sh", **given)
    assert env["PYTHONPATH"] == str(tmp_path / "mine") and "HF_HUB_OFFLINE" not in env
    assert (env["RAY_TMPDIR"], env["TMPDIR"]) == ("/tmp", "/t" * 45)
    kept = environment("bash -eu -c", f". {root}/activate.sh", RAY_TMPDIR="/scratch/r")
    assert kept["RAY_TMPDIR"] == "/scratch/r"


@pytest.mark.parametrize("shell", ["bash -eu -c", "zsh -f -eu -c"])
@pytest.mark.parametrize("home", ["unset HOME", "HOME=", "HOME=/"])
def test_without_home_and_without_record(root: Path, shell: str, home: str) -> None:
    shutil.rmtree(root / ".nrl-install")
    env = environment(shell, f"{home}; . {root}/activate.sh")
    assert env["TRITON_CACHE_DIR"].startswith(f"{pwd.getpwuid(os.getuid()).pw_dir}/.cache/nrl-runtime/prefix-")


@pytest.fixture
def stranger(root: Path) -> Iterator[int]:
    """A user that the system does not know, as containers and batch systems have them."""
    if os.geteuid() != 0:
        pytest.skip("needs root to be somebody else")
    for place in (root, *root.parents):
        if place != Path("/tmp") and place.is_relative_to("/tmp"):
            place.chmod(place.stat().st_mode | 0o055)
    user = 70_000_000 + secrets.randbelow(10**7)
    place = Path(f"/tmp/nrl-{user}")
    yield user
    shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink(missing_ok=True)


def as_stranger(user: int, shell: str, script: str) -> subprocess.CompletedProcess[str]:
    words = ["setpriv", "--reuid", str(user), "--clear-groups", *shell.split(), script]
    env = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(words, env=env, cwd="/", capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("shell", ["bash -eu -c", "zsh -f -eu -c"])
def test_a_user_without_a_home_has_caches_of_his_own(root: Path, stranger: int, shell: str) -> None:
    """B195."""
    done = as_stranger(stranger, shell, f"umask 000; . {root}/activate.sh; echo $NRL_CACHE")
    assert done.stdout.startswith(f"/tmp/nrl-{stranger}/.cache/nrl-runtime/"), done.stderr
    found = Path(f"/tmp/nrl-{stranger}").stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (stranger, 0o700)


@pytest.mark.parametrize("planted", ["folder", "link", "file"])
def test_caches_that_somebody_else_made_are_not_used(root: Path, tmp_path: Path, stranger: int, planted: str) -> None:
    """What is compiled and loaded there would be his."""
    place = Path(f"/tmp/nrl-{stranger}")
    match planted:
        case "folder":
            place.mkdir(mode=0o777)
            place.chmod(0o777)
        case "link":
            (tmp_path / "his").mkdir()
            os.chown(tmp_path / "his", stranger, stranger)
            place.symlink_to(tmp_path / "his")
        case "file":
            place.touch()
    done = as_stranger(stranger, "bash -c", f". {root}/activate.sh && echo activated")
    assert done.returncode == 2 and done.stdout == "" and "set NRL_CACHE_ROOT" in done.stderr
    assert "/tmp" in as_stranger(stranger, "bash -c", f"NRL_CACHE_ROOT=/tmp . {root}/activate.sh; echo $NRL_CACHE").stdout


def test_a_place_where_no_cache_can_be_written_is_said(root: Path, stranger: int) -> None:
    done = as_stranger(stranger, "bash -c", f"HOME=/nonexistent/x; . {root}/activate.sh && echo activated")
    assert done.stdout == "activated\n" and "caches cannot be written" in done.stderr
    assert "cannot be written" not in as_stranger(stranger, "bash -c", f"HOME=/tmp/new; . {root}/activate.sh").stderr


@pytest.mark.parametrize("shell", [["dash"], ["busybox", "sh"], ["mksh"]])
def test_another_shell_goes_on_unchanged(root: Path, shell: list[str]) -> None:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"not installed: {shell[0]}")
    script = f". {root}/activate.sh; echo $? ${{NRL_RUNTIME_ROOT-none}}"
    done = subprocess.run([*shell, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "2 none\n" and done.stderr.count("\n") == 1 and "bash" in done.stderr


def test_odd_folders_are_refused(root: Path) -> None:
    odd = root.parent / "a b"
    root.rename(odd)
    done = run("bash -c", f". '{odd}/activate.sh'")
    assert done.returncode == 2 and "characters" in done.stderr


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("setting", ["IFS=$'\\n'", "IFS=", "IFS=_", "IFS=N/", "set -f"])
def test_the_shells_own_settings_do_not_matter(root: Path, shell: str, setting: str) -> None:
    given = {"PYTHONPATH": "/mine", "NRL_CONTAINER": "1"}
    assert environment(shell, f"{setting}; . {root}/activate.sh", **given) == environment(
        shell, f". {root}/activate.sh", **given
    )
    again = f"{setting}; . {root}/activate.sh; . {root}/activate.sh; deactivate_nrl"
    assert environment(shell, again, **given) == environment(shell, ":", **given)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_source_tree_without_the_overlay_is_refused(root: Path, tmp_path: Path, shell: str) -> None:
    """Its workers would call uv, whatever NEMO_RL_PREBUILT_ENV_ROOT says."""
    (tmp_path / "pristine/nemo_rl").mkdir(parents=True)
    done = run(shell, f". {root}/activate.sh || echo refused", NEMO_RL_SOURCE_ROOT=str(tmp_path / "pristine"))
    assert done.stdout.strip() == "refused" and f"{root}/overlay/apply.py {tmp_path}/pristine" in done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_a_relative_source_tree_is_made_absolute(root: Path, tmp_path: Path, shell: str) -> None:
    overlaid(tmp_path / "s s")
    env = environment(shell, f"cd {tmp_path}; . {root}/activate.sh; cd /", NEMO_RL_SOURCE_ROOT="s s")
    assert env["PYTHONPATH"] == env["NEMO_RL_SOURCE_ROOT"] == str(tmp_path / "s s")
