"""SECURITY.md: every threat has a number and names tests, which exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
THREATS = re.findall(r"^(\d+)\. (\*\*.+?)(?=^\d+\. |\Z)", PAGE.partition("## Threats")[2].partition("Not covered")[0], re.M | re.S)


def test_threats_are_numbered_in_order() -> None:
    assert [int(number) for number, _ in THREATS] == list(range(1, len(THREATS) + 1))
    assert len(THREATS) >= 10


def test_every_threat_names_tests_that_exist() -> None:
    for number, text in THREATS:
        named = re.findall(r"`([\w/]+\.py)`", text.partition("Tests:")[2])
        assert named, f"threat {number} names no test"
        assert [name for name in named if not (ROOT / "tests" / name).is_file()] == [], f"threat {number}"
