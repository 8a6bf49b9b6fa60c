"""The source overlay: on a stand-in package with upstream's call shape, and on the real tree where it is at hand."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

OVERLAY = Path(__file__).parents[2] / "layers/files/source_overlay"
# A checkout of upstream at the overlay's commit; CI without one tests the stand-in only.
UPSTREAM = os.environ.get("NEMO_RL_UPSTREAM", "")
# An interpreter that has Ray, to import upstream's own registry with.
UPSTREAM_PYTHON = os.environ.get("NEMO_RL_UPSTREAM_PYTHON", "")

STAND_IN = {
    "nemo_rl/__init__.py": "",
    "nemo_rl/distributed/__init__.py": "",
    "nemo_rl/distributed/virtual_cluster.py": (
        "import sys\n\n\nclass PY_EXECUTABLES:\n    SYSTEM = sys.executable\n"
        + "".join(
            f'    {name} = "uv run --locked {extra}--directory /src"\n'
            for name, extra in {
                "BASE": "", "VLLM": "--extra vllm ", "AUTOMODEL": "--extra automodel ", "MCORE": "--extra mcore ",
                "FSDP": "--extra fsdp ", "QUANT": "--extra modelopt --extra vllm ",
            }.items()
        )
    ),
    "nemo_rl/distributed/registry.py": (
        "from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES as P\n"
        "R = {'a.V': P.VLLM, 'a.A': P.AUTOMODEL, 'a.B': P.BASE, 'a.S': P.SYSTEM, 'a.M': P.MCORE, 'a.F': P.FSDP,\n"
        "     'a.Q': P.QUANT, 'a.Own': '/somewhere/python'}\n"
        "def get(fqn):\n"
        "    return R[fqn]\n"
    ),
}  # fmt: skip
INSERT = [
    {"after": 1, "lines": ["from nemo_rl.distributed import prebuilt_env", "prebuilt_env.enabled()"]},
    {"after": 4, "lines": ["    if prebuilt_env.enabled():", "        return prebuilt_env.resolve(R[fqn], fqn)"]},
]
ASK = "import json, sys; from nemo_rl.distributed.registry import R, get; print(json.dumps(%s))"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"overlay_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


apply = load(OVERLAY / "apply.py")


def sha(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The stand-in, and an overlay for it with the real module beside the real script."""
    root, overlay = tmp_path / "src", tmp_path / "overlay"
    for name, text in STAND_IN.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copytree(OVERLAY, overlay, ignore=shutil.ignore_patterns("__pycache__"))
    data = (root / "nemo_rl/distributed/registry.py").read_bytes()
    target = {"path": "nemo_rl/distributed/registry.py", "sha256": sha(data), "insert": INSERT}
    target["patched"] = sha(apply.patched(data, INSERT))
    new = [{"path": "nemo_rl/distributed/prebuilt_env.py", "from": "prebuilt_env.py"}]
    (overlay / "overlay.json").write_text(
        json.dumps({"name": "stand-in", "commit": "0" * 40, "files": [target], "new": new})
    )
    return root


def run_apply(tree: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(tree.parent / "overlay/apply.py"), str(tree), *more], capture_output=True, text=True
    )


@pytest.fixture
def envs(tmp_path: Path) -> Path:
    for tier in ("base", "automodel", "vllm"):
        python = tmp_path / f"envs/{tier}/bin/python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
    return tmp_path / "envs"


def ask(tree: Path, what: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Evaluate in the tree, with tripwires for uv, pip and git first on PATH: no tool is missed at start (B153)."""
    wires = tree.parent / "wires"
    wires.mkdir(exist_ok=True)
    for name in ("uv", "pip", "git"):
        (wires / name).write_text(f"#!/bin/sh\necho {name} >> {wires}/called\nexit 97\n")
        (wires / name).chmod(0o755)
    given = {"PATH": f"{wires}:{os.environ['PATH']}", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", **env}
    done = subprocess.run([sys.executable, "-c", ASK % what], env=given, capture_output=True, text=True)
    assert not (wires / "called").exists()
    return done


def test_applies_once_and_refuses_another_source(tree: Path) -> None:
    before = (tree / "nemo_rl/distributed/registry.py").read_text()
    assert run_apply(tree, "--check").returncode == 1
    assert (tree / "nemo_rl/distributed/registry.py").read_text() == before
    done = run_apply(tree, "--json")
    assert json.loads(done.stdout)["changed"] == [
        "nemo_rl/distributed/prebuilt_env.py", "nemo_rl/distributed/registry.py",
    ]  # fmt: skip
    assert run_apply(tree, "--check").returncode == 0
    (tree / "nemo_rl/distributed/registry.py").write_text(before + "# mine\n")
    (tree / "nemo_rl/distributed/prebuilt_env.py").unlink()
    refused = run_apply(tree)
    assert refused.returncode == 3 and "registry.py" in refused.stderr
    assert not (tree / "nemo_rl/distributed/prebuilt_env.py").exists()


def test_added_lines_only(tree: Path) -> None:
    before = (tree / "nemo_rl/distributed/registry.py").read_text().splitlines()
    assert run_apply(tree).returncode == 0
    after = (tree / "nemo_rl/distributed/registry.py").read_text().splitlines()
    added = [line for one in INSERT for line in one["lines"]]  # type: ignore[attr-defined]
    assert [line for line in after if line not in added] == before


def test_without_the_variable_nothing_changes(tree: Path) -> None:
    what = "[get(name) for name in R]"
    pristine = ask(tree, what).stdout
    assert run_apply(tree).returncode == 0
    assert ask(tree, what).stdout == pristine != ""
    assert ask(tree, what, NEMO_RL_PY_EXECUTABLES_SYSTEM="1").stdout == pristine


def test_each_tier_has_its_interpreter(tree: Path, envs: Path) -> None:
    run_apply(tree)
    found = ask(
        tree, "{n: get(n) for n in ('a.V', 'a.A', 'a.B', 'a.S', 'a.Own')}", NEMO_RL_PREBUILT_ENV_ROOT=f"{envs}/"
    )
    assert json.loads(found.stdout) == {
        "a.V": f"{envs}/vllm/bin/python", "a.A": f"{envs}/automodel/bin/python", "a.B": f"{envs}/base/bin/python",
        "a.S": f"{envs}/base/bin/python", "a.Own": "/somewhere/python",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("actor", "tier", "advice"),
    [("a.M", "mcore", "policy.dtensor_cfg._v2=true"), ("a.F", "fsdp", "policy.dtensor_cfg.enabled=true"),
     ("a.Q", "modelopt", "quant_cfg")],
)  # fmt: skip
def test_other_tiers_are_refused_by_name(tree: Path, envs: Path, actor: str, tier: str, advice: str) -> None:
    run_apply(tree)
    done = ask(tree, f"get({actor!r})", NEMO_RL_PREBUILT_ENV_ROOT=str(envs))
    assert done.returncode != 0 and tier in done.stderr and advice in done.stderr and actor in done.stderr


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ({"NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"}, "exclude each other"),
        ({"NEMO_RL_PREBUILT_ENV_ROOT": "/no such"}, "absolute path"),
        ({"NEMO_RL_PREBUILT_ENV_ROOT": "/nowhere-at-all"}, "no folder"),
    ],
)
def test_contradictions_raise_at_import(tree: Path, envs: Path, env: dict[str, str], word: str) -> None:
    run_apply(tree)
    done = ask(tree, "1", **{"NEMO_RL_PREBUILT_ENV_ROOT": str(envs), **env})
    assert done.returncode != 0 and word in done.stderr


def test_a_missing_interpreter_is_named(tree: Path, envs: Path) -> None:
    run_apply(tree)
    (envs / "vllm/bin/python").unlink()
    done = ask(tree, "get('a.V')", NEMO_RL_PREBUILT_ENV_ROOT=str(envs))
    assert done.returncode != 0 and f"{envs}/vllm/bin/python" in done.stderr


@pytest.fixture
def prebuilt(envs: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("NEMO_RL_PREBUILT_ENV_ROOT", str(envs))
    monkeypatch.delenv("NEMO_RL_PY_EXECUTABLES_SYSTEM", raising=False)
    return load(OVERLAY / "prebuilt_env.py")


GOOD = {
    "policy": {
        "dtensor_cfg": {"enabled": True, "_v2": True}, "megatron_cfg": {"enabled": False},
        "generation": {"backend": "vllm"},
    },
    "env": {"math": {}, "should_use_nemo_gym": False}, "on_policy_distillation": None,
}  # fmt: skip


def changed(path: str, value: object) -> dict[str, Any]:
    out = json.loads(json.dumps(GOOD))
    *above, last = path.split(".")
    place = out
    for key in above:
        place = place.setdefault(key, {})
    place[last] = value
    return dict(out)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("policy.megatron_cfg.enabled", True, ("mcore", "policy.dtensor_cfg._v2=true")),
        ("policy.dtensor_cfg._v2", False, ("fsdp", "policy.dtensor_cfg.enabled=true")),
        ("policy.quant_cfg", "FP8", ("modelopt", "quant_cfg")),
        ("policy.generation.backend", "sglang", ("sglang", "backend=vllm")),
        ("policy.generation.backend", "megatron", ("mcore", "backend=vllm")),
        ("policy.generation.quant_cfg", "FP8", ("modelopt",)),
        ("value.megatron_cfg.enabled", True, ("value.megatron_cfg", "value.dtensor_cfg._v2=true")),
        ("teacher.dtensor_cfg", {"enabled": True}, ("teacher.dtensor_cfg", "fsdp")),
        ("teachers", [{"megatron_cfg": {"enabled": True}}], ("teachers.0.megatron_cfg", "mcore")),
        ("env.reward_model", {"megatron_cfg": {"enabled": True}}, ("env.reward_model", "mcore")),
        ("env.should_use_nemo_gym", True, ("nemo_gym",)),
        ("on_policy_distillation", {"enabled": True}, ("mcore", "xtoken")),
    ],
)
def test_preflight_refuses_before_launch(prebuilt: Any, path: str, value: object, words: tuple[str, ...]) -> None:
    with pytest.raises(prebuilt.PrebuiltEnvError) as caught:
        prebuilt.preflight(changed(path, value))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_preflight_passes_what_runs_and_names_all_reasons_at_once(prebuilt: Any) -> None:
    prebuilt.preflight(GOOD)
    prebuilt.preflight(SimpleNamespace(**GOOD, extra=None))
    both = changed("policy.megatron_cfg.enabled", True)
    both["env"]["should_use_nemo_gym"] = True
    with pytest.raises(prebuilt.PrebuiltEnvError) as caught:
        prebuilt.preflight(SimpleNamespace(**both))
    assert "mcore" in str(caught.value) and "nemo_gym" in str(caught.value)


def test_preflight_says_nothing_without_the_variable(prebuilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEMO_RL_PREBUILT_ENV_ROOT")
    assert prebuilt.preflight(changed("policy.megatron_cfg.enabled", True)) is None
    assert prebuilt.refuse_uv("x") is None


def test_building_an_environment_is_refused(prebuilt: Any) -> None:
    """B150."""
    with pytest.raises(prebuilt.PrebuiltEnvError):
        prebuilt.refuse_uv("nemo_rl.X")


PATCHER = '''
import contextlib, sys
sys.path.insert(0, sys.argv[1])
import prebuilt_env
@contextlib.contextmanager
def locked(path):
    if not prebuilt_env.may_patch(path):
        yield prebuilt_env.as_installed(path)
        return
    with open(path + ".patch_lock", "w"), open(path) as file:
        content = file.read()
        def write(new):
            with open(path, "w") as out: out.write(new)
        yield content, write
with locked(sys.argv[2]) as (content, write):
    write(content + "fixed\\n")
'''


def patch_as_somebody(installed: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Upstream's way to write a fix into an installed file, by a user who does not own it."""
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    given = {"PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run(
        ["/usr/bin/python3", "-c", PATCHER, str(OVERLAY), str(installed)],
        env=given, cwd="/", capture_output=True, text=True, check=False, **nobody,
    )  # type: ignore[call-overload,no-any-return]  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
@pytest.mark.parametrize("prebuilt", [True, False], ids=["prebuilt", "without"])
def test_a_worker_survives_where_upstreams_fixes_cannot_be_written(tmp_path: Path, prebuilt: bool) -> None:
    """An image that Apptainer shows, another user's installation (NeMo RL issue 3913)."""
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    installed = tmp_path / "ray_executor.py"
    installed.write_text("as it was\n")
    done = patch_as_somebody(installed, **({"NEMO_RL_PREBUILT_ENV_ROOT": str(tmp_path)} if prebuilt else {}))
    assert installed.read_text() == "as it was\n"
    if prebuilt:
        assert done.returncode == 0 and str(installed) in done.stderr, done.stderr
    else:
        assert done.returncode == 1 and "PermissionError" in done.stderr


def test_upstreams_fixes_are_written_where_they_can_be(tmp_path: Path) -> None:
    installed = tmp_path / "ray_executor.py"
    installed.write_text("as it was\n")
    done = subprocess.run(
        [sys.executable, "-c", PATCHER, str(OVERLAY), str(installed)],
        env={"NEMO_RL_PREBUILT_ENV_ROOT": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    assert installed.read_text() == "as it was\nfixed\n"


@pytest.mark.skipif(not UPSTREAM, reason="NEMO_RL_UPSTREAM names no checkout of NeMo RL v0.7.0")
def test_the_real_tree(tmp_path: Path) -> None:
    tree = tmp_path / "src"
    shutil.copytree(UPSTREAM, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", "docs", "tests"))
    done = subprocess.run([sys.executable, "-I", OVERLAY / "apply.py", tree, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in json.loads(done.stdout)["changed"]:
        compile((tree / name).read_text(), name, "exec")
    patches = (tree / "nemo_rl/models/generation/vllm/patches.py").read_text()
    assert patches.index("yield prebuilt_env.as_installed(file_path)") < patches.index('open(lock_path, "w")')
    drivers = [p for p in (tree / "examples").rglob("run_*.py") if "\n    init_ray()" in p.read_text()]
    assert len(drivers) == 12
    assert all("prebuilt_env.preflight(config)\n    init_ray()" in p.read_text() for p in drivers)


REGISTRY = """
import json
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY as R, get_actor_python_env
def ask(name):
    try: return get_actor_python_env(name)
    except Exception as error: return f"{type(error).__name__}: {error}"
print(json.dumps({name: ask(name) for name in R}))
"""


@pytest.mark.skipif(
    not (UPSTREAM and UPSTREAM_PYTHON), reason="needs NEMO_RL_UPSTREAM and NEMO_RL_UPSTREAM_PYTHON (Ray)"
)
def test_upstreams_own_registry_of_25_actors(tmp_path: Path, envs: Path) -> None:
    """The table of the technical brief, asked of the real code: equal to pristine without the variable."""
    tree = tmp_path / "src"
    shutil.copytree(Path(UPSTREAM) / "nemo_rl", tree / "nemo_rl", symlinks=True)

    def answers(**env: str) -> dict[str, str]:
        given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", **env}
        done = subprocess.run([UPSTREAM_PYTHON, "-c", REGISTRY], env=given, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    pristine = answers()
    for name in ("examples", "research"):
        shutil.copytree(Path(UPSTREAM) / name, tree / name, symlinks=True)
    subprocess.run([sys.executable, "-I", OVERLAY / "apply.py", tree], check=True, capture_output=True)
    assert answers() == pristine and len(pristine) == 25
    found = answers(NEMO_RL_PREBUILT_ENV_ROOT=str(envs))
    tiers = [value.removeprefix(f"{envs}/").partition("/")[0] for value in found.values()]
    assert {tier: tiers.count(tier) for tier in ("base", "automodel", "vllm")} == {"base": 8, "automodel": 2, "vllm": 5}
    assert sum(value.startswith("PrebuiltEnvError") for value in found.values()) == 10
