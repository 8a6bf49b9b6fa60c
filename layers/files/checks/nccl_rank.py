"""One rank of the NCCL check. Data are random whole numbers: their sums are exact, so every element must be equal."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .relocation import mapped

SIZE = 1 << 20
BANDWIDTH_BYTES, ROUNDS = 256 << 20, 20
_RANGE = 1000
# Rows of each rank's part of a batch, and how far averaged float32 gradients may be off.
PER_RANK, GRADIENT_BOUND = 16, 1e-4
# Of a mean of bf16 numbers up to some thousands, repeated; ranks that kept their own are off by 1.
MEAN_BOUND = 0.2


def rank(out: Path) -> int:
    """Run everything that the environment's RANK and WORLD_SIZE ask for, and write a report."""
    import torch
    import torch.distributed as dist

    own, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=own, world_size=world, device_id=device)
    report = {
        **exchanges(own, world, device), "prefix": os.path.realpath(sys.prefix),
        "uuid": f"GPU-{torch.cuda.get_device_properties(device).uuid}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "library": [p for p in mapped(Path("/proc/self/maps").read_text()) if "libnccl" in os.path.basename(p)],
    }  # fmt: skip
    out.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    return 0


def exchanges(own: int, world: int, device: Any) -> dict[str, Any]:
    """Every exchange with the other ranks: what was done, what is wrong with it, and what was measured."""
    import torch.distributed as dist

    checked = dict(collectives(own, world, device))
    losses, wrong = sharded_step(own, device)
    speed, slips = bandwidth(own, world, device)
    return {
        "rank": dist.get_rank(), "world": dist.get_world_size(), "done": sorted(checked), "losses": losses,
        "wrong": [f"{name} is wrong" for name, good in checked.items() if not good] + wrong + slips,
        "bus_gb_s": speed,
    }  # fmt: skip


def numbers(seed: int, size: int, device: Any) -> Any:
    """The random whole numbers of one rank, known to all of them by its seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-_RANGE, _RANGE, (size,), generator=generator).to(device, torch.float32)


def poison(size: int, device: Any) -> Any:
    """Memory that no right answer is in: what an exchange leaves unwritten is seen."""
    import torch

    return torch.full((size,), float("nan"), device=device)


def collectives(own: int, world: int, device: Any) -> Iterator[tuple[str, bool]]:
    """Each collective's name, and whether every element is right on this rank."""
    import torch
    import torch.distributed as dist

    whole = [numbers(100 + r, SIZE * world, device) for r in range(world)]
    mine, total = whole[own], torch.stack(whole).sum(0)
    part = slice(own * SIZE, (own + 1) * SIZE)

    data = mine.clone()
    dist.all_reduce(data)
    yield "all_reduce", torch.equal(data, total)
    data = poison(SIZE * world, device)
    dist.all_gather_into_tensor(data, mine[:SIZE].contiguous())
    yield "all_gather", torch.equal(data, torch.cat([w[:SIZE] for w in whole]))
    data = poison(SIZE, device)
    dist.reduce_scatter_tensor(data, mine)
    yield "reduce_scatter", torch.equal(data, total[part])
    data = poison(SIZE * world, device)
    dist.all_to_all_single(data, mine)
    yield "all_to_all", torch.equal(data, torch.cat([w[part] for w in whole]))
    data = mine.clone() if own == world - 1 else poison(SIZE * world, device)
    dist.broadcast(data, src=world - 1)
    yield "broadcast", torch.equal(data, whole[world - 1])
    data = poison(SIZE * world, device)
    after, before = (own + 1) % world, (own - 1) % world
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, data, before)])
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    yield "send_recv", torch.equal(data, whole[before])


def model(device: Any) -> Any:
    """The same network on every rank, in float32."""
    import torch

    torch.manual_seed(3)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)]
    return torch.nn.Sequential(*layers).to(device)


def sharded_step(own: int, device: Any) -> tuple[list[float], list[str]]:
    """A ``fully_shard`` step: the losses before and after it, and what is wrong with them.

    Each rank has another part of the batch, so only gradients that were averaged over all ranks are those of a lone
    process with the whole batch. AdamW hides a wrong factor: the gradients themselves are compared too.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    whole, sharded = model(device), model(device)
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer)
    fully_shard(sharded)
    torch.manual_seed(11)
    x, y = (torch.randn(PER_RANK * dist.get_world_size(), 256).to(device) for _ in range(2))
    own_part = slice(own * PER_RANK, (own + 1) * PER_RANK)
    lone, shared = steps(whole, x, y, slice(None)), steps(sharded, x, y, own_part)
    pairs = zip(whole.parameters(), sharded.parameters(), strict=True)
    off = max(float((q.grad.full_tensor() - p.grad).norm() / p.grad.norm()) for p, q in pairs)
    held = sum(p.to_local().numel() for p in sharded.parameters())
    return shared, judge_step(lone, shared, held, sum(p.numel() for p in whole.parameters()), off)


def judge_step(lone: list[float], shared: list[float], held: int, total: int, off: float = 0.0) -> list[str]:
    """What is wrong: losses or gradients that are not an unsharded process's, a step that teaches nothing, nothing
    sharded."""
    wrong = []
    if not off <= GRADIENT_BOUND:
        wrong.append(f"fully_shard: gradients are off by {off:.3g} of an unsharded process's")
    # Written so that NaN is no pass.
    if not all(abs(a - b) <= 1e-4 * abs(a) for a, b in zip(lone, shared, strict=True)):
        wrong.append(f"fully_shard: losses {shared}, unsharded {lone}")
    if not shared[-1] < shared[0]:
        wrong.append(f"fully_shard: the step did not lower the loss: {shared}")
    if held >= total:
        wrong.append("fully_shard: a rank holds all parameters")
    return wrong


def steps(network: Any, x: Any, y: Any, part: slice) -> list[float]:
    """One optimizer step on a part of the batch; the loss of the whole before and after."""
    import torch

    def loss(rows: slice) -> Any:
        return (network(x[rows]) - y[rows]).square().mean()

    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    with torch.no_grad():
        before = float(loss(slice(None)))
    loss(part).backward()
    optimizer.step()
    with torch.no_grad():
        return [before, float(loss(slice(None)))]


def bandwidth(own: int, world: int, device: Any) -> tuple[float, list[str]]:
    """Bus bandwidth of all_reduce in GB/s, and what is wrong with what it exchanged.

    It is bytes times 2(N-1)/N over the mean time of a round. Source: https://github.com/NVIDIA/nccl-tests,
    doc/PERFORMANCE.md. The numbers are random, and another's on each rank.
    """
    import torch
    import torch.distributed as dist

    # The mean of the ranks' numbers, and of means ever after: sums would soon be infinite.
    common = numbers(100, SIZE, device).repeat(BANDWIDTH_BYTES // 2 // SIZE)
    data = (common + 2 * _RANGE * own).to(torch.bfloat16)
    for _ in range(5):
        dist.all_reduce(data, dist.ReduceOp.AVG)
    torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(data, dist.ReduceOp.AVG)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / ROUNDS
    speed = round(BANDWIDTH_BYTES * 2 * (world - 1) / world / seconds / 1e9, 1)
    # What was fast must have been right, too: the mean of the ranks' shifts is known.
    off = float(((data.float() - common) / (_RANGE * (world - 1)) - 1).abs().max())
    # Written so that NaN is no pass.
    return speed, [] if off <= MEAN_BOUND else [f"the all_reduce that was timed gave a mean off by {off:.3g}"]
