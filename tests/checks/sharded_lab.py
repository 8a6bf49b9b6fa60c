"""Two ranks of the sharded step with gloo on a CPU; run as a program: its last line is what each rank says."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import checks_lab  # noqa: F401  # isort: skip
from nrl_checks import nccl_rank

WORLD = 2


def own_part(output: Any, input: Any, **_: Any) -> None:
    """A reduce_scatter that exchanges nothing: each rank keeps its part of its own numbers."""
    output.copy_(input.chunk(WORLD)[dist.get_rank()])


def rank(own: int, folder: str, fault: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=own, world_size=WORLD, init_method=f"file://{folder}/store")
    if fault == "nothing is exchanged":
        dist.reduce_scatter_tensor = own_part
    elif fault == "sums for means":
        right = dist.reduce_scatter_tensor
        dist.reduce_scatter_tensor = lambda output, input, **more: right(output, input * WORLD, **more)
    losses, wrong = nccl_rank.sharded_step(own, torch.device("cpu"))
    Path(folder, str(own)).write_text(json.dumps({"losses": losses, "wrong": wrong}))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(rank, (place, sys.argv[1]), nprocs=WORLD)
        print(json.dumps([json.loads(Path(place, str(n)).read_text()) for n in range(WORLD)]))
