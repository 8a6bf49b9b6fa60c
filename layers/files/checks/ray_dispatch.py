"""Upstream's worker groups start in each tier through the overlay's mapping; nothing calls uv, pip or git."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .common import CheckFailed, Result, scratch_folder
from .conditions import all_conditions
from .process import run

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
# Seconds for one tier's workers to import torch and to answer; from a cold disk that takes minutes.
PATIENCE = 300
TRIPWIRES = ("uv", "pip", "pip3", "git")
# The module that the probe's file becomes, and how far its bf16 product may be off.
PROBE, BOUND = "nrl_ray_probe", 2e-2


def check(envs: Path) -> Result:
    """The whole check, with one worker a GPU in each tier, told apart by their interpreters and their transformers."""
    result = Result()
    count = all_conditions(result)
    if result.reasons:
        return result
    marker = set_tripwires(Path(scratch_folder("nrl-tripwires-")))
    os.environ["NEMO_RL_PREBUILT_ENV_ROOT"] = str(envs)
    mapping = resolve_all(result, envs)
    refuse_unavailable(result)
    if not result.reasons:
        dispatch(result, mapping, count)
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
    try_tripwires(marker)
    return marker


def try_tripwires(marker: Path) -> None:
    """Each notes a call; where files cannot be executed in this place, none would ever be noted.

    Raises:
        CheckFailed: a call was not noted.
    """
    for name in TRIPWIRES:
        run([name, "tried"], timeout=30)
    noted = marker.read_text().splitlines() if marker.exists() else []
    if noted != [f"{name} tried" for name in TRIPWIRES]:
        raise CheckFailed(f"the tripwires in {marker.parent} do not work: they noted {noted}")
    marker.unlink()


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
            # The overlay's own error; a lookup that fails for another reason (KeyError) says no more than the name.
            words = str(error).replace(actor, "").strip(" '\".:")
            result.expect(bool(words), f"{actor} raised {type(error).__name__} without a message")
            wrong = isinstance(error, (LookupError, ImportError, AttributeError))
            result.expect(not wrong, f"{actor} was not refused, the lookup broke: {type(error).__name__}: {error}")
        else:
            result.add([f"{actor} is not refused: {python}"])


def dispatch(result: Result, mapping: dict[str, str], gpus: int) -> None:
    """Start one worker a GPU in each tier, as upstream starts its own, and compare what they say."""
    import ray

    folder = scratch_folder("r-", "/tmp")
    # Seconds. Ray's own patience of 30 is short for a cold runtime on a busy node.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    register(Path(folder))
    # A cluster that runs on this node must not be joined, and its name may stand for an address that is not up here.
    ray.init("local", num_cpus=4 * max(1, gpus), num_gpus=gpus, include_dashboard=False, object_store_memory=STORE,
             _node_ip_address="127.0.0.1", _temp_dir=folder)  # fmt: skip
    try:
        answers = groups(mapping, gpus)
    finally:
        ray.shutdown()
    judge(result, mapping, answers, [gpu["uuid"] for gpu in result.details.get("gpus", ())])
    result.details.update(ray=ray.__version__, workers=answers)


def register(folder: Path) -> None:
    """Make the probe known: to the workers by a file of its own, to upstream's registry beside a real actor's entry."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    # The workers' interpreters cannot import this package, which has no name of its own.
    shutil.copy(Path(__file__).with_name("ray_probe.py"), folder / f"{PROBE}.py")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    for tier, actor in ACTORS.items():
        ACTOR_ENVIRONMENT_REGISTRY[f"{PROBE}.{tier}"] = ACTOR_ENVIRONMENT_REGISTRY[actor]


def groups(mapping: Mapping[str, str], gpus: int) -> dict[str, list[dict[str, Any]]]:
    """Tier -> what its workers say; all tiers share the GPUs, as colocated workers of upstream do."""
    import ray
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

    count = max(1, gpus)
    cluster = RayVirtualCluster(
        [count], use_gpus=gpus > 0, max_colocated_worker_groups=len(mapping), num_gpus_per_node=count, name="nrl-check"
    )
    answers = {}
    for tier in mapping:
        group = RayWorkerGroup(cluster, RayWorkerBuilder(f"{PROBE}.{tier}"), name_prefix=f"nrl-{tier}")
        answers[tier] = ray.get([worker.identity.remote() for worker in group.workers], timeout=PATIENCE)
    return answers


def judge(
    result: Result, mapping: Mapping[str, str], answers: Mapping[str, list[dict[str, Any]]], uuids: Sequence[str] = ()
) -> None:
    """Each worker ran in its own tier and, where there are GPUs, on a GPU of its own."""
    for tier, workers in answers.items():
        prefix = os.path.dirname(os.path.dirname(mapping[tier]))
        for answer in workers:
            result.expect(answer["executable"] == mapping[tier], f"{tier}: ran {answer['executable']}")
            result.expect(answer["prefix"] == prefix, f"{tier}: its prefix is {answer['prefix']}")
        placed(result, tier, workers, uuids)
    everyone = [answer for workers in answers.values() for answer in workers]
    if len({a["ray"] for a in everyone}) != 1:
        raise CheckFailed(f"the tiers have different Rays: {answers}")
    apart = {tier: workers[0]["transformers"] for tier, workers in answers.items() if workers}
    expected = apart.get("automodel") != apart.get("vllm")
    result.expect(expected, f"transformers does not tell the tiers apart: {apart}")


def placed(result: Result, tier: str, workers: Sequence[dict[str, Any]], uuids: Sequence[str]) -> None:
    """Ranks 0 to N-1 of a world of N; each with one GPU, all of them taken, each computing right."""
    count = max(1, len(uuids))
    ranks = [(answer["rank"], answer["world_size"]) for answer in workers]
    wanted = [(str(rank), str(count)) for rank in range(count)]
    result.expect(ranks == wanted, f"{tier}: ranks are {ranks}, not {wanted}")
    seen = [gpu["uuid"] for answer in workers for gpu in answer["gpus"]]
    result.expect(sorted(seen) == sorted(uuids), f"{tier}: its workers see the GPUs {seen}, not {list(uuids)}")
    for gpu in (gpu for answer in workers for gpu in answer["gpus"]):
        # Written so that NaN is no pass.
        result.expect(gpu["error"] <= BOUND, f"{tier}: a product on {gpu['uuid']} is off by {gpu['error']}")
