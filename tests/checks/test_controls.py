"""Negative controls: what a broken optimizer, attention or engine does is seen. torch on a CPU is enough."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import checks_lab  # noqa: F401
import pytest

torch = pytest.importorskip("torch", reason="test_in_debian.py runs it, or OCI_BUILDER_TORCH: see conftest.py")

from nrl_checks import checkpoint, generation, training  # noqa: E402
from nrl_checks.common import Result  # noqa: E402

MODELS = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


@MODELS
def test_the_tiny_checkpoint_learns_on_a_cpu(tmp_path: Path) -> None:
    """The positive control of training."""
    result = Result()
    training.train(result, checkpoint.make_checkpoint(tmp_path), "cpu", "sdpa")
    assert result.outcome == "pass", result.reasons


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


# Fault of the engine -> the lines of the verdict, which are all that speak against it.
ENGINES = {
    "": [], "one position off": ["mean(exp|d|)", "max|d|"], "a wrong token of the context": ["mean(exp|d|)", "max|d|"],
    "nothing is drawn": ["nothing was drawn"],
}  # fmt: skip


@MODELS
@pytest.mark.parametrize("fault", ENGINES)
def test_a_broken_engine_is_seen(tmp_path: Path, fault: str) -> None:
    """The prompt read backwards is the check's own negative control, and is caught each time."""
    result = Result()
    generation.compare(result, "eager", *engine(tmp_path, fault))
    assert len(result.reasons) == len(ENGINES[fault]), result.reasons
    assert all(line in reason for line, reason in zip(ENGINES[fault], result.reasons, strict=True))
