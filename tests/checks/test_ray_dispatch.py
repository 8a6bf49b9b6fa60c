"""Dispatch: tripwires that note a call, refusals that must come, and workers that must be in their own tier."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import checks_lab  # noqa: F401
import pytest
from nrl_checks import ray_dispatch
from nrl_checks.common import CheckFailed, Result

MAPPING = {tier: f"/rt/envs/{tier}/bin/python" for tier in ("base", "automodel", "vllm")}
UUIDS = ["GPU-a", "GPU-b"]


def answers(**change: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What two workers a tier say; the second one with changes."""
    versions = {"base": "5.8.1", "automodel": "5.5.0", "vllm": "5.8.1"}
    found: dict[str, list[dict[str, Any]]] = {}
    for tier, version in versions.items():
        shared = {"executable": MAPPING[tier], "prefix": f"/rt/envs/{tier}", "ray": "2.55.1", "transformers": version}
        found[tier] = [
            {**shared, "rank": str(n), "world_size": "2", "gpus": [{"uuid": uuid, "error": 0.002}]}
            for n, uuid in enumerate(UUIDS)
        ]
        found[tier][1].update(change.get(tier, {}))
    return found


def judged(found: dict[str, list[dict[str, Any]]]) -> str:
    result = Result()
    ray_dispatch.judge(result, MAPPING, found, UUIDS)
    return result.outcome


def test_each_worker_in_its_own_tier_on_its_own_gpu() -> None:
    assert judged(answers()) == "pass"


@pytest.mark.parametrize(
    "change",
    [{"vllm": {"executable": "/rt/envs/base/bin/python"}}, {"automodel": {"prefix": "/usr"}}, {"base": {"rank": "0"}},
     {"base": {"world_size": "1"}}, {"vllm": {"gpus": []}}, {"vllm": {"gpus": [{"uuid": "GPU-a", "error": 0.0}]}},
     {"base": {"gpus": [{"uuid": "GPU-b", "error": 0.5}]}}, {"base": {"gpus": [{"uuid": "GPU-b", "error": math.nan}]}}],
)  # fmt: skip
def test_a_worker_elsewhere_fails(change: dict[str, dict[str, Any]]) -> None:
    """In another tier, with another rank, without a GPU, on another's GPU, or on one that computes wrong."""
    assert judged(answers(**change)) == "fail"


def test_a_worker_that_is_not_there_fails() -> None:
    found = answers()
    found["vllm"].pop()
    assert judged(found) == "fail"


def test_tiers_that_nothing_tells_apart_fail() -> None:
    found = answers()
    for worker in found["automodel"]:
        worker["transformers"] = "5.8.1"
    assert judged(found) == "fail"


def test_two_rays_fail() -> None:
    with pytest.raises(CheckFailed, match="different Rays"):
        judged(answers(vllm={"ray": "2.54.0"}))


@pytest.mark.parametrize("tool", ray_dispatch.TRIPWIRES)
def test_a_tripwire_notes_its_call_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    marker = ray_dispatch.set_tripwires(tmp_path)
    assert not marker.exists()
    assert subprocess.run([tool, "sync", "--locked"]).returncode == 97
    assert marker.read_text() == f"{tool} sync --locked\n"


def test_tripwires_that_cannot_be_executed_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder on a mount without execution: a call would go on to the real uv, and leave no note."""
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    with pytest.raises(CheckFailed, match="do not work"):
        ray_dispatch.set_tripwires(tmp_path)


def test_the_cluster_is_a_new_one_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of the node's user is not joined, and the host's name may have an address that is not up here."""
    given: dict[str, Any] = {}

    def init(address: str, **options: Any) -> None:
        given.update(options, address=address)
        raise CheckFailed("far enough")

    ray = ModuleType("ray")
    ray.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_dispatch, "register", lambda folder: None)
    with pytest.raises(CheckFailed, match="far enough"):
        ray_dispatch.dispatch(Result(), MAPPING, 2)
    assert (given["address"], given["_node_ip_address"]) == ("local", "127.0.0.1")


def registry(monkeypatch: pytest.MonkeyPatch, lookup: Any) -> None:
    """A stand-in for upstream's registry."""
    module = ModuleType("nemo_rl.distributed.ray_actor_environment_registry")
    module.get_actor_python_env = lookup  # type: ignore[attr-defined]
    for name in ("nemo_rl", "nemo_rl.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_the_mapping_must_lead_below_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    registry(
        monkeypatch,
        lambda actor: next(f"/rt/envs/{t}/bin/python" for t, a in ray_dispatch.ACTORS.items() if a == actor),
    )
    good, other = Result(), Result()
    assert ray_dispatch.resolve_all(good, Path("/rt/envs")) == MAPPING
    ray_dispatch.resolve_all(other, Path("/elsewhere"))
    assert (good.outcome, other.outcome) == ("pass", "fail")


def test_an_unavailable_actor_that_is_not_refused_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    registry(monkeypatch, lambda actor: "uv run --locked")
    result = Result()
    ray_dispatch.refuse_unavailable(result)
    assert len(result.reasons) == len(ray_dispatch.UNAVAILABLE)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(RuntimeError("the mcore tier is not in this runtime"), "pass"), (RuntimeError(""), "fail"),
     (KeyError("unknown"), "fail"), (ImportError("no registry"), "fail"), (None, "fail")],
)  # fmt: skip
def test_a_refusal_says_why_and_is_one(monkeypatch: pytest.MonkeyPatch, error: Exception | None, outcome: str) -> None:
    """A lookup that breaks refuses nothing; a message that is the actor's name alone says nothing."""

    def refuse(actor: str) -> str:
        raise error or RuntimeError(f"'{actor}'")

    registry(monkeypatch, refuse)
    result = Result()
    ray_dispatch.refuse_unavailable(result)
    assert result.outcome == outcome
