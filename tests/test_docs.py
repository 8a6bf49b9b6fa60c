"""The documents say what the code does, where a machine can tell."""

from __future__ import annotations

import doctest
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from chroot_exec.protocol import Check
from oci_builder.cli import cli
from oci_builder.execution.run import load_checks, runner_error
from oci_builder.model import errors
from oci_builder.model.limits import Limits
from tests.test_imports import PLACES, ROOT, python_files

PAGES = sorted(p for p in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)`", page.read_text())
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []


EXAMPLES = [path for path in python_files("oci_builder") if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_in_docstrings_give_what_they_say(path: Path) -> None:
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    done = doctest.testmod(importlib.import_module(dotted))
    assert done.attempted and not done.failed


def test_the_table_of_limits_is_the_limits() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) ?(\w*) \| (.+) \|$", (ROOT / "SECURITY.md").read_text(), re.M)
    written = {name: (int(number.replace(",", "")) * UNITS[unit], why) for name, number, unit, why in rows}
    assert written == {name: (getattr(Limits(), name), why) for name, why in Limits.reasons().items()}


def test_the_readme_names_real_verbs() -> None:
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "README.md").read_text(), re.M)
    named = {word for row in table for word in re.findall(r"`(\w+)", row)}
    assert named and named <= set(cli.commands)


def test_the_readme_names_every_verb() -> None:
    named = re.findall(r"`(?:oci-builder )?(\w+)", (ROOT / "README.md").read_text())
    assert sorted(set(cli.commands) - set(named)) == []


def test_every_page_is_reached_from_the_readme() -> None:
    seen, left = set(), {ROOT / "README.md"}
    while left:
        page = left.pop()
        seen.add(page)
        links = re.findall(r"\]\((?!https?:)([^)#]+\.md)", page.read_text())
        left |= {(page.parent / link).resolve() for link in links} - seen
    assert [p.name for p in PAGES if p not in seen] == []


def raised() -> set[tuple[int, str]]:
    """Exit status and code of every error that the package raises by name."""
    kinds = {name: kind.exit_status for name, kind in vars(errors).items() if isinstance(kind, type)
             and issubclass(kind, errors.OciBuilderError) and kind is not errors.OciBuilderError}  # fmt: skip
    call = re.compile(rf"\b({'|'.join(kinds)})\(\s*\"([a-z0-9_.]+)\"")
    text = "\n".join(path.read_text() for path in (ROOT / "oci_builder").rglob("*.py"))
    runner = "\n".join(path.read_text() for path in (ROOT / "chroot_exec").glob("*.py"))
    codes = re.findall(r'"((?:request|user|gpu|exec|sandbox|state)\.[a-z_]+)"', runner)
    theirs = {(runner_error({"code": code, "message": ""}).exit_status, code) for code in codes}
    return theirs | {(kinds[name], code) for name, code in call.findall(text)}


def test_the_table_of_exit_statuses_has_every_code() -> None:
    rows = re.findall(r"^\| (\d) \| .* \| (.+) \|$", (ROOT / "docs/json.md").read_text(), re.M)
    begins = {int(status): tuple(re.findall(r"`([\w.]+)`", codes)) for status, codes in rows}
    found = raised()
    assert len(found) > 100
    assert [(status, code) for status, code in sorted(found) if not code.startswith(begins[status])] == []


def test_the_example_of_checks_is_one_and_every_key_is_named(tmp_path: Path) -> None:
    text = (ROOT / "docs/json.md").read_text().partition("<!-- checks -->")[2]
    example = re.search(r"```json\n(.*?)```", text, re.S)
    assert example
    (tmp_path / "checks.json").write_text(example[1])
    assert [check.result for check in load_checks(tmp_path / "checks.json")] == ["exit", "json"]
    named = {key for row in re.findall(r"^\| (`.*?) \|", text, re.M) for key in re.findall(r"`(\w+)`", row)}
    assert named == {field.name for field in fields(Check)}


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
