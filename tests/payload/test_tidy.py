"""The cache keeps what a spec's last builds used, and no build's folder goes while it is at work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oci_builder.model.events import Event, silent
from oci_builder.model.spec import Spec
from oci_builder.payload import tidy as module
from oci_builder.payload import uv as tools
from oci_builder.payload.make import make_runtime
from oci_builder.payload.tidy import in_use, note_use, size_of, tidy


def name(stem: str, digit: str) -> str:
    return f"{stem}-{digit * 20}"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for digit in "1234":
        (tmp_path / name("base", digit)).mkdir()
    for other in ("uv-cache", "bytecode-0123456789abcdef", "sources/x-0123456789ab-0123456789abcdef/.git", "mine"):
        (tmp_path / other).mkdir(parents=True)
    return tmp_path


def there(work: Path) -> str:
    return "".join(digit for digit in "1234" if (work / name("base", digit)).is_dir())


def test_a_specs_last_two_builds_stay_and_other_specs_are_their_own(work: Path) -> None:
    note_use(work, "other", [name("base", "4")])
    for digit in "123":
        note_use(work, "one", [name("base", digit)])
    told: list[Event] = []
    tidy(work, told.append)
    assert there(work) == "234" and "1 folders" in told[0].message
    tidy(work, told.append)
    assert len(told) == 1


def test_the_same_build_again_forgets_nothing(work: Path) -> None:
    for digit in "1222":
        note_use(work, "one", [name("base", digit)])
    tidy(work, silent)
    assert there(work) == "1234"


def test_what_no_record_names_stays_a_while(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_use(work, "one", [name("base", "1")])
    tidy(work, silent)
    assert there(work) == "1234"
    monkeypatch.setattr(module, "KEPT_SECONDS", -1.0)
    tidy(work, silent)
    assert there(work) == "1"
    assert sorted(p.name for p in work.iterdir() if p.is_dir()) == sorted(
        [name("base", "1"), "bytecode-0123456789abcdef", "mine", "sources", "uv-cache"]
    )
    assert list((work / "sources").iterdir()) == []


def test_nothing_goes_while_another_build_reads(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_SECONDS", -1.0)
    with in_use(work), in_use(work):
        tidy(work, silent)
        assert there(work) == "1234"
    tidy(work, silent)
    assert there(work) == ""


def test_what_killed_builds_left_goes_and_what_runs_stays(work: Path) -> None:
    dead = next(n for n in range(300000, 2, -1) if not Path(f"/proc/{n}").exists())
    (work / f".base-x.partial-{dead}").mkdir()
    (work / f".base-x.partial-{os.getppid()}").mkdir()
    tidy(work, silent)
    assert [p.name for p in work.glob(".base*")] == [f".base-x.partial-{os.getppid()}"]


@pytest.mark.parametrize("text", ["", "[1", "[]", '{"uses": 1}', '{"uses": {}, "known": 3}', '{"uses": {"a": 3, "b": [4]}}'])
def test_a_damaged_record_is_none(work: Path, text: str) -> None:
    (work / "uses.json").write_text(text)
    tidy(work, silent)
    assert there(work) == "1234"


def test_a_file_of_many_names_is_counted_once(work: Path) -> None:
    (work / "mine/a").write_bytes(bytes(1 << 20))
    before = size_of(work)
    os.link(work / "mine/a", work / "mine/b")
    assert size_of(work) == before >= 1 << 20


def test_a_build_notes_what_it_is_made_of(tmp_path: Path) -> None:
    try:
        tools.find_uv(tmp_path)
    except Exception as error:
        pytest.skip(f"needs uv: {error}")
    (tmp_path / "base.txt").write_text("")
    whole = {"name": "n", "tag": "t", "base": {"host": True}, "prefix": "/opt/x", "tiers": {"base": {"requirements": "base.txt"}}}
    work = tmp_path / "work"
    for text in ("", "# another\n", "# a third\n"):
        (tmp_path / "base.txt").write_text(text)
        runtime = make_runtime(Spec.model_validate(whole), tmp_path, work, 1)
        tidy(work, silent)
    assert len(list(work.glob("base-*"))) == len(list(work.glob("runtime-*"))) == 2
    assert (runtime.tiers["base"] / "bin/python").exists()
