"""Where two readers could see two archives in one, we see the one that GNU tar sees, or refuse (C7-10, C7-18)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from oci_builder.wire.tar import TarReader
from tests.lab import tarlang as t

INNER = t.file(b"inner", b"smuggled")
CASES = {
    "a record's size beats the header's, larger": t.tar(
        t.pax(t.record(b"size", b"%d" % len(INNER))), t.header(b"outer", size=0), INNER, t.file(b"last", b"1")),
    "a record's size beats the header's, smaller": t.tar(
        t.pax(t.record(b"size", b"0")), t.header(b"outer", size=len(INNER)), INNER, t.file(b"last", b"1")),
    "base-256 size": t.tar(t.header(b"outer", size=t.base256(len(INNER), 12)), INNER, t.file(b"last", b"1")),
    "size with spaces in front": t.tar(t.header(b"outer", size=b"       2000 "), INNER, t.file(b"last", b"1")),
    "GNU magic": t.tar(t.file(b"a", b"1", magic=t.GNU)),
    "long name over PAX-less entry": t.tar(t.long_name(b"n" * 150 + b"\0"), t.file(b"short", b"1")),
    "name in a record": t.tar(t.pax(t.record(b"path", b"p" * 150)), t.file(b"short", b"1")),
}  # fmt: skip


@pytest.mark.parametrize("data", CASES.values(), ids=CASES.keys())
def test_the_same_names_and_content_as_gnu_tar(tmp_path: Path, data: bytes) -> None:
    subprocess.run(["tar", "xf", "-"], input=data, cwd=tmp_path, check=True, capture_output=True)
    theirs = {p.name.encode(): p.read_bytes() for p in tmp_path.iterdir()}
    reader = TarReader([data])
    assert {entry.name: b"".join(map(bytes, reader.data())) for entry in reader} == theirs
