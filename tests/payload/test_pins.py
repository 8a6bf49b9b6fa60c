"""What lists and locks pin: what they leave open is told, and what is for something else is a wrong input."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from oci_builder.model.errors import SpecError
from oci_builder.model.events import Event, silent
from oci_builder.model.spec import LockTier, RequirementsTier
from oci_builder.payload.environments import realize
from oci_builder.payload.uv import find_uv
from tests.lab.uv import require_uv
from tests.payload.test_overlaps import wheel

require_uv()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobodys_settings: Path) -> Path:
    """A folder with a wheel, and a project whose lock has it: by a folder, of which uv notes no hashes."""
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    nobodys_settings.write_text("[user]\nname = t\nemail = t@t\n")
    wheel(tmp_path, "one", {"one.py": "x = 1\n"})
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "whole"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["one"]\n'
    )
    find_uv(tmp_path).run("lock", "--quiet", "--project", folder, "--python", sys.executable)
    subprocess.run(["git", "-C", folder, "init", "-q"], check=True)
    commit(folder)
    return tmp_path


def commit(folder: Path) -> None:
    for words in (["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-C", folder, *words], check=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [("version = 1\n", "version = 99\n"), ('">=3.11"', '">=3.99"'), ("py3-none-any.whl", "cp39-cp39-win_amd64.whl")],
    ids=["another uv's", "another Python's", "another platform's"],
)
def test_a_lock_that_is_for_something_else_is_a_wrong_input(place: Path, old: str, new: str) -> None:
    """No network would help: exit 2 and not 5."""
    lock = place / "project/uv.lock"
    assert old in lock.read_text()
    lock.write_text(lock.read_text().replace(old, new))
    commit(place / "project")
    with pytest.raises(SpecError) as caught:
        realize("base", LockTier(project="project"), place, place / "work", silent)
    assert caught.value.code == "payload.lock"


@pytest.mark.parametrize("hashed", [False, True])
def test_a_lock_without_hashes_is_told_of(place: Path, hashed: bool) -> None:
    lock = place / "project/uv.lock"
    if hashed:
        digest = hashlib.sha256((place / "one-1-py3-none-any.whl").read_bytes()).hexdigest()
        lock.write_text(lock.read_text().replace('any.whl" }', f'any.whl", hash = "sha256:{digest}" }}'))
        commit(place / "project")
    told: list[Event] = []
    realize("base", LockTier(project="project"), place, place / "work", told.append)
    wanted = "the lock has no SHA-2 hash for one: nothing says that what comes is what was meant"
    assert [event.message for event in told if event.kind == "warning"] == ([] if hashed else [wanted])


@pytest.mark.parametrize("strong", [True, False])
def test_a_hash_that_can_be_forged_is_told_of(place: Path, strong: bool) -> None:
    data = (place / "one-1-py3-none-any.whl").read_bytes()
    hashes = f" --hash=md5:{hashlib.md5(data).hexdigest()}"
    hashes += f" \\\n  --hash=sha256:{hashlib.sha256(data).hexdigest()}" if strong else ""
    (place / "list.txt").write_text(f"one==1{hashes}\n")
    told: list[Event] = []
    realize("base", RequirementsTier(requirements="list.txt"), place, place / "work", told.append)
    assert [event.message.split(":")[0] for event in told if event.kind == "warning"] == (
        [] if strong else ["the list has no hash but MD5 for one"]
    )
