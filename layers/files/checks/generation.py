"""vLLM's generation, eager and compiled: its log-probabilities must be those of a Hugging Face forward pass.

Three programs, since engine and judge may live in different tiers: ``make`` writes the checkpoint, ``eager`` and
``compiled`` generate with vLLM, ``score`` gives the judge's log-probabilities of the same tokens.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import checkpoint
from .common import CheckFailed, Result, last_json, say, scratch_folder
from .conditions import CACHES, all_conditions, cache_files
from .process import run
from .progress import Progress

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 24, 32
# Upstream's unit limit for mean(exp|d|). A bf16 forward of the tiny checkpoint against float32 gives 1.026 and 0.13.
MEAN_LIMIT, LARGEST = 1.043, 0.5
# A greedy token may differ from the judge's first choice only where the two best are this close.
TIE = 0.5
# Standard deviations by which the sampled tokens' log-probabilities may be off what drawing from the judge's own
# distributions gives: a temperature of 2, or the best few tokens only, is off by far more.
DEVIATIONS = 6.0
# Seconds for all parts together; the list gives the check somewhat more, so that it can say itself what was slow.
LIMIT = 1800.0
MODES = ("eager", "compiled")
COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")


def check(judge_python: str, attention: str = "") -> Result:
    """Make, generate twice, score, compare; then the same with a wrong context, which must not agree.

    Args:
        judge_python: interpreter of the tier that judges.
        attention: vLLM's name of the attention that it must use; empty leaves the choice to it.
    """
    result = Result()
    all_conditions(result)
    if result.reasons:
        return result
    folder = Path(scratch_folder("nrl-generation-"))
    (folder / "attention").write_text(attention)
    parts = Parts(result, folder)
    try:
        parts.run(judge_python, "make")
        engines = {mode: parts.run(sys.executable, mode) for mode in MODES}
        result.details["engine"] = engines
        judge_engines(result, engines, attention)
        result.details["judge"] = parts.run(judge_python, "score")
    except CheckFailed as error:
        # Not passed on: what is known of the conditions and of the parts before stays in the result.
        result.add([str(error)])
        return result
    for mode in MODES:
        generated, scored = load(folder / f"{mode}.json"), load(folder / f"{mode}-scored.json")
        result.details[mode] = compare(result, mode, generated, scored)
    return result


def judge_engines(result: Result, engines: Mapping[str, Mapping[str, Any]], attention: str) -> None:
    """Each engine used the attention that was asked for, and compiled or did not, by its word and by its files."""
    for mode, engine in engines.items():
        used, compiled = engine["attention"], engine["compilation"]
        result.expect(attention in ("", used), f"{mode}: attention is {used}, not {attention}")
        right = compiled == "unknown" or (compiled == "NONE") == (mode == "eager")
        result.expect(right, f"{mode}: vLLM's compilation is {compiled}")
        # A switch of torch (TORCHDYNAMO_DISABLE) leaves vLLM's word as it is, and nothing is compiled.
        made = engine["made"] > 0 or mode == "eager"
        result.expect(made, f"{mode}: nothing was compiled here: no compiler's cache has a new file")


class Parts:
    """The four programs, one after the other, within one limit of time."""

    def __init__(self, result: Result, folder: Path, limit: float = LIMIT) -> None:
        self.folder = folder
        self.deadline = time.monotonic() + limit
        self.seconds: dict[str, float] = result.details.setdefault("seconds", {})

    def run(self, python: str, name: str) -> dict[str, Any]:
        """Run one part in its interpreter; its details. Its progress goes to standard error.

        Raises:
            CheckFailed: it did not pass; the reason says whether it hung or was slow.
        """
        here = str(Path(__file__).resolve().parent)
        argv = [python, here, "generation-part", name, "--folder", str(self.folder)]
        watch = Progress(f"generation: {name}", [Path(os.environ[c]) for c in CACHES if c in os.environ])
        left = max(1.0, self.deadline - time.monotonic())
        done = run(argv, timeout=left, env=dict(os.environ), watch=watch)
        self.seconds[name] = round(done.seconds, 1)
        value = last_json(done.stdout)
        if done.timed_out:
            raise CheckFailed(f"{name} ({python}) {watch.verdict()}; its last words: {done.stderr[-400:]}")
        if done.status != 0 or value is None or value.get("outcome") != "pass":
            why = (value or {}).get("reason") or done.stderr[-800:]
            raise CheckFailed(f"{name} ({python}) ended with {done.status}: {why}")
        say(f"generation: {name}: done after {done.seconds:.0f} s\n", sys.stderr)
        return dict(value["details"])


def load(path: Path) -> list[dict[str, Any]]:
    """What a part wrote."""
    return list(json.loads(path.read_text()))


def compare(result: Result, mode: str, generated: Sequence[dict[str, Any]], scored: Sequence[dict[str, Any]]) -> Any:
    """Engine against judge on every generated token, with the negative control."""
    engine = [value for g in generated for value in g["logprobs"]]
    judge = [value for s in scored for value in s["logprobs"]]
    control = [value for s in scored for value in s["control"]]
    expected = len(generated) * NEW_TOKENS
    if not result.expect(len(engine) == len(judge) == len(control) == expected > 0, f"{mode}: tokens are missing"):
        return {}
    mean, largest = metric(engine, judge)
    result.expect(mean <= MEAN_LIMIT, f"{mode}: mean(exp|d|) is {mean:.4f}, at most {MEAN_LIMIT}")
    result.expect(largest <= LARGEST, f"{mode}: max|d| is {largest:.4f}, at most {LARGEST}")
    wrong_mean, wrong_largest = metric(engine, control)
    caught = wrong_mean > MEAN_LIMIT and wrong_largest > LARGEST
    result.expect(caught, f"{mode}: the negative control agrees ({wrong_mean:.4f}, {wrong_largest:.4f})")
    gaps = [gap for g, s in zip(generated, scored, strict=True) if g["greedy"] for gap in s["gaps"]]
    gap = max(gaps, default=math.inf)
    result.expect(gap <= TIE, f"{mode}: a greedy token is {gap:.3f} behind the judge's best")
    drawn = [gap > TIE for g, s in zip(generated, scored, strict=True) if not g["greedy"] for gap in s["gaps"]]
    result.expect(any(drawn), f"{mode}: every sampled token is the judge's best: nothing was drawn")
    sampled = [s for g, s in zip(generated, scored, strict=True) if not g["greedy"]]
    off = deviation(sampled)
    result.expect(abs(off) <= DEVIATIONS, f"{mode}: sampled tokens are {off:.1f} deviations off what is drawn fairly")
    return {"mean": mean, "largest": largest, "control": [wrong_mean, wrong_largest], "greedy_gap": gap,
            "drawn": sum(drawn), "deviations": off}  # fmt: skip


def deviation(sampled: Sequence[Mapping[str, Any]]) -> float:
    """How far the sum of the tokens' log-probabilities is off its expectation, in its own standard deviations."""
    value, expected, variance = (sum(v for s in sampled for v in s[k]) for k in ("logprobs", "expected", "variance"))
    return (value - expected) / math.sqrt(variance) if variance > 0 else math.inf


def metric(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    """mean(exp|d|) and max|d|; infinite where a value is not a number."""
    differences = [abs(a - b) for a, b in zip(left, right, strict=True)]
    distances = [d if math.isfinite(d) else math.inf for d in differences]
    return sum(math.exp(min(d, 700.0)) for d in distances) / len(distances), max(distances)


def make(folder: Path) -> dict[str, Any]:
    """The checkpoint."""
    checkpoint.make_checkpoint(folder / "model")
    return {}


def generate(folder: Path, mode: str) -> dict[str, Any]:
    """Half of the prompts greedy, half sampled."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    before = compiled_files()
    engine = vllm.LLM(
        model=str(folder / "model"), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256,
        gpu_memory_utilization=0.2, enable_prefix_caching=False, logprobs_mode="processed_logprobs", seed=0,
        enforce_eager=mode == "eager", attention_backend=(folder / "attention").read_text() or None,
    )  # fmt: skip
    ids = checkpoint.prompts(PROMPTS, PROMPT_TOKENS, seed=1)
    greedy = [index % 2 == 0 for index in range(PROMPTS)]
    shared: dict[str, Any] = {"max_tokens": NEW_TOKENS, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    how = [vllm.SamplingParams(temperature=0.0 if g else 1.0, seed=n, **shared) for n, g in enumerate(greedy)]
    outputs = engine.generate([{"prompt_token_ids": p} for p in ids], how)
    rows = []
    for prompt, is_greedy, output in zip(ids, greedy, outputs, strict=True):
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        values = [step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)]
        rows.append({"prompt": prompt, "tokens": tokens, "logprobs": values, "greedy": is_greedy})
    (folder / f"{mode}.json").write_text(json.dumps(rows))
    made = len(compiled_files() - before)
    told = {"attention": attention_of(engine), "compilation": compilation_of(engine)}
    return {"vllm": vllm.__version__, **told, "made": made}


def compiled_files() -> set[str]:
    """What torch's compiler and Triton have left in their caches; vLLM's notes about models are not of that kind."""
    found = {f"{name}/{file}" for name in COMPILED for file in cache_files(name)}
    return {file for file in found if "/modelinfos/" not in file}


def attention_of(engine: Any) -> str:
    """Which attention the engine chose, for the receipt; ``unknown`` where this vLLM keeps it elsewhere."""
    try:
        groups = engine.llm_engine.model_executor.driver_worker.worker.model_runner.attn_groups
        return ", ".join(sorted({group.backend.get_name() for row in groups for group in row})) or "unknown"
    except (AttributeError, TypeError):
        return "unknown"


def compilation_of(engine: Any) -> str:
    """How the engine compiled the model, for the receipt; ``unknown`` where this vLLM keeps it elsewhere."""
    try:
        return str(engine.llm_engine.vllm_config.compilation_config.mode.name)
    except AttributeError:
        return "unknown"


def score(folder: Path) -> dict[str, Any]:
    """The judge's log-probabilities, in float32; the control sees each prompt backwards."""
    import torch
    import transformers

    model = checkpoint.load(folder / "model", "cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    for mode in MODES:
        rows = []
        for row in load(folder / f"{mode}.json"):
            sequence, start = row["prompt"] + row["tokens"], len(row["prompt"])
            values = checkpoint.token_logprobs(model, sequence, start)
            control = checkpoint.token_logprobs(model, row["prompt"][::-1] + row["tokens"], start)
            best, expected, variance = distributions(model, sequence, start)
            gaps = [b - v for b, v in zip(best, values, strict=True)]
            fair = {"expected": expected, "variance": variance}
            rows.append({"logprobs": values, "control": control, "gaps": gaps, **fair})
        (folder / f"{mode}-scored.json").write_text(json.dumps(rows))
    return {"transformers": transformers.__version__}


def distributions(model: Any, sequence: list[int], start: int) -> tuple[list[float], list[float], list[float]]:
    """Of each token from ``start`` on: the best log-probability, and mean and variance of one that is drawn fairly."""
    import torch

    with torch.no_grad():
        logs = model(torch.tensor([sequence], device=model.device)).logits[0].float().log_softmax(-1)[start - 1 : -1]
    mean = (logs.exp() * logs).sum(-1)
    variance = (logs.exp() * (logs - mean[:, None]).square()).sum(-1)
    return logs.max(-1).values.tolist(), mean.tolist(), variance.tolist()


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "make": make,
    "eager": lambda folder: generate(folder, "eager"),
    "compiled": lambda folder: generate(folder, "compiled"),
    "score": score,
}


def part(name: str, folder: Path) -> Result:
    """One part as a result."""
    return Result(details=PARTS[name](folder))
