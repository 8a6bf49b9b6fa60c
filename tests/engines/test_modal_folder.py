"""The release folder's way back: what a stage did to its copy is done to the sender's folder, and nothing else."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from oci_builder.engines import modal_project
from oci_builder.engines.modal_container import refuse_other_image
from oci_builder.engines.modal_project import folder_state, folder_text, take_folder
from oci_builder.model.errors import ConflictError, SpecError, TransportError
from oci_builder.model.spec import load_spec
from tests.engines.test_modal_project import request, round_trip, write_spec


def folder_of(place: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


def test_what_a_stage_did_to_its_copy_is_done_here(tmp_path: Path) -> None:
    here = folder_of(tmp_path / "here/r1", {"portable.json": "1", "old": "x", "same": "s"})
    sent = folder_state(here)
    there = folder_of(tmp_path / "there", {"portable.json": "2", "superseded/ab/portable.json": "1", "same": "s"})
    changed = take_folder(folder_text(folder_state(there)), here, sent)
    assert changed == ["old", "portable.json", "superseded/ab/portable.json"]
    assert folder_state(here) == folder_state(there)
    assert [p.name for p in here.parent.iterdir()] == ["r1"]


def test_what_others_did_meanwhile_stays(tmp_path: Path) -> None:
    """Two stages of a release at once: neither takes the other's receipt away."""
    here = folder_of(tmp_path / "here/r1", {"portable.json": "1"})
    sent = folder_state(here)
    there = folder_of(tmp_path / "there", {"portable.json": "1", "receipts/mine.json": "m"})
    folder_of(here, {"receipts/theirs.json": "t", "NOTES": "n"})
    assert take_folder(folder_text(folder_state(there)), here, sent) == ["receipts/mine.json"]
    assert folder_state(here) == {
        "portable.json": b"1", "receipts/mine.json": b"m", "receipts/theirs.json": b"t", "NOTES": b"n"
    }  # fmt: skip


def test_a_file_changed_on_both_sides_is_a_conflict_and_nothing_is_lost(tmp_path: Path) -> None:
    here = folder_of(tmp_path / "here/r1", {"qualification.json": "candidate"})
    sent = folder_state(here)
    there = folder_of(tmp_path / "there", {"qualification.json": "pass", "receipts/new.json": "n"})
    folder_of(here, {"qualification.json": "failed"})
    with pytest.raises(ConflictError) as caught:
        take_folder(folder_text(folder_state(there)), here, sent)
    assert caught.value.code == "modal.conflict"
    assert folder_state(here) == {"qualification.json": b"failed"}
    (kept,) = (p for p in here.parent.iterdir() if p != here)
    assert folder_state(kept) == folder_state(there)


def test_a_link_to_the_release_folder_is_that_folder(tmp_path: Path) -> None:
    here = folder_of(tmp_path / "here/r1", {"portable.json": "1"})
    (tmp_path / "latest").symlink_to(here)
    (tmp_path / "here/one").mkdir()
    asked = request(write_spec(tmp_path / "here"), release=str(tmp_path / "latest"))
    got = round_trip(asked, tmp_path)
    assert Path(got["release"]).name == "r1" and folder_state(Path(got["release"])) == {"portable.json": b"1"}
    take_folder(folder_text({"portable.json": b"2"}), tmp_path / "latest", folder_state(tmp_path / "latest"))
    assert (here / "portable.json").read_text() == "2"
    assert os.readlink(tmp_path / "latest") == str(here)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "inputs.tar", "latest", "there"]


@pytest.mark.parametrize("kind", ["link", "dangling", "folder-link", "pipe"])
def test_a_release_folder_with_anything_but_files_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """A link would come back as the container's file, a pipe would never end."""
    here = folder_of(tmp_path / "r1", {"portable.json": "1"})
    if kind == "pipe":
        os.mkfifo(here / "odd")
    else:
        (here / "odd").symlink_to({"link": "/etc/passwd", "dangling": "gone", "folder-link": "/etc"}[kind])
    with pytest.raises(SpecError) as caught:
        folder_state(here)
    assert caught.value.code == "modal.project" and "odd" in caught.value.message


def test_a_name_that_became_a_link_meanwhile_is_a_conflict(tmp_path: Path) -> None:
    here = folder_of(tmp_path / "here/r1", {"portable.json": "1"})
    sent = folder_state(here)
    (here / "portable.json").unlink()
    (here / "portable.json").symlink_to("/etc/hostname")
    with pytest.raises(ConflictError) as caught:
        take_folder(folder_text({"portable.json": b"2"}), here, sent)
    assert caught.value.code == "modal.conflict"
    assert os.readlink(here / "portable.json") == "/etc/hostname"


def text_with(name: str) -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        info = tarfile.TarInfo(name)
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("text", ["", "!", "aGVsbG8=", text_with("../out"), text_with("/etc/x"), text_with("a/../../b")])
def test_a_damaged_or_straying_answer_changes_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1/portable.json").write_text("kept")
    with pytest.raises(TransportError) as error:
        take_folder(text, tmp_path / "r1", {})
    assert error.value.code == "modal.result"
    assert folder_state(tmp_path) == {"r1/portable.json": b"kept"}


def test_a_folder_with_archives_in_it_is_no_release_folder(tmp_path: Path) -> None:
    """It is read into memory: a home folder, named by mistake, must not be."""
    with (tmp_path / "archive").open("wb") as file:
        file.truncate(modal_project.LARGEST_RELEASE + 1)
    with pytest.raises(SpecError) as caught:
        folder_state(tmp_path)
    assert caught.value.code == "modal.project"


@pytest.mark.parametrize(
    ("record", "refused"),
    [
        ('{"reference": "x:t"}', False),
        ('{"reference": "y:t"}', True),
        ('{"reference": "x:u"}', True),
        ("not json", False),
        ("[]", False),
        (None, False),
    ],
)
def test_two_projects_whose_releases_have_one_name_do_not_share_a_folder_of_the_volume(
    tmp_path: Path, record: str | None, refused: bool
) -> None:
    value = {"name": "x", "tag": "t", "base": {"scratch": True}, "prefix": "/p", "tiers": {"a": {"path": "/vol/a"}}}
    (tmp_path / "spec.json").write_text(json.dumps(value))
    if record is not None:
        (tmp_path / "container.json").write_text(record)
    with pytest.raises(ConflictError) if refused else nullcontext() as caught:
        refuse_other_image(tmp_path, load_spec(tmp_path / "spec.json"))
    assert caught is None or caught.value.code == "release.exists"


def test_what_a_stage_left_comes_back_as_far_as_an_answer_holds_it(tmp_path: Path) -> None:
    """Small files first; links, pipes and what is too large stay where they are."""
    for name, size in (("run.json", 10), ("logs/a.log", 1000), ("big.log", 200_000)):
        (tmp_path / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "work" / name).write_bytes(os.urandom(size))
    (tmp_path / "work/link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "work/pipe")
    text = modal_project.left_text(tmp_path / "work", 10_000)
    modal_project.take_left(text, tmp_path / "here")
    assert {str(p.relative_to(tmp_path / "here")) for p in (tmp_path / "here").rglob("*") if p.is_file()} == {
        "run.json", "logs/a.log"
    }  # fmt: skip
    assert len(text) <= 10_000
    assert modal_project.left_text(tmp_path / "none", 10_000) == ""
