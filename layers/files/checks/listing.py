"""The checks of a stage as data for ``chroot_exec``: which program, how long, how many GPUs, what may be deferred."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from .generation import LIMIT
from .imports import DRIVER_LINKED
from .operators import OPERATORS
from .relocation import PROBE_LIMIT

STAGES = ("container-check", "single", "nccl")
SHM = 1 << 30
# The tiers in which a driver-linked module lives; the first one's check has the module's name alone.
_HOMES = {"deep_ep": ("automodel", "vllm"), "deep_gemm": ("vllm",), "vllm._C": ("vllm",),
          "vllm.cumem_allocator": ("vllm",), "mooncake": ("vllm",)}  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    """What a list depends on."""
    parser.add_argument("--stage", choices=STAGES, default="container-check")
    parser.add_argument("--prefix", default="/opt/nrl-runtime")
    parser.add_argument("--tiers", default="base,automodel,vllm", help="those that the image has")
    parser.add_argument("--second", default="", help="another place of the prefix, for the relocation check")
    parser.add_argument("--gpus", type=int, default=8, help="ranks that the nccl stage wants")
    parser.add_argument("--module", action="append", default=[], help="instead of the tiers' own lists")


def main(given: argparse.Namespace) -> int:
    """Print the list."""
    found = checks(given.stage, given.prefix, given.tiers.split(","), given.second, given.gpus, given.module)
    sys.stdout.write(json.dumps({"checks": found}, indent=1) + "\n")
    return 0


def checks(
    stage: str, prefix: str, tiers: Sequence[str], second: str = "", gpus: int = 8, modules: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The checks of one stage, named as the gates name them."""
    trainer = "automodel" if "automodel" in tiers else tiers[0]

    def one(name: str, tier: str, *argv: str, **more: Any) -> dict[str, Any]:
        python = f"{prefix}/envs/{tier}/bin/python3"
        return {"name": name, "argv": [python, f"{prefix}/checks", *argv], "result": "json", "timeout": 600, **more}

    gpu = {"gpus": 1, "shm": SHM}
    found = [one("network-blocked", tiers[0], "network-blocked"), one("caches-empty", tiers[0], "caches-empty")]
    if stage == "nccl":
        return [*found, one("nccl", trainer, "nccl", "--at-least", str(gpus), gpus=gpus, shm=SHM, timeout=600)]
    single = stage == "single"
    flag, needs = (("--gpu",), gpu) if single else ((), {})
    for tier in tiers:
        named = [word for module in modules for word in ("--module", module)]
        inventory = f"{prefix}/inventory-{tier}.json"
        words = ("imports", "--tier", tier, "--inventory", inventory, *named, *flag)
        found.append(one(f"imports:{tier}", tier, *words, **needs))
    more = needs if single else {"deferrable": True}
    for module, tier in ((name, home) for name in DRIVER_LINKED for home in _HOMES[name] if home in tiers):
        argv = ("import", module, "--inventory", f"{prefix}/inventory-{tier}.json", *flag)
        name = f"import:{module}" if tier == _HOMES[module][0] else f"import:{module}:{tier}"
        found.append(one(name, tier, *argv, **more))
    return found + (_single(one, gpu, prefix, tiers, second, trainer) if single else [])


def _single(
    one: Any, gpu: dict[str, Any], prefix: str, tiers: Sequence[str], second: str, trainer: str
) -> list[dict[str, Any]]:
    """What one GPU is enough for."""
    listed = {tier: ("--inventory", f"{prefix}/inventory-{tier}.json") for tier in tiers}
    # Compilers and imports that start with nothing in a cache, on a node with few cores or a slow disk.
    long = {**gpu, "timeout": 1200}
    found = [one("jit", trainer, "jit", **long), one("training", trainer, "training", *listed[trainer], **long)]
    for tier in tiers:
        if OPERATORS.get(tier):
            argv = ("operators", "--tier", tier, *listed[tier])
            found.append(one(f"operators:{tier}", tier, *argv, **long))
    if second:
        places = ("--prefix", prefix, "--prefix", second)
        argv = ("relocation", *places, "--tier", tiers[0])
        found.append(one("relocation", tiers[0], *argv, **{**gpu, "timeout": 2 * PROBE_LIMIT + 60}))
    if "vllm" in tiers:
        judge = ("--hf-python", f"{prefix}/envs/{trainer}/bin/python3")
        found.append(one("generation", "vllm", "generation", *judge, **{**gpu, "timeout": LIMIT + 120}))
    if len(tiers) > 1:
        found.append(one("ray_dispatch", tiers[0], "ray_dispatch", "--envs", f"{prefix}/envs", **long))
    return found
