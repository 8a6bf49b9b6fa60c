"""``--gpu`` takes the next word only when that names GPUs (issue 4 spells ``verify --exec --gpu``)."""

from __future__ import annotations

import click
import pytest

from oci_builder.cli.gpus import GpuCommand
from oci_builder.cli.images import verify
from oci_builder.cli.running import exec_command


def parsed(command: click.Command, *words: str) -> dict[str, object]:
    return command.make_context("x", list(words)).params


@pytest.mark.parametrize(
    ("words", "gpu", "subject", "rest"),
    [
        (["--gpu", "r", "--", "/bin/ls"], "all", "r", ("--", "/bin/ls")),
        (["--gpu", "r", "ls", "--gpu", "x"], "all", "r", ("ls", "--gpu", "x")),
        (["--gpu", "0,1", "r", "ls"], "0,1", "r", ("ls",)),
        (["--gpu", "all", "r", "ls"], "all", "r", ("ls",)),
        (["--gpu", "0:1,1", "r", "ls"], "0:1,1", "r", ("ls",)),
        (["--gpu", "GPU-0a1b,2", "r"], "GPU-0a1b,2", "r", ()),
        (["--gpu=3", "r", "ls"], "3", "r", ("ls",)),
        (["--gpu", "--user", "0", "r", "ls"], "all", "r", ("ls",)),
        (["-e", "--gpu=x", "--gpu", "./0", "ls"], "all", "0", ("ls",)),
        (["--env", "A=1", "r", "--gpu", "ls"], None, "r", ("--gpu", "ls")),
        (["r", "--gpu"], None, "r", ("--gpu",)),
    ],
)
def test_exec(words: list[str], gpu: str | None, subject: str, rest: tuple[str, ...]) -> None:
    found = parsed(exec_command, *words)
    said = tuple(w for w in found["command"] if w != "--")  # type: ignore[attr-defined]
    assert (found["gpu"], str(found["subject"])) == (gpu, subject)
    assert said == tuple(w for w in rest if w != "--")


@pytest.mark.parametrize(
    ("words", "gpu", "archives"),
    [
        (["--exec", "--gpu", "a.tar", "b.tar"], "all", ["a.tar", "b.tar"]),
        (["a.tar", "--exec", "--gpu", "b.tar"], "all", ["a.tar", "b.tar"]),
        (["--exec", "--gpu", "all", "a.tar"], "all", ["a.tar"]),
        (["--exec", "a.tar", "--gpu", "1"], "1", ["a.tar"]),
        (["a.tar", "--exec", "--gpu"], "all", ["a.tar"]),
        (["--gpu", "--", "a.tar"], "all", ["a.tar"]),
        (["--checks", "--gpu", "a.tar"], None, ["a.tar"]),
    ],
)
def test_verify(words: list[str], gpu: str | None, archives: list[str]) -> None:
    found = parsed(verify, *words)
    assert (found["gpu"], [str(a) for a in found["archives"]]) == (gpu, archives)  # type: ignore[attr-defined]


def test_the_commands_with_gpus_are_such_commands() -> None:
    assert isinstance(verify, GpuCommand)
    assert isinstance(exec_command, GpuCommand)
