"""Files within files, of the kinds that writers other than ours make, and of the kinds that are made to do harm."""

from __future__ import annotations

import gzip
import io
import lzma
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest

from oci_builder.cli.running import show_report
from oci_builder.model.report import Finding, Report
from oci_builder.release.scan import scan_archives, scan_file
from oci_builder.release.secrets import ScanOptions
from tests.lab.archives import Lab, write
from tests.lab.oracle import within

TOKEN = b"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"
LINE = b"HF_TOKEN=" + TOKEN + b"\n"
PACKED = gzip.compress(LINE * 20)  # the token itself does not stand in it
assert TOKEN not in PACKED


def told(data: bytes, path: bytes = b"opt/rt/a", options: ScanOptions | None = None) -> list[str]:
    chunks = [data[i : i + (1 << 20)] for i in range(0, len(data), 1 << 20)]
    return [f.message for f in scan_file(path, len(data), chunks, options=options)]


def member(name: bytes, data: bytes, method: int = 0, flags: int = 0) -> bytes:
    size = len(data)
    return struct.pack("<4s5H3I2H", b"PK\3\4", 20, flags, method, 0, 0, 0, size, size, len(name), 0) + name + data


def large(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file, file.open(name, "w", force_zip64=True) as to:
        to.write(data)
    return out.getvalue()


def streamed(name: bytes, data: bytes) -> bytes:
    head = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 8, 0, 0, 0, 0, 0, 0, len(name), 0) + name
    return head + data + struct.pack("<4s3I", b"PK\7\x08", 0, len(data), len(data))


@pytest.mark.parametrize(
    "data",
    [
        large("b.gz", PACKED), streamed(b"b.gz", PACKED),
        streamed(b"a", b"PK\7\x08" + bytes(70_000)) + streamed(b"b.gz", PACKED),
        lzma.compress(b"a") + bytes(200_000) + lzma.compress(LINE * 20),
        member(b"a", b"?" * 99, flags=1) + member(b"b.gz", PACKED), member(b"a", b"?" * 99, 93) + member(b"b.gz", PACKED),
        member(b"a", b"\7" * 99, 8) + member(b"b.gz", PACKED),
    ],
    ids=["zip64", "streamed", "marks in a streamed one", "padding", "encrypted", "zstd", "damaged"],
)  # fmt: skip
def test_a_file_behind_an_odd_one_is_opened(data: bytes) -> None:
    assert [message for message in told(data) if message.startswith("Hugging Face token")]


@pytest.mark.parametrize("flags, method, why", [(1, 8, "encrypted"), (0, 93, "method 93"), (0, 8, "deflate")])
def test_a_member_that_stays_closed_is_named(flags: int, method: int, why: str) -> None:
    data = member(b"x/a", b"\7" * 99, method, flags) + member(b"b", LINE)
    secret, closed = told(data)
    assert "opt/rt/a!b" in secret and "'opt/rt/a!x/a'" in closed and why in closed
    assert told(data, options=ScanOptions(allow_paths={r"opt/rt/a!(x/a|b)": "known"})) == []


def test_a_member_without_an_end_is_said() -> None:
    assert "no end" in told(streamed(b"b", b"?" * 70_000)[:-16])[0]


@pytest.mark.parametrize(
    ("path", "data", "kind"),
    [
        (b"opt/a.whl", member(b".netrc", b"machine a"), "credentials file"),
        (b"root/.netrc.gz", gzip.compress(b"machine a"), "credentials file"),
        (b"opt/new\nline/.netrc", b"machine a", "credentials file"),
        (b"opt/a.zip", member(b"pip.conf", b"[global]\nindex-url = https://u:pa55w0rd@h/simple"), "password"),
        (b"etc/pip.conf.xz", lzma.compress(b"[global]\nindex-url = https://u:pa55w0rd@h/simple"), "password"),
    ],
    # Names of its own: compressed data holds the time, and every worker must see the same tests.
    ids=["wheel", "gzip", "newline", "zip", "xz"],
)  # fmt: skip
def test_names_count_at_the_top_of_a_container_too(path: bytes, data: bytes, kind: str) -> None:
    assert [message[: len(kind)] for message in told(data, path)] == [kind]


def test_long_names_around_many_members_take_no_memory() -> None:
    """Each text of a window keeps its place: 20,000 of 64 KiB would be 1.3 GB."""
    data = member(b"n" * 65_000, member(b"x", b"") * 20_000)
    tracemalloc.start()
    told(data)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 << 20


def test_members_without_content_are_opened_so_far_and_no_further() -> None:
    data = gzip.compress(member(b"", b"") * 400_000)
    with within(30):
        said = told(data, options=ScanOptions(opened=4 << 20))
    assert ["more than is opened" in message for message in said] == [True]


def test_a_setting_that_stands_in_two_copies_of_a_config_is_told_once(tmp_path: Path) -> None:
    """podman's docker archives hold a config twice."""

    def labelled(value: Any) -> Any:
        value["config"]["Labels"] = {"note": TOKEN.decode()}
        return value

    members = Lab(edit_config=labelled).docker()
    assert isinstance(members, dict)
    config = next(data for name, data in members.items() if name.endswith(".json") and name != "manifest.json")
    scan = scan_archives([write(tmp_path / "i", {**members, "layer/json": config})], ScanOptions())
    assert [f.message for f in scan.findings] == ["note looks like a credential in i: image config"]


def test_a_finding_that_expected_nothing_says_only_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(Report(({"path": "i"},), (Finding("policy.secret", "error", "i", "", "sha256 12", "a token", 4),)))
    out = "".join(capsys.readouterr())
    assert "a token (sha256 12)\n" in out and "expected" not in out
