"""The documents say what the code does, where a machine can tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oci_builder.cli import cli
from oci_builder.model.limits import Limits
from tests.test_imports import PLACES, ROOT

PAGES = sorted(p for p in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_table_of_limits_is_the_limits() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) ?(\w*) \| (.+) \|$", (ROOT / "SECURITY.md").read_text(), re.M)
    written = {name: (int(number.replace(",", "")) * UNITS[unit], why) for name, number, unit, why in rows}
    assert written == {name: (getattr(Limits(), name), why) for name, why in Limits.reasons().items()}


def test_the_readme_names_real_verbs() -> None:
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "README.md").read_text(), re.M)
    named = {word for row in table for word in re.findall(r"`(\w+)", row)}
    assert named and named <= set(cli.commands)


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 70


def test_every_dependency_has_its_reason() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    places = {place for package, place in PLACES.items() if package not in ("pydantic_core", "requests", "urllib3")}
    assert [place for place in sorted(places) if f"`{place}`" not in text] == []


def test_the_lock_names_exact_versions_and_no_place() -> None:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.lstrip().startswith("#")]
    assert [p for p in pins if not re.fullmatch(r"[a-z0-9._-]+==[\w.+!-]+( ; .+)?", p)] == []
    assert len(pins) > 40
