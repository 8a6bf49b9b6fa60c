"""What stages may cost, said and compared before anything starts (issue 8, item 2)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oci_builder.engines.budget import Budget, check_budget, cost, lines, load_budget
from oci_builder.engines.stages import STAGES
from oci_builder.model.errors import OciBuilderError, PolicyError

# Made-up rates: round numbers that are easy to multiply.
RATES = Budget("X", cpu=1.0, memory=0.5, gpus={"B200": 10.0})


def write(folder: Path, text: str) -> Path:
    path = folder / "budget.toml"
    path.write_text(text)
    return path


def test_a_machine_that_stays_is_billed_three_times() -> None:
    needs = STAGES["container"].needs
    hour = needs.cpu * 1.0 + needs.memory_mib / 1024 * 0.5
    assert cost(STAGES["container"], RATES).most == pytest.approx(3 * hour * 1.5)


def test_a_preemptible_one_once() -> None:
    needs = STAGES["build"].needs
    hour = needs.cpu * 1.0 + needs.memory_mib / 1024 * 0.5
    assert cost(STAGES["build"], RATES).most == pytest.approx(hour * needs.timeout_s / 3600)


def test_gpus_are_counted() -> None:
    one, eight = (cost(STAGES[name], RATES).most for name in ("single", "nccl8"))
    assert one is not None and eight is not None
    assert eight - one > 70


def test_the_expected_minutes_are_the_users(tmp_path: Path) -> None:
    budget = load_budget(write(tmp_path, "[rates]\ncpu = 1\nmemory = 0\n[minutes]\nbuild = 6\n"))
    found = cost(STAGES["build"], budget)
    assert found.expected == pytest.approx(STAGES["build"].needs.cpu * 0.1)
    assert found.most == pytest.approx(STAGES["build"].needs.cpu * 3)


def test_nothing_is_known_without_a_file() -> None:
    found = cost(STAGES["single"], load_budget(None))
    assert (found.expected, found.most, found.unknown) == (None, None, ("cpu", "memory", "B200"))
    assert "cost not known" in lines([found], Budget())[0]


@pytest.mark.parametrize("limit", [{"stage": 10.0}, {"total": 10.0}])
def test_over_a_limit_is_refused(limit: dict[str, float]) -> None:
    budget = Budget("X", 1.0, 0.5, {"B200": 10.0}, **limit)
    with pytest.raises(PolicyError) as caught:
        check_budget([cost(STAGES["nccl8"], budget)], budget)
    assert caught.value.code == "budget.limit"


def test_the_limit_of_all_counts_both_ubuntus() -> None:
    single = cost(STAGES["nccl8"], RATES).most or 0.0
    budget = Budget("X", 1.0, 0.5, {"B200": 10.0}, total=single + 1)
    check_budget([cost(STAGES["nccl8"], budget)], budget)
    with pytest.raises(PolicyError):
        check_budget([cost(STAGES[n], budget) for n in ("nccl8", "nccl8-u24")], budget)


def test_a_limit_without_a_rate_is_refused() -> None:
    budget = Budget(cpu=1.0, memory=1.0, total=1e6)
    with pytest.raises(PolicyError) as caught:
        check_budget([cost(STAGES["single"], budget)], budget)
    assert caught.value.code == "budget.rate"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = ", "budget.file"), ("x = " + "[" * 5000, "budget.file"), ("currency = 3", "budget.field"),
        ("rate = 1", "budget.field"), ("[rates]\ncpus = 1", "budget.field"),
        ("[rates]\ncpu = '1'", "budget.field"), ("[rates]\ncpu = true", "budget.field"),
        ("[rates]\ncpu = -1", "budget.field"), ("[rates]\ncpu = nan", "budget.field"),
        ("[rates]\ncpu = inf", "budget.field"), ("rates = 3", "budget.field"),
        ("[rates.gpu]\nB2000 = 1", "budget.field"), ("[minutes]\ndeploy = 1", "budget.field"),
        ("[limits]\nall = 1", "budget.field"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named(tmp_path: Path, text: str, code: str) -> None:
    with pytest.raises(OciBuilderError) as caught:
        load_budget(write(tmp_path, text))
    assert (caught.value.code, caught.value.exit_status) == (code, 2)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OciBuilderError) as caught:
        load_budget(tmp_path / "none.toml")
    assert caught.value.code == "budget.file"


@pytest.mark.parametrize("place", ["/dev/zero", ".", "pipe"])
def test_what_is_no_file_is_not_read(tmp_path: Path, place: str) -> None:
    """A device would be read until memory ends, a pipe waited for."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OciBuilderError) as caught:
        load_budget(tmp_path / place)
    assert caught.value.code == "budget.file"
