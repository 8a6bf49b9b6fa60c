"""Ranks that exchange by gloo on a CPU, with one fault after the other; run as a program by ``said``.

    ranks_lab.py WORLD

Its last line is, for each fault, what each rank reports: as ``nccl_rank`` does, with a device and an NCCL of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import checks_lab  # noqa: F401

# Small, since eight ranks share a core or two; the bandwidth's numbers are those of SIZE repeated.
SIZE, BANDWIDTH_BYTES = 1 << 10, 1 << 12
RIGHT = "nothing"
Call = Callable[..., Any]


@cache
def said(world: int) -> dict[str, list[dict[str, Any]]]:
    """Fault -> the reports of all ranks."""
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, __file__, str(world)]
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def written(name: str, given: tuple[Any, ...], more: dict[str, Any]) -> Any:
    """The tensor into which a call of ``torch.distributed`` writes; as there, autograd does not see it."""
    if name == "batch_isend_irecv":
        return given[0][1].tensor.data
    return (given[0] if given else more.get("output", more.get("output_tensor"))).data


def read(name: str, given: tuple[Any, ...], more: dict[str, Any]) -> Any:
    """The tensor from which it reads; of two calls it is the one that they write into."""
    if name == "batch_isend_irecv":
        return given[0][0].tensor.data
    if name in ("all_reduce", "broadcast"):
        return written(name, given, more)
    return (given[1] if len(given) > 1 else more.get("input", more.get("input_tensor"))).data


def idle(name: str, right: Call) -> Call:
    """Nothing is written."""
    return lambda *given, **more: []


def lone(name: str, right: Call) -> Call:
    """Nothing is exchanged: each rank computes from its own numbers, and all elements are written."""
    import torch.distributed as dist

    def own(*given: Any, **more: Any) -> Any:
        out = written(name, given, more)
        source = read(name, given, more)
        if source.numel() > out.numel():
            source = source.chunk(dist.get_world_size())[dist.get_rank()]
        out.copy_(source.repeat(out.numel() // source.numel()).nan_to_num())
        return []

    return own


def last_element(name: str, right: Call) -> Call:
    """One element is off, on the last rank only."""
    import torch.distributed as dist

    def off(*given: Any, **more: Any) -> Any:
        works = right(*given, **more)
        for work in works if isinstance(works, list) else []:
            work.wait()
        if dist.get_rank() == dist.get_world_size() - 1:
            written(name, given, more)[-1] += 1
        return []

    return off


def order(name: str, right: Call) -> Call:
    """Every part is exchanged and one rank's stands where another's should."""
    import torch.distributed as dist

    def rolled(*given: Any, **more: Any) -> Any:
        out, world = written(name, given, more), dist.get_world_size()
        if name == "reduce_scatter_tensor":
            whole = given[1].clone()
            dist.all_reduce(whole)
            out.copy_(whole.chunk(world)[(dist.get_rank() + 1) % world])
        elif name == "broadcast":
            right(out.nan_to_num_(), src=0)
        else:
            right(*given, **more)
            out.copy_(out.roll(out.numel() // world))
        return []

    return rolled


def missing(name: str, right: Call) -> Call:
    """The last rank's numbers do not take part in a sum."""
    import torch.distributed as dist

    def without(*given: Any, **more: Any) -> Any:
        last = dist.get_rank() == dist.get_world_size() - 1
        if name == "all_reduce":
            return right(given[0].zero_() if last else given[0], *given[1:], **more)
        return right(given[0], given[1] * (not last), **more)

    return without


def summed(name: str, right: Call) -> Call:
    """A sum for a mean: AdamW hides the factor."""
    import torch.distributed as dist

    def factor(output: Any, input: Any, **more: Any) -> Any:
        return right(output, input * dist.get_world_size(), **more)

    return factor


COLLECTIVES = {
    "all_reduce": "all_reduce", "all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single", "broadcast": "broadcast", "send_recv": "batch_isend_irecv",
}  # fmt: skip
# Fault -> the function of torch.distributed, and what becomes of it.
FAULTS: dict[str, tuple[str, Callable[[str, Call], Call]]] = {
    **{f"{name}: {fault.__name__}": (call, fault)
       for name, call in COLLECTIVES.items() for fault in (idle, lone, last_element)},
    **{f"{name}: order": (COLLECTIVES[name], order) for name in ("all_gather", "reduce_scatter", "all_to_all", "broadcast")},
    **{f"{name}: missing": (COLLECTIVES[name], missing) for name in ("all_reduce", "reduce_scatter")},
}  # fmt: skip
SHARDED: dict[str, tuple[str, Callable[[str, Call], Call]]] = {
    "reduce_scatter: lone": ("reduce_scatter_tensor", lone), "reduce_scatter: summed": ("reduce_scatter_tensor", summed),
    "all_gather: lone": ("all_gather_into_tensor", lone),
}  # fmt: skip


def on_a_cpu() -> None:
    """What gloo and torch 2.6 lack on a CPU: AVG; events of streams, and a gather that autograd does not see."""
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize = lambda *_: None

    def with_mean(right: Call, at: int) -> Call:
        """With AVG, whether the operation is an argument by place or by name."""

        def call(*given: Any, **more: Any) -> Any:
            op = more.pop("op", given[at] if len(given) > at else dist.ReduceOp.SUM)
            mean = op == dist.ReduceOp.AVG
            found = right(*given[:at], **more, op=dist.ReduceOp.SUM if mean else op)
            if mean:
                out = written("", given, more)
                out /= dist.get_world_size()
            return found

        return call

    dist.all_reduce, dist.reduce_scatter_tensor = (
        with_mean(dist.all_reduce, 1),
        with_mean(dist.reduce_scatter_tensor, 2),
    )
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    torch.cpu.Stream.record_event = lambda self, event=None: torch.cpu.Event()
    torch.cpu.Stream.wait_event = lambda self, event: None
    torch.cuda.current_stream = torch.cpu.current_stream
    split = torch.split_with_sizes_copy

    def split_with_sizes_copy(*given: Any, out: Any, **more: Any) -> None:
        with contextlib.ExitStack() as kept:
            for tensor in out:
                kept.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            split(*given, out=out, **more)

    torch.split_with_sizes_copy = split_with_sizes_copy


def rank(own: int, world: int, folder: Path) -> None:
    """One rank, which goes through all faults at the same time as the others."""
    import torch
    import torch.distributed as dist
    from nrl_checks import nccl_rank

    dist.init_process_group("gloo", rank=own, world_size=world, init_method=f"file://{folder}/store")
    on_a_cpu()
    device = torch.device("cpu")
    with mock.patch.multiple(nccl_rank, SIZE=SIZE, BANDWIDTH_BYTES=BANDWIDTH_BYTES, ROUNDS=3):
        right = nccl_rank.exchanges(own, world, device)
        found = {RIGHT: right}
        for fault, (call, broken) in FAULTS.items():
            with mock.patch.object(dist, call, broken(call, getattr(dist, call))):
                checked = dict(nccl_rank.collectives(own, world, device))
            found[fault] = {**right, "wrong": [f"{name} is wrong" for name, good in checked.items() if not good]}
            dist.barrier()
        for fault, (call, broken) in SHARDED.items():
            with mock.patch.object(dist, call, broken(call, getattr(dist, call))):
                losses, wrong = nccl_rank.sharded_step(own, device)
            found[f"fully_shard, {fault}"] = {**right, "wrong": wrong, "losses": losses}
            dist.barrier()
        for fault in (idle, missing):
            with mock.patch.object(dist, "all_reduce", fault("all_reduce", dist.all_reduce)):
                _, slips = nccl_rank.bandwidth(own, world, device)
            found[f"bandwidth, {fault.__name__}"] = {**right, "wrong": slips}
            dist.barrier()
    # How fast gloo is says nothing, and rounds to nothing.
    machine = {"bus_gb_s": 1.0, "uuid": f"GPU-{own}", "nccl": "2.28.9", "library": ["/p/libnccl.so.2"], "prefix": "/p"}
    (folder / str(own)).write_text(json.dumps({fault: {**report, **machine} for fault, report in found.items()}))
    dist.barrier()


def end_together(ranks: list[int]) -> None:
    """Wait for all; when one fails, the others wait for it in vain, and are killed."""
    left = set(ranks)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with {status}")


def main(world: int) -> None:
    """Fork the ranks, so that torch is imported once, and gather what they say."""
    import torch
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        ranks = []
        for own in range(world):
            if not (pid := os.fork()):
                status = 1
                try:
                    rank(own, world, Path(place))
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            ranks.append(pid)
        end_together(ranks)
        reports = [json.loads(Path(place, str(n)).read_text()) for n in range(world)]
    print(json.dumps({fault: [report[fault] for report in reports] for fault in reports[0]}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
