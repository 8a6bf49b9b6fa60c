"""Where results go: nothing of anybody's is replaced by a word in the wrong place, and a place that cannot be written is
told before the work, not after."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from oci_builder.cli import cli
from oci_builder.cli.common import default_cache
from tests.conftest import Built
from tests.test_cli import ROOT, call


def test_a_report_never_takes_an_archive_s_place(quick: Built, tmp_path: Path) -> None:
    """``verify --json A B``: the first word after --json is its file."""
    archive = tmp_path / "runtime.oci.tar"
    shutil.copy(quick.oci, archive)
    for words in (("--json", archive, quick.docker), (archive, "--json", archive)):
        done = call("verify", *words)
        assert (done.returncode, done.stderr.count(b"error[report.exists]")) == (6, 1), done.stderr
        assert archive.read_bytes() == quick.oci.read_bytes()


def test_an_older_report_is_replaced_and_an_empty_file_taken(quick: Built, tmp_path: Path) -> None:
    for before in ("", '\n{"ok": false}'):
        (tmp_path / "r.json").write_text(before)
        assert call("verify", quick.oci, "--json", tmp_path / "r.json").returncode == 0
        assert b'"ok": true' in (tmp_path / "r.json").read_bytes()


@pytest.mark.parametrize(("place", "status"), [("none/r.json", 2), (".", 2), ("", 2)])
def test_a_report_s_place_is_looked_at_before_the_archives(quick: Built, tmp_path: Path, place: str, status: int) -> None:
    done = call("verify", quick.oci, "--json", tmp_path / place if place else "")
    assert (done.returncode, done.stdout) == (status, b""), done.stderr


def test_the_page_takes_the_place_of_a_page_only(tmp_path: Path) -> None:
    (tmp_path / "archive.tar").write_bytes(b"bytes")
    done = call("report", tmp_path, tmp_path / "archive.tar")
    assert (done.returncode, b"error[report.exists]" in done.stderr) == (6, True), done.stderr
    assert (tmp_path / "archive.tar").read_bytes() == b"bytes"


def test_a_folder_in_an_archive_s_place_costs_no_build(quick: Built, tmp_path: Path) -> None:
    (tmp_path / "dist/runtime.oci.tar").mkdir(parents=True)
    done = call("build", quick.spec, "--out", tmp_path / "dist", "--cache", tmp_path / "cache")
    assert (done.returncode, b"error[spec.path]" in done.stderr) == (2, True), done.stderr
    assert (tmp_path / "dist/runtime.oci.tar").is_dir() and not (tmp_path / "cache").exists()


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG base directory specification: only absolute paths count. Else each folder would get a cache of its own."""
    monkeypatch.delenv("OCI_BUILDER_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for said in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", said)
        assert default_cache() == tmp_path / ".cache/oci-builder"
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert default_cache() == Path("/c/oci-builder")


def described() -> dict[str, set[str]]:
    """docs/json.md: command -> the keys that it names; of several forms, all."""
    text = (ROOT / "docs/json.md").read_text().partition("## What each command writes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z ]+)` \| (.+) \|$", text, re.M)
    return {command: set(re.findall(r"`([A-Za-z_]+)`", re.sub(r"\([^)]*\)", "", text))) for command, text in rows}


def with_json(group: click.Group, before: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from with_json(command, f"{before}{name} ")
        elif any("--json" in option.opts for option in command.params):
            yield before + name


def test_every_command_with_json_is_described() -> None:
    assert set(with_json(cli)) == set(described())


@pytest.mark.parametrize("command", ["build", "verify", "inspect", "diff", "unpack", "readiness", "key new"])
def test_the_json_has_the_keys_that_are_described(quick: Built, tmp_path: Path, command: str) -> None:
    words: dict[str, list[str | Path]] = {
        "build": [quick.spec, "--out", tmp_path / "out", "--cache", tmp_path / "cache"], "verify": [quick.oci, "--json"],
        "inspect": [quick.oci], "diff": [quick.oci, quick.docker], "unpack": [quick.oci, tmp_path / "root"],
        "readiness": [quick.oci], "key new": [tmp_path / "key"],
    }  # fmt: skip
    done = call(*command.split(), *words[command], "-" if command == "verify" else "--json")
    assert set(json.loads(done.stdout)) == described()[command] - ({"checks"} if command == "verify" else set())
