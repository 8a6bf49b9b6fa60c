"""Paths that are no files: a named pipe as an archive, a device as the place of a report, a base that is not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from oci_builder.cli.common import write_json
from oci_builder.model.errors import SpecError
from oci_builder.model.jsontext import load_json
from oci_builder.transports.contents import read_contents
from oci_builder.transports.unchanged import identity


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
