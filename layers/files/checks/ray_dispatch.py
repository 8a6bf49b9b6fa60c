"""Real Ray starts one worker a tier through the overlay's mapping; nothing calls uv, pip or git on the way."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from .common import CheckFailed, Result
from .conditions import all_conditions

# One supported actor of upstream's registry for each tier, and some that this runtime does not have.
ACTORS = {
    "vllm": "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker",
    "automodel": "nemo_rl.models.policy.workers.dtensor_policy_worker_v2.DTensorPolicyWorkerV2",
    "base": "nemo_rl.environments.math_environment.MathEnvironment",
}
UNAVAILABLE = (
    "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker",
    "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker",
    "nemo_rl.models.generation.sglang.sglang_worker.SGLangGenerationWorker",
    "nemo_rl.environments.nemo_gym.NemoGym",
)
# Bytes. The answers are small; Ray's default is a share of all memory, which the rest of the machine may be using.
STORE = 256 << 20
TRIPWIRES = ("uv", "pip", "pip3", "git")


def check(envs: Path) -> Result:
    """The whole check. Tiers are told apart by their interpreters and their transformers."""
    result = Result()
    all_conditions(result)
    if result.reasons:
        return result
    marker = set_tripwires(Path(tempfile.mkdtemp(prefix="nrl-tripwires-")))
    os.environ["NEMO_RL_PREBUILT_ENV_ROOT"] = str(envs)
    mapping = resolve_all(result, envs)
    refuse_unavailable(result)
    if not result.reasons:
        dispatch(result, mapping)
    called = marker.read_text().splitlines() if marker.exists() else []
    result.expect(not called, f"called on the way: {', '.join(called[:5])}")
    return result


def set_tripwires(folder: Path) -> Path:
    """Programs first on the PATH that note their call and fail; the file in which they note it."""
    marker = folder / "called"
    for name in TRIPWIRES:
        script = folder / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> "{marker}"\nexit 97\n')
        script.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return marker


def lookup(actor: str) -> str:
    """The interpreter that upstream's registry, with the overlay, gives an actor."""
    from nemo_rl.distributed.ray_actor_environment_registry import get_actor_python_env

    return str(get_actor_python_env(actor))


def resolve_all(result: Result, envs: Path) -> dict[str, str]:
    """Tier -> interpreter, each below ``envs``."""
    found = {tier: lookup(actor) for tier, actor in ACTORS.items()}
    for tier, python in found.items():
        result.expect(python == f"{envs}/{tier}/bin/python", f"{tier}: the mapping gives {python}")
    return found


def refuse_unavailable(result: Result) -> None:
    """Actors of other tiers raise at lookup, with a message that says more than their name."""
    for actor in UNAVAILABLE:
        try:
            python = lookup(actor)
        except Exception as error:
            result.expect(bool(str(error)), f"{actor} raised {type(error).__name__} without a message")
        else:
            result.add([f"{actor} is not refused: {python}"])


def dispatch(result: Result, mapping: dict[str, str]) -> None:
    """Start the workers and compare what they say."""
    import ray
    from ray import cloudpickle

    # The workers' interpreters cannot import this package: what they run travels by value.
    cloudpickle.register_pickle_by_value(sys.modules[identity.__module__])
    folder = tempfile.mkdtemp(prefix="r-", dir="/tmp")
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=STORE, _temp_dir=folder)
    try:
        worker = ray.remote(identity)
        asked = {
            tier: worker.options(runtime_env={"py_executable": python}).remote() for tier, python in mapping.items()
        }
        answers = {tier: ray.get(reference, timeout=120) for tier, reference in asked.items()}
    finally:
        ray.shutdown()
    judge(result, mapping, answers)
    result.details.update(ray=ray.__version__, workers=answers)


def judge(result: Result, mapping: dict[str, str], answers: dict[str, dict[str, Any]]) -> None:
    """Each worker ran in its own tier."""
    for tier, answer in answers.items():
        prefix = os.path.dirname(os.path.dirname(mapping[tier]))
        result.expect(answer["executable"] == mapping[tier], f"{tier}: ran {answer['executable']}")
        result.expect(answer["prefix"] == prefix, f"{tier}: its prefix is {answer['prefix']}")
    if len({a["ray"] for a in answers.values()}) != 1:
        raise CheckFailed(f"the tiers have different Rays: {answers}")
    apart = {tier: answer["transformers"] for tier, answer in answers.items()}
    expected = apart.get("automodel") != apart.get("vllm")
    result.expect(expected, f"transformers does not tell the tiers apart: {apart}")


def identity() -> dict[str, Any]:
    """What a worker says about itself. It runs in another interpreter."""
    import importlib.metadata

    versions = {name: importlib.metadata.version(name) for name in ("ray", "transformers", "torch")}
    return {"executable": sys.executable, "prefix": sys.prefix, **versions}
