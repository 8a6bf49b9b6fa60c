"""docs/modal.md says what the stages need."""

from __future__ import annotations

import re

from oci_builder.engines.stages import STAGES
from tests.test_imports import ROOT

PAGE = (ROOT / "docs/modal.md").read_text()


def test_the_table_of_stages_is_their_needs() -> None:
    rows = {row[0]: row[1:] for row in (re.findall(r"[^|]+", line) for line in PAGE.splitlines() if line.startswith("| `"))}
    written = {name.strip(" `"): [cell.strip() for cell in cells] for name, cells in rows.items()}
    assert {name: written[name] for name in STAGES} == {
        name: [
            needs.image, f"{needs.cpu:g}", str(needs.memory_mib >> 10), needs.gpu or "–", str(needs.timeout_s // 60),
            "yes" if needs.preemptible else "no", "yes" if needs.network else "blocked", ", ".join(needs.secrets) or "–",
        ]
        for name, needs in ((stage.name, stage.needs) for stage in STAGES.values())
    }  # fmt: skip


def test_the_scripts_are_there_and_run_the_stages_that_the_page_gives_them() -> None:
    said = dict(re.findall(r"^modal run (modal_\w+\.py)\s+--stage ([\w|-]+) \[OPTIONS\]$", PAGE, re.M))
    for script, stages in said.items():
        call = re.search(r"^STAGES = (.+)$", (ROOT / script).read_text(), re.M)
        assert call and re.findall(r'"([\w-]+)"', call[1]) == stages.split("|"), script
    assert {*said, "modal_repack.py"} == {path.name for path in ROOT.glob("modal_*.py")}


def test_every_code_of_modal_is_explained() -> None:
    used = {
        code
        for path in (ROOT / "oci_builder/engines").glob("modal_*.py")
        for code in re.findall(r'"(modal\.[a-z]+)"', path.read_text())
    }
    assert set(re.findall(r"`(modal\.[a-z]+)`", PAGE)) == used
