"""docs/stages.md says what the stages are, their options, and a budget file that is read as it is shown."""

from __future__ import annotations

import re
from pathlib import Path

from oci_builder.engines.budget import load_budget
from oci_builder.engines.stages import STAGES

PAGE = (Path(__file__).resolve().parents[2] / "docs/stages.md").read_text()


def test_the_table_has_every_stage() -> None:
    assert re.findall(r"^\| `([\w-]+)` \|", PAGE, re.M) == list(STAGES)


def test_every_option_is_named() -> None:
    found = re.findall(r"^\| `([\w-]+)` \|.*\|(.*)\|$", PAGE, re.M)
    rows = {name: set(re.findall(r"`(\w+)`", last)) for name, last in found}
    rows["nccl8"] |= rows["single"]
    rows["nccl8-u24"] |= rows["nccl8"]
    assert rows == {name: set(stage.options) for name, stage in STAGES.items()}


def test_the_budget_that_is_shown_is_one(tmp_path: Path) -> None:
    shown = re.search(r"```toml\n(.*?)```", PAGE, re.S)
    assert shown is not None
    (tmp_path / "b.toml").write_text(shown[1])
    budget = load_budget(tmp_path / "b.toml")
    assert (budget.currency, budget.minutes) == ("USD", {"build": 60})
