"""What each check makes of what it measured; the numbers are made up, so that every wrong one is seen to fail."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checks_lab  # noqa: F401
import pytest
from nrl_checks import checkpoint, generation, imports, inventory, nccl, nccl_rank, relocation, training
from nrl_checks.common import CheckFailed, Result
from nrl_checks.process import Done

NAMES = sorted(nccl.COLLECTIVES)


def report(rank: int, **change: Any) -> dict[str, Any]:
    return {"rank": rank, "world": 2, "done": NAMES, "wrong": [], "uuid": f"GPU-{rank}", "nccl": "2.28.9",
            "losses": [1.0, 0.9], "library": ["/p/libnccl.so.2"], "prefix": "/p", "bus_gb_s": 300.0, **change}  # fmt: skip


def judged(*reports: dict[str, Any], version: str = "") -> str:
    result = Result(details={"gpus": [{"uuid": "GPU-0"}, {"uuid": "GPU-1"}]})
    nccl.judge(result, 2, list(reports), version)
    return result.outcome


def test_two_ranks_that_agree() -> None:
    assert judged(report(0), report(1), version="2.28.9") == "pass"


@pytest.mark.parametrize(
    "change",
    [{"wrong": ["all_reduce is wrong"]}, {"world": 1}, {"uuid": "GPU-0"}, {"nccl": "2.27.0"}, {"losses": [1.0, 0.8]},
     {"library": []}, {"library": ["/usr/lib/libnccl.so.2"]}, {"rank": 0}, {"done": NAMES[1:]}, {"bus_gb_s": 0.0},
     {"bus_gb_s": math.nan}, {"losses": [math.nan, math.nan]}, {"uuid": "GPU-7"}],
)  # fmt: skip
def test_one_rank_that_differs(change: dict[str, Any]) -> None:
    """B179 among them: every rank reports one device."""
    assert judged(report(0), {**report(1), **change}) == "fail"


def test_a_missing_report_another_version_and_a_missing_collective() -> None:
    assert judged(report(0), {}) == "fail"
    assert judged(report(0), report(1), version="2.29.0") == "fail"
    assert judged(report(0, done=NAMES[1:]), report(1)) == "fail"


@pytest.mark.parametrize(
    ("lone", "shared", "held"),
    [([2.0, 1.0], [2.0, 1.1], 5), ([2.0, 2.0], [2.0, 2.0], 5), ([2.0, 1.0], [2.0, 1.0], 10),
     ([2.0, math.nan], [2.0, math.nan], 5), ([2.0, 2.5], [2.0, 2.5], 5)],
)  # fmt: skip
def test_a_sharded_step_that_is_none(lone: list[float], shared: list[float], held: int) -> None:
    """Other gradients, an optimizer that does not move, nothing sharded, no numbers, a loss that grows."""
    assert nccl_rank.judge_step(lone, shared, held, 10)
    assert nccl_rank.judge_step([2.0, 1.0], [2.0, 1.0], 5, 10) == []
    assert nccl_rank.judge_step([2.0, 1.0], [2.0, 1.0], 5, 10, off=0.01)
    assert nccl_rank.judge_step([2.0, 1.0], [2.0, 1.0], 5, 10, off=math.nan)


def rows(
    shift: float = 0.0, control: float = 3.0, gap: float = 0.0, drawn: float = 1.0, expected: float = -1.2
) -> tuple[list[Any], list[Any]]:
    values = [-1.0] * generation.NEW_TOKENS
    moved = [v + shift for v in values]
    generated = [{"logprobs": moved, "greedy": greedy} for greedy in (True, False)]
    fair = {"expected": [expected] * len(values), "variance": [1.0] * len(values)}
    scored = [
        {"logprobs": values, "control": [v - control for v in values], "gaps": [g] * len(values), **fair}
        for g in (gap, drawn)
    ]
    return generated, scored


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [({}, "pass"), ({"shift": 0.04}, "pass"), ({"shift": 0.05}, "fail"), ({"shift": math.nan}, "fail"),
     ({"gap": 1.0}, "fail"), ({"drawn": 0.0}, "fail"), ({"control": 0.0}, "fail"),
     ({"expected": -2.5}, "fail"), ({"expected": 0.5}, "fail"), ({"expected": math.nan}, "fail")],
)  # fmt: skip
def test_generation_against_its_judge(changes: dict[str, float], outcome: str) -> None:
    """A sampler that takes the best each time draws nothing; a negative control that agrees proves that nothing is seen."""
    result = Result()
    generation.compare(result, "eager", *rows(**changes))
    assert result.outcome == outcome


@pytest.mark.parametrize(
    ("change", "attention", "outcome"),
    [({}, "", "pass"), ({}, "FLASHINFER", "fail"), ({"attention": "FLASHINFER"}, "FLASHINFER", "pass"),
     ({"compilation": "NONE"}, "", "fail"), ({"compilation": "unknown"}, "", "pass"), ({"made": 0}, "", "fail")],
)  # fmt: skip
def test_an_engine_that_did_not_compile_is_not_the_compiled_one(
    change: dict[str, str], attention: str, outcome: str
) -> None:
    """Nor is one whose word is right and that left nothing in a compiler's cache: torch was told to compile nothing."""
    engine = {"attention": "FLASH_ATTN", "compilation": "VLLM_COMPILE", "made": 12, **change}
    eager = {**engine, "compilation": "NONE", "made": 0}
    result = Result()
    generation.judge_engines(result, {"eager": eager, "compiled": engine}, attention)
    assert result.outcome == outcome


def test_one_wrong_token_among_many_fails() -> None:
    generated, scored = rows()
    generated[0]["logprobs"][5] -= 0.6
    result = Result()
    generation.compare(result, "eager", generated, scored)
    assert "max|d|" in "; ".join(result.reasons)


def test_the_attention_is_named_or_unknown_and_never_stops_the_check() -> None:
    class Backend:
        @staticmethod
        def get_name() -> str:
            return "FLASH_ATTN"

    runner = SimpleNamespace(attn_groups=[[SimpleNamespace(backend=Backend)]])
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    engine = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))
    assert generation.attention_of(engine) == "FLASH_ATTN"
    assert generation.attention_of(SimpleNamespace()) == "unknown"
    runner.attn_groups = []
    assert generation.attention_of(engine) == "unknown"


@pytest.mark.parametrize("losses", [[9.0, math.nan], [9.0, 8.0], [8.0, 0.1], [math.inf, 0.1]])
def test_losses_that_are_no_training(losses: list[float]) -> None:
    result = Result()
    training.judge_losses(result, "sdpa", losses, 9.0)
    assert result.outcome == "fail"


def found(prefix: str, **change: Any) -> dict[str, Any]:
    libraries = {name: [f"{prefix}/lib/{name}.so.1"] for name in relocation.WATCHED}
    return {"executable": f"{prefix}/bin/python", "prefix": prefix, "path": [prefix], "mapped": [],
            "libraries": libraries, **change}  # fmt: skip


def test_libraries_of_the_own_prefix() -> None:
    assert relocation.judge("/a", ["/b"], found("/a")) == []
    assert relocation.judge("/a", ["/b"], found("/a", mapped=["/b/lib/x.so"]))
    assert relocation.judge("/a", ["/b"], found("/a", path=["/b/site"]))
    system = found("/a")
    system["libraries"]["libnccl"] = ["/usr/lib/libnccl.so.2"]
    assert relocation.judge("/a", ["/b"], system)
    system["libraries"]["libnccl"] = []
    assert relocation.judge("/a", ["/b"], system)


def test_a_mention_of_another_prefix_is_replaced_and_no_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix whose name goes on with another's is not below it."""
    monkeypatch.setenv("NRL_TEST", "/rt/lib:/rt-second/lib:/link:/rt")
    found = relocation.own_environment("/rt-second", ["/link", "/rt"])["NRL_TEST"]
    assert found == "/rt-second/lib:/rt-second/lib:/rt-second:/rt-second"


def test_the_probe_s_environment_names_no_other_prefix_by_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activated through a link, a prefix stands in the environment by that name."""
    seen: list[dict[str, str]] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("one")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/link/lib")
    monkeypatch.setattr(relocation, "all_conditions", lambda result: 1)
    monkeypatch.setattr(
        relocation, "run", lambda argv, timeout, env: seen.append(env) or Done(1, "", "", 0.0, False, 0)
    )
    relocation.check([f"{tmp_path}/link", f"{tmp_path}/two"], "base")
    assert [env["LD_LIBRARY_PATH"] for env in seen] == [f"{tmp_path}/link/lib", f"{tmp_path}/two/lib"]


def test_what_json_has_no_number_for_is_a_word() -> None:
    """A strict reader would refuse the whole result, and the reason with it."""
    value = Result(["off"], {"errors": {"output": math.inf}, "losses": [math.nan, 1.0]}).to_json()
    assert json.loads(json.dumps(value, allow_nan=False))["details"] == {
        "errors": {"output": "inf"},
        "losses": ["nan", 1.0],
    }


def test_versions_must_be_the_inventory_s(tmp_path: Path) -> None:
    path = tmp_path / "inventory.json"
    with pytest.raises(CheckFailed):
        inventory.read(path)
    path.write_text("[]")
    with pytest.raises(CheckFailed):
        inventory.read(path)
    path.write_text(json.dumps({"packages": [{"name": "No_Such.Package", "version": "1"}]}))
    result = Result()
    inventory.compare(result, inventory.read(path))
    assert "no-such-package" in "; ".join(result.reasons)


def test_an_absent_driver_linked_module_is_not_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_CHECK_LIBCUDA", "/nonexistent")
    with pytest.raises(CheckFailed, match="absent"):
        imports.driver_linked("no_such_module", gpu=False)
    assert imports.driver_linked("no_such_module", gpu=True).outcome == "fail"


def test_prompts_are_the_same_everywhere() -> None:
    assert checkpoint.prompts(1, 4, seed=1) == checkpoint.prompts(1, 4, seed=1)
    assert checkpoint.prompts(1, 4, seed=1) != checkpoint.prompts(1, 4, seed=2)
