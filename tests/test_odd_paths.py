"""Paths that are no files: a named pipe as an archive, a device as the place of a report, a base that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oci_builder.cli.common import write_json
from oci_builder.model.errors import OciBuilderError, SpecError
from oci_builder.model.jsontext import load_json
from oci_builder.transports.contents import read_contents
from oci_builder.transports.unchanged import identity
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.verify import VerifyOptions, verify_archives
from tests.lab.archives import Lab, write, write_layout


def test_a_pipe_is_no_archive_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError) as error:
        read_contents(tmp_path / "pipe")
    assert error.value.code == "spec.path"


def test_a_report_is_written_to_a_pipe_not_over_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json({"a": 1}, str(pipe))
        assert json.loads(os.read(reader, 100)) == {"a": 1}
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_missing_base_is_our_input_being_wrong(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        identity(tmp_path / "absent.tar")
    assert (error.value.code, error.value.exit_status) == ("spec.path", 2)


def test_whole_surrogate_pairs_are_json() -> None:
    assert load_json(b'"\\ud83d\\ude00"', "here") == "\U0001f600"


START = (sys.executable, "-c", "from oci_builder.cli import main; main()")


def run(*words: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*START, *map(str, words)], capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Things that are no archive."""
    folder = tmp_path_factory.mktemp("odd")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "folder/file").write_text("x")
    return {name: folder / name for name in ("pipe", "folder", "absent")}


@pytest.mark.parametrize("what", ["pipe", "folder", "absent"])
@pytest.mark.parametrize("verb", ["verify", "inspect", "diff", "unpack", "push"])
def test_what_is_no_archive_is_status_2_for_every_verb(
    odd: dict[str, Path], what: str, verb: str, tmp_path: Path
) -> None:
    path = odd[what]
    more = {"diff": [path], "unpack": [tmp_path / "dest"], "push": ["localhost:1/x:y"]}.get(verb, [])
    done = run(verb, path, *more)
    assert (done.returncode, "spec.path" in done.stdout + done.stderr) == (2, True), done
    assert not (tmp_path / "dest").exists()


def test_a_pipe_as_a_spec_is_not_waited_for(odd: dict[str, Path], tmp_path: Path) -> None:
    verbs: list[list[object]] = [["build", odd["pipe"]], ["verify", odd["absent"], "--spec", odd["pipe"]]]
    for verb in verbs:
        done = run(*verb)
        assert (done.returncode, "spec.path" in done.stderr) == (2, True), done


@pytest.mark.parametrize("platform", ["foo", "linux/", "/amd64", "linux/amd64/v8/x", "Linux/AMD64", "a b/c", ""])
def test_what_is_no_platform_is_our_input_being_wrong(platform: str, tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", Lab().oci())
    verbs: list[Callable[[], object]] = [
        lambda: read_contents(archive, platform=platform), lambda: VerifyOptions(platform=platform),
        lambda: unpack_image(archive, tmp_path / "dest", UnpackOptions(platform=platform)),
    ]  # fmt: skip
    for verb in verbs:
        with pytest.raises(SpecError) as error:
            verb()
        assert error.value.code == "spec.platform"


@pytest.mark.parametrize("verb", ["verify", "inspect", "unpack"])
def test_and_so_it_is_on_the_command_line(verb: str, tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", Lab().oci())
    done = run(verb, archive, *([tmp_path / "dest"] if verb == "unpack" else []), "--platform", "foo")
    assert (done.returncode, "spec.platform" in done.stderr) == (2, True), done


def test_a_reader_that_goes_away_ends_it_quietly(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", Lab().oci())
    words = [*START, "inspect", str(archive)]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_c2_10_an_index_that_is_a_link_out_of_the_layout(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", Lab().oci())
    (layout / "index.json").rename(tmp_path / "outside.json")
    (layout / "index.json").symlink_to(tmp_path / "outside.json")
    for verb in (lambda: read_contents(layout), lambda: unpack_image(layout, tmp_path / "dest")):
        with pytest.raises(OciBuilderError) as error:
            verb()
        assert error.value.code == "archive.member"
    assert "archive.member" in {finding.code for finding in verify_archives([layout]).errors}
