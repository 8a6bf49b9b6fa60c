"""Negative controls: what a broken optimizer, attention or engine does is seen. torch on a CPU is enough."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
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


class Uncorrected(torch.optim.AdamW):
    """An AdamW that does not correct its means for their beginning at zero: it learns all the same."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    mean, square = state.setdefault("mean", p.grad * 0), state.setdefault("square", p.grad * 0)
                    mean.lerp_(p.grad, 0.1)
                    square.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                    p.addcdiv_(mean, square.sqrt() + 1e-8, value=-group["lr"])


class Halved(torch.optim.AdamW):
    """An AdamW with half of the rate that it was given."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr / 2)


@MODELS
@pytest.mark.parametrize("broken", [Uncorrected, Halved])
def test_an_optimizer_that_is_not_adamw_is_seen_though_it_learns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: type
) -> None:
    """Each value's first step is known: the rate, against the gradient's sign."""
    monkeypatch.setattr(torch.optim, "AdamW", broken)
    result = Result()
    training.train(result, checkpoint.make_checkpoint(tmp_path), "cpu", "sdpa")
    assert len(result.reasons) == 1, result.reasons
    assert "AdamW's first step is off" in result.reasons[0]


@MODELS
def test_the_fused_way_of_a_gpu_s_adamw_is_within_the_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU torch goes through all parameters at once."""
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, lr: adamw(parameters, lr=lr, foreach=True))
    result = Result()
    training.train(result, checkpoint.make_checkpoint(tmp_path), "cpu", "sdpa")
    assert result.outcome == "pass", result.reasons
    assert result.details["sdpa"]["update_off"] < training.UPDATE_BOUND / 2


@MODELS
def test_another_attention_than_the_one_asked_for_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A loader that falls back computes right, and flash attention was never tried."""
    right = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda folder, device, dtype, attention="": right(folder, device, dtype))
    monkeypatch.setattr(training, "STEPS", 1)
    result = Result()
    training.train(result, checkpoint.make_checkpoint(tmp_path), "cpu", "eager", load=checkpoint.load)
    assert "eager: the model's attention is sdpa" in result.reasons


@pytest.mark.parametrize(("uuid", "reasons"), [("1", 0), ("2", 1)])
def test_torch_must_compute_on_a_gpu_that_the_driver_lists(
    monkeypatch: pytest.MonkeyPatch, uuid: str, reasons: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuid))
    result = Result(details={"gpus": [{"uuid": "GPU-1"}]})
    training.same_gpu(result)
    assert len(result.reasons) == reasons


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
        how = (
            {"temperature": 2.0} if fault == "another temperature" else {"top_k": 3 if fault == "the best three" else 0}
        )
        with torch.no_grad():
            whole = model.generate(torch.tensor([prompt]), do_sample=draws, **{"top_k": 0, **how}, min_new_tokens=generation.NEW_TOKENS,
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
    "nothing is drawn": ["nothing was drawn", "drawn fairly"], "another temperature": ["drawn fairly"],
    "the best three": ["drawn fairly"],
}  # fmt: skip


@MODELS
@pytest.mark.parametrize("fault", ENGINES)
def test_a_broken_engine_is_seen(tmp_path: Path, fault: str) -> None:
    """The prompt read backwards is the check's own negative control, and is caught each time."""
    result = Result()
    generation.compare(result, "eager", *engine(tmp_path, fault))
    assert len(result.reasons) == len(ENGINES[fault]), result.reasons
    assert all(line in reason for line, reason in zip(ENGINES[fault], result.reasons, strict=True))
