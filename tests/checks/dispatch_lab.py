"""The dispatch check with a real Ray and three tiers; upstream's registry and worker groups are stood in for.

    dispatch_lab.py FAULT

Its last line is the check's result. Ray starts once for each program, so a fault may have several parts.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import checks_lab
from nrl_checks import ray_dispatch
from nrl_checks.common import Result

VERSIONS = {"base": "5.8.1", "automodel": "5.5.0", "vllm": "5.8.1"}
REGISTRY: dict[str, str] = {}


def tiers(envs: Path) -> None:
    """Environments that differ in their transformers; torch and Ray are this interpreter's."""
    for tier, version in VERSIONS.items():
        command = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", envs / tier]
        subprocess.run(command, check=True)
        site = next((envs / tier / "lib").iterdir()) / "site-packages"
        checks_lab.distribution(site, "transformers", version)
        # Before PYTHONPATH, in which there is another.
        (site / "first.pth").write_text(f"import sys; sys.path.insert(0, {str(site)!r})\n")
        REGISTRY[ray_dispatch.ACTORS[tier]] = f"{envs}/{tier}/bin/python"


def lookup(actor: str) -> str:
    """An interpreter, or a refusal."""
    if actor in ray_dispatch.UNAVAILABLE:
        raise RuntimeError(f"{actor} is of a tier that this runtime does not have")
    return REGISTRY[actor]


class Cluster:
    """So many workers a group."""

    def __init__(self, counts: list[int], **_: Any) -> None:
        self.count = counts[0]


class Group:
    """Actors in the interpreter that the registry gives their name, each told its rank."""

    def __init__(self, cluster: Cluster, actor: str, name_prefix: str) -> None:
        module, _, name = actor.rpartition(".")
        sys.path.insert(0, os.environ["PYTHONPATH"].partition(os.pathsep)[0])
        probe = getattr(importlib.import_module(module), name)
        self.workers = [
            probe.options(
                runtime_env={"py_executable": self.python(actor), "env_vars": self.place(rank, cluster.count)}
            ).remote()
            for rank in range(cluster.count)
        ]

    def python(self, actor: str) -> str:
        return lookup(actor)

    def place(self, rank: int, count: int) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": str(count)}


class Broken(Group):
    """One interpreter for all, found by uv on the way, and no rank."""

    def python(self, actor: str) -> str:
        subprocess.run(["uv", "sync", "--locked"], check=False)
        return REGISTRY[ray_dispatch.ACTORS["base"]]

    def place(self, rank: int, count: int) -> dict[str, str]:
        return {"RANK": "7", "WORLD_SIZE": str(count)}


def main(fault: str) -> None:
    """Run the check where there is no GPU to be looked for."""
    found = {
        "ray_actor_environment_registry": {"ACTOR_ENVIRONMENT_REGISTRY": REGISTRY, "get_actor_python_env": lookup},
        "virtual_cluster": {"RayVirtualCluster": Cluster},
        "worker_groups": {"RayWorkerBuilder": str, "RayWorkerGroup": Broken if fault else Group},
    }
    for name in ("nemo_rl", "nemo_rl.distributed"):
        sys.modules[name] = ModuleType(name)
    for name, names in found.items():
        module = sys.modules[f"nemo_rl.distributed.{name}"] = ModuleType(name)
        vars(module).update(names)
    with tempfile.TemporaryDirectory() as place:
        tiers(Path(place))
        # What waits for a machine that is slow: minutes more.
        ray_dispatch.PATIENCE = 2000
        os.environ["RAY_raylet_start_wait_time_s"] = "2000"  # noqa: SIM112
        ray_dispatch.all_conditions = lambda result: 0
        result: Result = ray_dispatch.check(Path(place))
    print("\n" + json.dumps(result.to_json()))


if __name__ == "__main__":
    main(sys.argv[1])
