"""One process for each GPU: an all_reduce that is right element for element, on devices that are distinct by UUID."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZE = 1 << 22


def worker(rank: int, world: int, out: str) -> None:
    """One rank; rank 0 writes the result."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK=str(rank), WORLD_SIZE=str(world))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    parts = [torch.randn(SIZE, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(world)]
    data = parts[rank].cuda()
    dist.all_reduce(data)
    right = torch.tensor([int(torch.allclose(data.cpu(), sum(parts)))], device="cuda")
    dist.all_reduce(right)
    uuids: list[str | None] = [None] * world
    dist.all_gather_object(uuids, str(torch.cuda.get_device_properties(rank).uuid))
    if rank == 0:
        with open(out, "w") as file:
            json.dump({"world": dist.get_world_size(), "right": int(right), "uuids": uuids}, file)
    dist.destroy_process_group()


def main() -> None:
    """Print one result; a single GPU is a failure, not a pass."""
    world, out = torch.cuda.device_count(), "/tmp/nccl.json"
    reasons = []
    details: dict[str, object] = {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "gpus": world}
    if world < 2:
        reasons.append(f"{world} GPU: nothing to reduce over")
    else:
        mp.spawn(worker, args=(world, out), nprocs=world)
        with open(out) as file:
            details.update(json.load(file))
        reasons += [] if details["right"] == world else ["wrong sums"]
        reasons += [] if len(set(details["uuids"])) == world else ["two ranks have one device"]  # type: ignore[call-overload]
    print(json.dumps({"outcome": "fail" if reasons else "pass", "reason": "; ".join(reasons), "details": details}))


if __name__ == "__main__":
    main()
