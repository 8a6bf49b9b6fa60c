"""Operators that are compiled for the GPU: each computes what plain arithmetic in float32 on the CPU computes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import inventory as inventories
from . import kernels
from .common import Result, absent
from .conditions import all_conditions

Operator = Callable[[], dict[str, Any]]
# Tier -> module -> its operator. What a tier does not have must be in its inventory as left out, or the check fails.
OPERATORS: dict[str, dict[str, Operator]] = {
    "base": {},
    "automodel": {
        "transformer_engine": kernels.transformer_engine, "causal_conv1d": kernels.causal_conv1d,
        "mamba_ssm": kernels.mamba_ssm, "grouped_gemm": kernels.grouped_gemm, "flash_attn": kernels.flash_attn,
    },
    "vllm": {
        "deep_gemm": lambda: kernels.deep_gemm("deep_gemm"),
        "vllm": kernels.vllm_deep_gemm, "flashinfer": kernels.flashinfer,
    },
}  # fmt: skip
# Norm of the difference over norm of the reference. bf16 keeps 8 bits, so a sum of bf16 products is off by up to 1 %.
BOUND = 2e-2


def check(tier: str, inventory: str, only: Sequence[str] = ()) -> Result:
    """Every operator of a tier, those first that the inventory does not leave out.

    Left-out ones stand under ``omitted`` with their reason; where nothing else is left, the check is skipped.
    """
    result = Result()
    all_conditions(result)
    known = OPERATORS.get(tier, {})
    unknown = sorted(set(only) - set(known))
    result.expect(bool(known), f"no operators are known for the tier {tier!r}")
    result.expect(not unknown, f"the tier {tier} has no operator {', '.join(unknown)}")
    if result.reasons:
        return result
    wanted = {name: run for name, run in known.items() if not only or name in only}
    run_all(result, wanted, inventories.read(Path(inventory)))
    return result


def run_all(result: Result, wanted: Mapping[str, Operator], listed: inventories.Inventory) -> None:
    """One that fails does not stop the others."""
    omitted = {name: reason for name in wanted if (reason := listed.omission(name))}
    result.details["omitted"] = omitted
    for name, operator in wanted.items():
        if name in omitted:
            continue
        try:
            importlib.import_module(name)
            result.details[name] = judged(result, name, operator())
        except kernels.NotForThisPython as error:
            omitted[name] = str(error)
        except ImportError as error:
            result.add([f"{name}: {absent(error)}"])
        except Exception as error:
            result.add([f"{name}: {type(error).__name__}: {str(error)[-400:]}"])
    if len(omitted) == len(wanted):
        result.skipped = "; ".join(omitted.values())


def judged(result: Result, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Every error is a number within the bound; at least one was measured."""
    errors: Mapping[str, float] = found.get("errors", {})
    result.expect(bool(errors), f"{name}: nothing was compared")
    for what, error in errors.items():
        # Written so that NaN is no pass.
        result.expect(error <= BOUND, f"{name}: {what} is off by {error:.3g}, at most {BOUND}")
    for problem in found.get("problems", ()):
        result.add([f"{name}: {problem}"])
    return found
