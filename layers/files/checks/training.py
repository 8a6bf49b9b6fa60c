"""Backward and optimizer: finite gradients, AdamW moves parameters, one batch is learnt, and the loss is a CPU's."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import checkpoint
from . import inventory as inventories
from .common import Result, scratch_folder
from .conditions import all_conditions

# In bf16 a weight of 1.0 moves only by 2**-8 or more: the rate is above half of that, or the norms would stand still.
STEPS, RATE = 20, 4e-3
# bf16 keeps 8 bits: a loss near 8 from bf16 weights agrees with the float32 forward of the same weights to about 1 %.
LOSS_BOUND = 0.03
# Attention that is not causal moves that mean by 0.4 % only, and a single token's loss by 8.6; bf16 moves one by 0.13.
TOKEN_BOUND = 0.5
# Norm of the difference over the norm of a parameter's float32 gradient: bf16 on a CPU gives 0.03 at most. A backward
# that gives a tenth less for the values of attention gives 0.12.
GRADIENT_BOUND = 0.1
# Everything that is differentiated shows in the gradient of the first; a loader may name what is between otherwise.
NAMED = ("model.embed_tokens.weight", "lm_head.weight")
LEARNT = 0.5
# torch's defaults of AdamW, and how far its first step may be off beyond what bf16 rounds; with half of the rate it is
# off by 0.5, without the correction of its means by 2.
DECAY, EPSILON, UPDATE_BOUND = 0.01, 1e-8, 0.2
Loader = Callable[[Path, str, Any, str], Any]


def check(require_flash: bool = False, inventory: str = "") -> Result:
    """The whole check on the first GPU.

    Flash attention and NeMo Automodel's loader take part where they are installed. With an inventory one that is absent
    must be left out by it; then it stands under ``omitted``.
    """
    result = Result()
    all_conditions(result)
    if result.reasons:
        return result
    import torch
    import transformers

    result.details.update(torch=torch.__version__, cuda=torch.version.cuda, transformers=transformers.__version__)
    same_gpu(result)
    folder = checkpoint.make_checkpoint(Path(scratch_folder("nrl-model-")))
    flash = present(result, "flash_attn", inventory, require_flash)
    automodel = present(result, "nemo_automodel", inventory, False)
    for attention in ("sdpa", *(("flash_attention_2",) if flash else ())):
        train(result, folder, "cuda", attention)
    if automodel:
        train(result, folder, "cuda", "sdpa", name="nemo_automodel", load=load_with_automodel)
    return result


def same_gpu(result: Result) -> None:
    """torch computes on a GPU that the driver lists: what the receipt says of the hardware is of this one."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    listed = [gpu["uuid"] for gpu in result.details["gpus"]]
    result.expect(uuid in listed, f"torch's GPU is {uuid}, and the driver lists {', '.join(listed)}")


def present(result: Result, module: str, inventory: str, required: bool) -> bool:
    """Whether a module is installed; where it is not, that is noted, and is a failure unless it may be absent."""
    if importlib.util.find_spec(module) is not None:
        return True
    why = inventories.read(Path(inventory)).omission(module) if inventory else ""
    result.details.setdefault("omitted", {})[module] = why or "absent: it was not tried"
    result.expect(bool(why) or not (required or inventory), f"{module} is absent, and the inventory does not say why")
    return False


def load_with_automodel(folder: Path, device: str, dtype: Any, attention: str) -> Any:
    """The checkpoint through the loader that the trainer of the automodel tier uses."""
    from nemo_automodel import NeMoAutoModelForCausalLM

    model = NeMoAutoModelForCausalLM.from_pretrained(
        str(folder), torch_dtype=dtype, attn_implementation=attention, use_liger_kernel=False
    )
    return model.to(device)


def train(
    result: Result, folder: Path, device: str, attention: str, *, name: str = "", load: Loader = checkpoint.load
) -> None:
    """Overfit one batch with one attention implementation and note everything that is wrong."""
    import torch

    name = name or attention
    model = load(folder, device, torch.bfloat16, attention).train()
    used = getattr(model.config, "_attn_implementation", "")
    result.expect(used == attention or load is not checkpoint.load, f"{name}: the model's attention is {used}")
    ids = torch.tensor(checkpoint.prompts(4, 64, seed=5), device=device)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses: list[float] = []
    found: dict[str, Any] = {}
    reference = observed(checkpoint.load(folder, "cpu", torch.float32), ids.cpu())
    for step in range(STEPS):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        if step == 0:
            bad = bad_gradients(model)
            result.expect(not bad, f"{name}: gradients are absent, zero or not finite: {', '.join(bad[:5])}")
            found = judge_step(result, name, seen(model, out, ids), reference)
        optimizer.step()
        if step == 0:
            found["update_off"] = judge_update(result, name, model, before)
        optimizer.zero_grad()
        losses.append(float(out.loss.detach()))
    still = [n for n, p in model.named_parameters() if torch.equal(p.detach(), before[n])]
    judge_losses(result, name, losses, reference.loss)
    result.expect(not still, f"{name}: AdamW moved nothing of {', '.join(still[:5])}")
    details = {"first": losses[0], "last": losses[-1], "cpu_float32": reference.loss, "steps": STEPS}
    result.details[name] = {**details, **found}


def judge_losses(result: Result, attention: str, losses: list[float], reference: float) -> None:
    """Finite, near the reference at first, and far lower at last."""
    result.expect(all(map(math.isfinite, losses)), f"{attention}: a loss is not finite: {losses}")
    off = abs(losses[0] - reference) / abs(reference)
    result.expect(off <= LOSS_BOUND, f"{attention}: loss {losses[0]:.4f}, float32 on the CPU {reference:.4f}")
    learnt = losses[-1] < LEARNT * losses[0]
    result.expect(learnt, f"{attention}: {len(losses)} steps on one batch: {losses[0]:.4f} -> {losses[-1]:.4f}")


def judge_update(result: Result, name: str, model: Any, before: dict[str, Any]) -> float:
    """AdamW's first step moves each value by the rate against its gradient's sign, and decays it; the largest error.

    Source: Decoupled Weight Decay Regularization, arXiv 1711.05101, algorithm 2, for t = 1.
    """
    off = {}
    for n, p in model.named_parameters():
        if p.grad is not None:  # else it was said already
            old, gradient = before[n].double(), p.grad.detach().double()
            right = old * (1 - RATE * DECAY) - RATE * gradient / (gradient.abs() + EPSILON)
            slip = ((p.detach().double() - right).abs() - 2**-8 * right.abs()).clamp(min=0)
            off[n] = float(slip.norm() / (right - old).norm())
    # Written so that NaN is no pass.
    wrong = [f"{n} {error:.3g}" for n, error in off.items() if not error <= UPDATE_BOUND]
    result.expect(not wrong, f"{name}: AdamW's first step is off by more than {UPDATE_BOUND}: {', '.join(wrong[:5])}")
    return max(off.values(), default=math.inf)


def bad_gradients(model: Any) -> list[str]:
    """Parameters whose gradient is absent, all zero, or not finite."""
    import torch

    return [
        name
        for name, p in model.named_parameters()
        if p.grad is None or not bool(torch.isfinite(p.grad).all()) or not bool(p.grad.any())
    ]


@dataclass(frozen=True)
class Step:
    """A forward and backward pass: the mean loss, each token's, and each parameter's gradient."""

    loss: float
    tokens: Any
    gradients: dict[str, Any]


def observed(model: Any, ids: Any) -> Step:
    """One pass of a model that has no gradients yet."""
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return seen(model, out, ids)


def seen(model: Any, out: Any, ids: Any) -> Step:
    """What a pass left in the model, and what its output says of each token after the first."""
    logs = out.logits.detach()[:, :-1].float().log_softmax(-1)
    tokens = -logs.gather(2, ids[:, 1:, None])[..., 0]
    gradients = {n: p.grad.detach().cpu().double() for n, p in model.named_parameters() if p.grad is not None}
    return Step(float(out.loss.detach()), tokens.cpu().double(), gradients)


def judge_step(result: Result, name: str, step: Step, right: Step) -> dict[str, Any]:
    """Each token's loss and each parameter's gradient against those of the untouched checkpoint in float32."""
    token = float((step.tokens - right.tokens).abs().max())
    # Written so that NaN is no pass.
    result.expect(token <= TOKEN_BOUND, f"{name}: a token's loss is off by {token:.3g}, at most {TOKEN_BOUND}")
    shared = [n for n, g in right.gradients.items() if n in step.gradients and step.gradients[n].shape == g.shape]
    missing = sorted(set(NAMED) - set(shared))
    result.expect(not missing, f"{name}: no gradient to compare for {', '.join(missing)}")
    off = {n: float((step.gradients[n] - right.gradients[n]).norm() / right.gradients[n].norm()) for n in shared}
    wrong = [f"{n} {error:.3g}" for n, error in off.items() if not error <= GRADIENT_BOUND]
    result.expect(not wrong, f"{name}: gradients are off by more than {GRADIENT_BOUND}: {', '.join(wrong[:5])}")
    return {"token_off": token, "gradient_off": max(off.values(), default=math.inf), "gradients": len(off)}
