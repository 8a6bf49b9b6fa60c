"""N ranks on N GPUs: collectives right element for element, one sharded training step, measured bus bandwidth."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .common import Result
from .conditions import all_conditions
from .process import become_subreaper, descendants, kill_tree

FEWEST = 2


def check(ranks: int, at_least: int, version: str, timeout: float = 300) -> Result:
    """Start one process a GPU, wait, and judge what they wrote. One rank is a failure: there is nothing to exchange.

    Args:
        ranks: how many; 0 takes all visible GPUs.
        at_least: how many the gate wants.
        version: NCCL's expected version; when empty that of the tier's own package, if it has one.
    """
    result = Result()
    wanted = max(FEWEST, at_least, ranks)
    count = all_conditions(result, wanted)
    world = ranks or count
    result.details["world"] = world
    result.expect(world >= max(FEWEST, at_least), f"{world} ranks, at least {max(FEWEST, at_least)} wanted")
    if result.reasons:
        return result
    with tempfile.TemporaryDirectory(prefix="nrl-nccl-") as folder:
        launch(result, world, Path(folder), timeout)
        reports = [read(Path(folder) / f"rank{rank}.json") for rank in range(world)]
    judge(result, world, reports, version or packaged())
    return result


def packaged() -> str:
    """The version of NCCL's package for CUDA 13 in this tier, as NCCL itself writes it; empty where there is none."""
    try:
        return ".".join(importlib.metadata.version("nvidia-nccl-cu13").split(".")[:3])
    except importlib.metadata.PackageNotFoundError:
        return ""


def launch(result: Result, world: int, folder: Path, timeout: float) -> None:
    """Run the ranks; when one fails or the time is over, all are killed."""
    become_subreaper()
    before = descendants(os.getpid())
    port, program = free_port(), str(Path(__file__).resolve().parent)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    logs = [(folder / f"rank{rank}.log").open("wb") for rank in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, program, "nccl-rank", "--out", str(folder / f"rank{rank}.json")],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL, stdout=logs[rank], stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]  # fmt: skip
    deadline = time.monotonic() + timeout
    while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
        if time.monotonic() > deadline:
            result.add([f"the ranks were not done after {timeout:g} seconds"])
            break
        time.sleep(0.1)
    states = [p.poll() for p in processes]
    for process in processes:
        kill_tree(process, before)
    for log in logs:
        log.close()
    for rank, state in enumerate(states):
        text = (folder / f"rank{rank}.log").read_text(errors="replace")[-700:]
        result.expect(state == 0, f"rank {rank} ended with {state}: {text}")


def free_port() -> int:
    """A port of loopback that nobody uses at present."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def read(path: Path) -> dict[str, Any]:
    """A rank's report; empty when it wrote none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def judge(result: Result, world: int, reports: list[dict[str, Any]], version: str) -> None:
    """The ranks' reports against each other and against what was asked for."""
    if not result.expect(len(reports) == world and all(reports), "a rank wrote no report"):
        return
    result.add(f"rank {n}: {reason}" for n, report in enumerate(reports) for reason in report["wrong"])
    result.expect([r["rank"] for r in reports] == list(range(world)), "the ranks are not 0 to N-1")
    sizes = sorted({r["world"] for r in reports})
    result.expect(sizes == [world], f"the world's size from inside is {sizes}, not {world}")
    uuids = [r["uuid"] for r in reports]
    result.expect(len(set(uuids)) == world, "two ranks have one device")
    versions = sorted({r["nccl"] for r in reports})
    result.expect(len(versions) == 1, f"ranks have different NCCLs: {versions}")
    result.expect(version in ("", *versions[:1]), f"NCCL is {versions}, expected {version}")
    for n, report in enumerate(reports):
        own = report["library"] and all(path.startswith(f"{report['prefix']}/") for path in report["library"])
        result.expect(bool(own), f"rank {n}: NCCL comes from {report['library'] or 'nowhere'}, not {report['prefix']}")
        missing = sorted(COLLECTIVES - set(report["done"]))
        result.expect(not missing, f"rank {n} did not do {', '.join(missing)}")
        result.expect(report["bus_gb_s"] > 0, f"rank {n} measured no bandwidth")
    losses = [tuple(r["losses"]) for r in reports]
    result.expect(len(set(losses)) == 1, f"fully_shard: the losses differ between ranks: {losses}")
    strangers = sorted(set(uuids) - {gpu["uuid"] for gpu in result.details["gpus"]})
    result.expect(not strangers, f"ranks are on devices that the driver does not list: {', '.join(strangers)}")
    result.details.update(
        uuids=uuids, nccl=versions, library=sorted({p for r in reports for p in r["library"]}),
        collectives=sorted(COLLECTIVES),
        fully_shard=list(losses[0]), bus_gb_s=min(r["bus_gb_s"] for r in reports),
        multicast=os.environ.get("NCCL_NVLS_ENABLE", "not set"),
    )  # fmt: skip


COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"}
