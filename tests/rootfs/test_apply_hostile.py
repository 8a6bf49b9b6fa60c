"""The hostile catalogue's tars against ``unpack``, judged by what they leave behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.wire.tar import TarReader
from tests.hostile.cases_tar import CASES, DIR, Outcome
from tests.lab.archives import Lab, write
from tests.lab.oracle import Victim, bounded

# Codes that the tar reader alone cannot know: they need the tree.
_OF_THE_TREE = ("entry.whiteout", "path.parent", "path.loop", "entry.link_target", "entry.device", "entry.duplicate")
IDS = [case[0] for case in CASES]


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    yield Victim(tmp_path)
    subprocess.run(["chmod", "-R", "u+rwx", str(tmp_path)], check=False)


def seen(root: Path) -> dict[bytes, object]:
    """The tree in the catalogue's notation."""
    out: dict[bytes, object] = {}
    top = os.fsencode(root)
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            full = os.path.join(folder, name)
            path = os.path.relpath(full, top)
            if os.path.islink(full):
                out[path] = ("link", os.readlink(full))
            elif os.path.isdir(full):
                out[path] = DIR
            elif os.path.isfile(full):
                with open(full, "rb") as file:
                    out[path] = file.read()
            else:
                out[path] = ("fifo",)
    return out


def expected(tree: dict[bytes, object]) -> dict[bytes, object]:
    """With the folders that are implied."""
    out = dict(tree)
    for path in tree:
        while path := path.rpartition(b"/")[0]:
            out.setdefault(path, DIR)
    return out


@pytest.mark.parametrize(("case", "what", "layers", "outcome"), CASES, ids=IDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_unpack(victim: Victim, case: str, what: str, layers: list[bytes], outcome: Outcome, threads: int) -> None:
    archive = write(victim.folder / "archive.tar", Lab(layers=layers, pack="identity").oci())
    with bounded():
        if isinstance(outcome, str):
            with pytest.raises(OciBuilderError) as error:
                unpack_image(archive, victim.dest, UnpackOptions(threads=threads))
            assert error.value.code == outcome
            assert error.value.exit_status in (3, 4)
            assert not victim.dest.exists()
        else:
            unpack_image(archive, victim.dest, UnpackOptions(threads=threads))
            assert seen(victim.dest) == expected(outcome)
    victim.check()


@pytest.mark.parametrize(("case", "what", "layers", "outcome"), CASES, ids=IDS)
def test_reader(case: str, what: str, layers: list[bytes], outcome: Outcome) -> None:
    """The reader alone gives the code, whatever the chunks; strict accepts nothing that lenient refuses."""
    if isinstance(outcome, str) and not outcome.startswith(_OF_THE_TREE):
        codes = {code_of(layers, size, strict) for size in (1, 511, 1 << 20) for strict in (False, True)}
        assert outcome in codes
        assert None not in codes
    elif not isinstance(outcome, str):
        assert code_of(layers, 1 << 20, False) is None


def code_of(layers: list[bytes], size: int, strict: bool) -> str | None:
    size = max(size, len(layers[0]) // 3000)
    try:
        for layer in layers:
            chunks = [layer[at : at + size] for at in range(0, len(layer), size)]
            reader = TarReader(chunks, strict=strict)
            for _entry in reader:
                for number, _part in enumerate(reader.data()):
                    if number > 100:
                        break
    except OciBuilderError as error:
        return error.code
    return None


def test_ids_are_unique() -> None:
    assert len(set(IDS)) == len(IDS)
