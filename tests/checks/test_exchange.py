"""Negative controls of the exchange: 2, 4 and 8 ranks with gloo on a CPU; each fault is seen, by its own line."""

from __future__ import annotations

import checks_lab  # noqa: F401
import pytest
from ranks_lab import COLLECTIVES, FAULTS, RIGHT, SHARDED, said

pytest.importorskip("torch", reason="test_in_debian.py runs it, or OCI_BUILDER_TORCH: see conftest.py")

from nrl_checks import nccl
from nrl_checks.common import Result

WORLDS = (2, 4, 8)
pytestmark = pytest.mark.parametrize("world", WORLDS)


def verdict(world: int, fault: str) -> list[str]:
    """The reasons of the whole check, given what the ranks report."""
    result = Result(details={"gpus": [{"uuid": f"GPU-{n}"} for n in range(world)]})
    nccl.judge(result, world, said(world)[fault], "2.28.9")
    return result.reasons


def test_ranks_that_exchange_right(world: int) -> None:
    """The positive control: among it a step of fully_shard, and the mean that the bandwidth is measured with."""
    reports = said(world)[RIGHT]
    assert verdict(world, RIGHT) == []
    assert {tuple(report["done"]) for report in reports} == {tuple(sorted(nccl.COLLECTIVES))}
    assert set(COLLECTIVES) == nccl.COLLECTIVES


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_exchange_is_seen_and_only_that(world: int, fault: str) -> None:
    """Every line is about the one collective; of one that is off on the last rank only, there is one line."""
    name, _, kind = fault.partition(": ")
    lines = [line.replace(f"{name} is wrong", "") for line in verdict(world, fault)]
    assert lines == [f"rank {n}: " for n in seen_by(world, name, kind)]


def seen_by(world: int, name: str, kind: str) -> list[int]:
    """The ranks that can see a fault."""
    ranks = list(range(world))
    if kind == "last_element":
        return ranks[-1:]
    # The source of a broadcast has the right numbers whatever is exchanged, unless it is given another's.
    return ranks[:-1] if name == "broadcast" and kind in ("idle", "lone") else ranks


@pytest.mark.parametrize("fault", SHARDED)
def test_a_broken_exchange_of_a_sharded_step_is_seen(world: int, fault: str) -> None:
    """With one batch on all ranks an exchange that does nothing gave the right step; AdamW hides a factor."""
    lines = verdict(world, f"fully_shard, {fault}")
    assert [f"rank {n}: fully_shard: gradients are off" for n in range(world)] == [
        line.partition(" by ")[0] for line in lines if "gradients" in line
    ]


@pytest.mark.parametrize("fault", ["idle", "missing"])
def test_a_bandwidth_of_numbers_that_did_not_arrive_is_seen(world: int, fault: str) -> None:
    """An exchange that returns at once is the fastest of all."""
    lines = verdict(world, f"bandwidth, {fault}")
    assert lines and all("gave a mean off by" in line for line in lines)
