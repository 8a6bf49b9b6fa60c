"""What a stage may cost, said and checked before anything is paid for.

The rates are the user's, in a file of theirs: prices change, and a price in a program is a wrong one. Two rules of
Modal's are facts (its guides on preemption and resources): CPU and memory of a machine that may not be taken away are
billed three times, and disk is billed as memory, 20 GiB for one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oci_builder.engines.needs import GPU_NAMES, Needs
from oci_builder.engines.stages import STAGES, Stage
from oci_builder.model.errors import PolicyError, SpecError, show
from oci_builder.model.specvalues import read_input

_KEEP = 3
_DISK = 20
_TABLES = ("rates", "limits", "minutes")


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget file.

    Attributes:
        currency: how amounts are shown.
        cpu, memory: rate of one core, of one GiB, an hour; None: not known.
        gpus: GPU name -> rate of one, an hour.
        stage, total: the most that one stage, that all stages of one command may cost; None: no limit.
        minutes: stage -> minutes that it is expected to take; the limit of its time otherwise.
    """

    currency: str = ""
    cpu: float | None = None
    memory: float | None = None
    gpus: Mapping[str, float] = field(default_factory=dict)
    stage: float | None = None
    total: float | None = None
    minutes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one stage costs.

    Attributes:
        expected: at the minutes of the budget; None without a rate.
        most: when it runs into its time limit; None without a rate.
        unknown: rates that the budget lacks.
        factor: 3 where the machine may not be taken away.
    """

    stage: str
    expected: float | None
    most: float | None
    minutes: float
    limit: float
    factor: int
    unknown: tuple[str, ...]


def load_budget(path: Path | None) -> Budget:
    """A budget file (TOML); no file, no rates.

    Raises:
        SpecError: ``budget.file`` (cannot be read, no TOML), ``budget.field`` (unknown key, no number of 0 or more).
    """
    if path is None:
        return Budget()
    try:
        value = tomllib.loads(read_input(path, "budget").decode())
    except SpecError as error:
        raise SpecError("budget.file", error.message, where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise SpecError("budget.file", f"cannot read the budget {show(str(path))}: {error}", where=str(path)) from None
    if not isinstance(value.get("currency", ""), str):
        raise SpecError("budget.field", f"{path}: currency is text, not {show(repr(value['currency'])[:80])}")
    _known(value, ("currency", *_TABLES), str(path))
    tables = {name: _table(value.get(name, {}), f"{path}: {name}") for name in _TABLES}
    rates, limits, minutes = (tables[name] for name in _TABLES)
    gpus = _table(rates.pop("gpu", {}), f"{path}: rates.gpu")
    _known(rates, ("cpu", "memory"), f"{path}: rates")
    _known(gpus, GPU_NAMES, f"{path}: rates.gpu")
    _known(limits, ("stage", "total"), f"{path}: limits")
    _known(minutes, tuple(STAGES), f"{path}: minutes")
    for name, table in (("rates", rates), ("rates.gpu", gpus), ("limits", limits), ("minutes", minutes)):
        for key, item in table.items():
            _number(item, f"{path}: {name}.{key}")
    return Budget(
        value.get("currency", ""), rates.get("cpu"), rates.get("memory"), gpus, limits.get("stage"),
        limits.get("total"), minutes,
    )  # fmt: skip


def cost(stage: Stage, budget: Budget) -> Cost:
    """What a stage costs by the budget's rates; retries are not counted in."""
    limit = stage.needs.timeout_s / 60
    minutes = min(budget.minutes.get(stage.name, limit), limit)
    rate, unknown = _rate(stage.needs, budget)
    factor = 1 if stage.needs.preemptible else _KEEP
    expected, most = (None, None) if rate is None else (rate * minutes / 60, rate * limit / 60)
    return Cost(stage.name, expected, most, minutes, limit, factor, unknown)


def check_budget(costs: Sequence[Cost], budget: Budget) -> None:
    """Refuse what may cost more than the budget's limits. A limit with an unknown rate is refused, too.

    Raises:
        PolicyError: ``budget.rate``, ``budget.limit``.
    """
    limited = budget.stage is not None or budget.total is not None
    unknown = sorted({name for item in costs for name in item.unknown})
    if limited and unknown:
        raise PolicyError("budget.rate", f"the budget has limits but no rate for {', '.join(unknown)}: nothing can be "
                          "compared")  # fmt: skip
    total = sum(item.most or 0.0 for item in costs)
    for what, amount, most in (
        *((item.stage, item.most or 0.0, budget.stage) for item in costs), ("all of them", total, budget.total),
    ):  # fmt: skip
        if most is not None and amount > most:
            raise PolicyError(
                "budget.limit", f"{what} may cost up to {_amount(amount, budget)}, and the budget allows "
                f"{_amount(most, budget)}", expected=f"<= {most}", actual=amount,
            )  # fmt: skip


def lines(costs: Sequence[Cost], budget: Budget) -> list[str]:
    """For people: what each stage needs, takes and costs."""
    out = []
    for item in costs:
        needs = STAGES[item.stage].needs
        machine = f"{needs.cpu:g} cores, {needs.memory_mib} MiB" + (f", {needs.gpu}" if needs.gpu else "")
        kept = f", not preemptible (CPU and memory billed {_KEEP} times)" if item.factor > 1 else ""
        money = f"no rate for {', '.join(item.unknown)}: cost not known"
        if item.expected is not None and item.most is not None:
            money = f"about {_amount(item.expected, budget)}, at most {_amount(item.most, budget)}"
        out.append(f"{item.stage}: {machine}{kept}, {item.minutes:g} of at most {item.limit:g} minutes: {money}")
    return out


def _rate(needs: Needs, budget: Budget) -> tuple[float | None, tuple[str, ...]]:
    """The rate of an hour, or None with what is not known."""
    memory = max(needs.memory_mib / 1024, needs.scratch_gib / _DISK)
    parts = [("cpu", budget.cpu, needs.cpu), ("memory", budget.memory, memory)]
    factor = 1 if needs.preemptible else _KEEP
    total, unknown = 0.0, []
    for name, rate, amount in parts:
        total += (rate or 0.0) * amount * factor
        if rate is None:
            unknown.append(name)
    if needs.gpu:
        gpu = budget.gpus.get(needs.gpu_name)
        total += (gpu or 0.0) * needs.gpu_count
        if gpu is None:
            unknown.append(needs.gpu_name)
    return (None if unknown else total), tuple(unknown)


def _amount(value: float, budget: Budget) -> str:
    return f"{value:.2f} {budget.currency}".rstrip()


def _known(table: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    extra = sorted(set(table) - set(names))
    if extra:
        raise SpecError("budget.field", f"{where} has no {show(extra[0])}; it has {', '.join(names)}", where=where)


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpecError("budget.field", f"{where} is a table", where=where)
    return dict(value)


def _number(value: object, where: str) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
    if not good:
        raise SpecError("budget.field", f"{where} is a number of 0 or more, not {show(repr(value))}", where=where)
