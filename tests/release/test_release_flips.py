"""One bit of a recorded release is changed: it is found out, or the byte says nothing (issue 7, items 1 and 3)."""

from __future__ import annotations

import os
import random
import re
import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError
from oci_builder.qualification import Rules, check_release, update_release
from oci_builder.record import record
from oci_builder.release import files
from tests.release.built import make_build, make_release, request

pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")

# When the verdict was reached is its own word; a key id is a hint (DSSE), and one may be missing.
FREE = re.compile(rb'"evaluated_at": "[^"]*"|"keyid":"[^"]*"')


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rules]:
    place = tmp_path_factory.mktemp("r")
    make_release(place)
    rules = Rules.load(place / "spec.json", place / "trust.json")
    folder = place / "releases/v1-r1"
    update_release(folder, rules, datetime.now(UTC))
    check_release(folder, rules)
    return folder, rules


def accepted(folder: Path, rules: Rules) -> bool:
    try:
        check_release(folder, rules)
    except OciBuilderError as error:
        assert error.exit_status in (1, 3), error
        return False
    return True


def test_every_changed_bit_is_found_out(release: tuple[Path, Rules]) -> None:
    """A sample of each file's; all 7,400 bits of the signed and judged ones that were tried by hand gave the same."""
    folder, rules = release
    chance, wrong = random.Random(9), []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        free = {at for match in FREE.finditer(data) for at in range(*match.span())}
        for at in chance.sample(range(len(data)), min(40, len(data))):
            path.write_bytes(data[:at] + bytes([data[at] ^ chance.choice((1, 2, 32))]) + data[at + 1 :])
            if accepted(folder, rules) and at not in free:
                wrong.append((path.name, at, data[max(0, at - 20) : at + 20]))
        path.write_bytes(data)
    assert wrong == []
    assert accepted(folder, rules)


def test_a_name_in_the_verdict_counts_even_where_its_value_says_nothing(release: tuple[Path, Rules]) -> None:
    folder, rules = release
    path = folder / "qualification.json"
    data = path.read_bytes()
    assert b'"superseded_by": null' in data
    path.write_bytes(data.replace(b'"superseded_by"', b'"superseded-by"'))
    assert not accepted(folder, rules)
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["a.cdx.json", "image.cdx.json", "spec.json", "container.json", "portable.json", "record-"])
def test_a_record_that_was_killed_is_finished_by_the_next(name: str, tmp_path: Path) -> None:
    """While it wrote its first file, one in the middle, the records, or the receipt, which is the last."""
    make_build(tmp_path)
    folder = tmp_path / "releases/v1-r1"
    child = os.fork()
    if not child:
        write = files._write_temp

        def killed(path: Path, data: bytes, mode: int) -> Path:
            made = write(path, data, mode)
            if path.name.startswith(name):
                os.kill(os.getpid(), signal.SIGKILL)
            return made

        files._write_temp = killed
        try:
            record(request(tmp_path))
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status)
    assert [path for path in folder.rglob(".*") if path.name.startswith(f".{name}")]
    (folder / ".note.tmp").write_bytes(b"of somebody else")
    record(request(tmp_path))
    rules = Rules.load(tmp_path / "spec.json", tmp_path / "trust.json")
    update_release(folder, rules, datetime.now(UTC))
    check_release(folder, rules)
    assert [path.name for path in folder.rglob(".*")] == [".note.tmp"]
    assert len(list((folder / "receipts").iterdir())) == 1
