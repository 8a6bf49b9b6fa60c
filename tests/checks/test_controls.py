"""Negative controls: what a broken exchange, optimizer or engine does is seen. torch on a CPU is enough."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import checks_lab  # noqa: F401
import pytest

torch = pytest.importorskip("torch", reason="needs torch: see conftest.py for OCI_BUILDER_TORCH")

import torch.distributed as dist  # noqa: E402
from nrl_checks import checkpoint, generation, nccl, nccl_rank, training  # noqa: E402
from nrl_checks.common import Result  # noqa: E402

OWN, WORLD, SIZE = 0, 2, 64
MODELS = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


class Exchange:
    """Rank 0 of a world of two, whose other rank's numbers are known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nccl_rank, "SIZE", SIZE)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(dist, "P2POp", lambda what, data, peer: (what, data, peer))
        self.whole = [nccl_rank.numbers(100 + r, SIZE * WORLD, torch.device("cpu")) for r in range(WORLD)]
        right = {
            "all_reduce": lambda data: data.copy_(sum(self.whole)),
            "all_gather_into_tensor": lambda data, _: data.copy_(torch.cat([w[:SIZE] for w in self.whole])),
            "reduce_scatter_tensor": lambda data, _: data.copy_(sum(self.whole)[:SIZE]),
            "all_to_all_single": lambda data, _: data.copy_(torch.cat([w[:SIZE] for w in self.whole])),
            "broadcast": lambda data, src: data.copy_(self.whole[src]),
            "batch_isend_irecv": self.receive,
        }
        for name, function in right.items():
            monkeypatch.setattr(dist, name, function)

    def receive(self, works: list[Any]) -> list[Any]:
        """The number of the other rank."""
        works[1][1].copy_(self.whole[1])
        return []

    def checked(self) -> dict[str, bool]:
        """What the rank says."""
        return dict(nccl_rank.collectives(OWN, WORLD, torch.device("cpu")))


def test_an_exchange_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Exchange(monkeypatch).checked()
    assert set(checked) == nccl.COLLECTIVES
    assert all(checked.values())


FUNCTIONS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single", "broadcast": "broadcast", "send_recv": "batch_isend_irecv",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("fault", ["nothing is written", "one element is off"])
def test_a_broken_exchange_is_seen_and_only_that(monkeypatch: pytest.MonkeyPatch, name: str, fault: str) -> None:
    exchange = Exchange(monkeypatch)
    right = getattr(dist, FUNCTIONS[name])

    def broken(*arguments: Any, **options: Any) -> Any:
        if fault == "one element is off":
            right(*arguments, **options)
            data = arguments[0][1][1] if name == "send_recv" else arguments[0]
            data[-1] += 1
        return []

    monkeypatch.setattr(dist, FUNCTIONS[name], broken)
    assert [n for n, good in exchange.checked().items() if not good] == [name]


def sharded(fault: str) -> list[dict[str, Any]]:
    """What two real ranks say, which exchange by gloo."""
    lab, path = Path(__file__).with_name("sharded_lab.py"), os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, str(lab), fault], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_a_sharded_step_of_two_real_ranks() -> None:
    ranks = sharded("")
    assert [rank["wrong"] for rank in ranks] == [[], []]
    assert ranks[0]["losses"] == ranks[1]["losses"]


@pytest.mark.parametrize("fault", ["nothing is exchanged", "sums for means"])
def test_gradients_that_are_not_averaged_are_seen(fault: str) -> None:
    """With one batch on all ranks an exchange that does nothing gave the right step; AdamW hides a factor."""
    for rank in sharded(fault):
        assert "fully_shard: gradients are off" in "; ".join(rank["wrong"])


@MODELS
def test_an_optimizer_that_does_not_move_is_no_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, lr: torch.optim.SGD(parameters, lr=0.0))
    monkeypatch.setattr(training, "STEPS", 2)
    result = Result()
    training.train(result, checkpoint.make_checkpoint(tmp_path), "cpu", "sdpa")
    assert "AdamW moved nothing" in "; ".join(result.reasons)


class Scaled(torch.autograd.Function):
    """The same forward, and a backward with a factor."""

    @staticmethod
    def forward(context: Any, x: Any, factor: float) -> Any:
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient * context.factor, None


ATTENTION = torch.nn.functional.scaled_dot_product_attention
FAULTS: dict[str, tuple[str, Any]] = {
    "not causal": ("a token's loss", lambda q, k, v, **more: ATTENTION(q, k, v, **{**more, "is_causal": False})),
    "another scale": ("a token's loss", lambda q, k, v, **more: ATTENTION(q, k, v, **{**more, "scale": 0.07})),
    "a backward of half": ("gradients are off", lambda q, k, v, **more: ATTENTION(Scaled.apply(q, 0.5), k, v, **more)),
    "a backward of nine tenths": (
        "gradients are off", lambda q, k, v, **more: ATTENTION(q, k, Scaled.apply(v, 0.9), **more)
    ),
    "a backward that goes up": ("gradients are off", lambda *given, **more: Scaled.apply(ATTENTION(*given, **more), -1.0)),
}  # fmt: skip


@MODELS
@pytest.mark.parametrize("fault", FAULTS)
def test_attention_that_computes_wrong_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> None:
    """The mean loss of random tokens hides it, and a batch can be learnt with it; the float32 reference is right."""
    reason, broken = FAULTS[fault]

    def attention(q: Any, k: Any, v: Any, **more: Any) -> Any:
        return (broken if q.dtype == torch.bfloat16 else ATTENTION)(q, k, v, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(training, "STEPS", 1)
    result = Result()
    training.train(result, checkpoint.make_checkpoint(tmp_path), "cpu", "sdpa")
    assert any(reason in found for found in result.reasons), result.reasons


def engine(folder: Path, fault: str) -> tuple[list[Any], list[Any]]:
    """A forward in bf16 in place of vLLM, with a fault; and the judge's scores of its tokens."""
    model = checkpoint.load(checkpoint.make_checkpoint(folder / "model"), "cpu", torch.bfloat16)
    rows = []
    torch.manual_seed(1)
    for number, prompt in enumerate(checkpoint.prompts(4, generation.PROMPT_TOKENS, seed=1)):
        start, greedy = len(prompt), number % 2 == 0
        draws = not greedy and fault != "nothing is drawn"
        with torch.no_grad():
            whole = model.generate(torch.tensor([prompt]), do_sample=draws, top_k=0, min_new_tokens=generation.NEW_TOKENS,
                                   max_new_tokens=generation.NEW_TOKENS)[0].tolist()  # fmt: skip
        seen = [*prompt[:-1], 7, *whole[start:]] if fault == "a wrong token of the context" else whole
        values = checkpoint.token_logprobs(model, seen, start)
        if fault == "one position off":
            values = [*values[1:], values[0]]
        rows.append({"prompt": prompt, "tokens": whole[start:], "logprobs": values, "greedy": greedy})
    for mode in ("eager", "compiled"):
        (folder / f"{mode}.json").write_text(json.dumps(rows))
    generation.score(folder)
    return generation.load(folder / "eager.json"), generation.load(folder / "eager-scored.json")


@MODELS
@pytest.mark.parametrize("fault", ["", "one position off", "a wrong token of the context", "nothing is drawn"])
def test_a_broken_engine_is_seen(tmp_path: Path, fault: str) -> None:
    result = Result()
    generation.compare(result, "eager", *engine(tmp_path, fault))
    assert result.outcome == ("fail" if fault else "pass"), result.reasons
