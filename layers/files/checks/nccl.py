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
from collections.abc import Sequence
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
    with tempfile.TemporaryDirectory(prefix="nrl-nccl-", ignore_cleanup_errors=True) as folder:
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
    """Run the ranks; when one fails, the time is over, or this process is interrupted, all are killed."""
    become_subreaper()
    before = descendants(os.getpid())
    port, program = free_port(), str(Path(__file__).resolve().parent)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            argv = [sys.executable, program, "nccl-rank", "--out", str(folder / f"rank{rank}.json")]
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
                )
        if not _end(processes, timeout):
            result.add([f"the ranks were not done after {timeout:g} seconds"])
        states = [p.poll() for p in processes]
    finally:
        for process in processes or [None]:
            kill_tree(process, before)
    result.add(failures(states, folder))


def _end(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> bool:
    """Wait until all ranks have ended, or one has failed; whether that came in time."""
    deadline = time.monotonic() + timeout
    while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def failures(states: Sequence[int | None], folder: Path) -> list[str]:
    """What became of the ranks that did not end well: first those that failed by themselves, then those killed for it.

    A reason has room for some of eight ranks' last words only, and the failed one's must be among them.
    """
    failed = [rank for rank, state in enumerate(states) if state]
    killed = [rank for rank, state in enumerate(states) if state is None]
    words = []
    for rank in [*failed, *([] if failed else killed)]:
        text = (folder / f"rank{rank}.log").read_text(errors="replace")[-700:]
        how = "had to be killed" if states[rank] is None else f"ended with {states[rank]}"
        words.append(f"rank {rank} {how}: {text}")
    if failed and killed:
        words.append(f"killed for it: {', '.join(f'rank {rank}' for rank in killed)}")
    return words


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
