"""Archives behind programs and scripts, deep in each other, and of older kinds (issue 7, item 8)."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from oci_builder.release.scan import scan_file
from oci_builder.release.secrets import ScanOptions
from tests.lab.archives import entry, tar

TOKEN = b"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"
LINE = b"HF_TOKEN=" + TOKEN + b"\n"
# What no search of the bytes themselves would find.
PACKED = gzip.compress(LINE * 20)
SCRIPT = b"#!/bin/sh\n" + b"# unpacks what follows\n" * 300 + b"exit 0\n"
NOISE = random.Random(1).randbytes(70_000)


def elf(bits: int = 64, order: str = "<") -> bytes:
    """A program of 5000 bytes whose section headers stand last."""
    code = bytes((2 if bits == 64 else 1, 1 if order == "<" else 2))
    form = "HHIQQQIHHHHHH" if bits == 64 else "HHIIIIIHHHHHH"
    head = b"\x7fELF" + code + b"\1" + bytes(9) + struct.pack(order + form, 2, 62, 1, 0, 0, 4872, 0, 64, 0, 0, 64, 2, 1)
    return head.ljust(5000, b"\x90")


def zipped(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, data)
    return out.getvalue()


def deb(*members: tuple[bytes, bytes]) -> bytes:
    out = b"!<arch>\n"
    for name, data in ((b"debian-binary", b"2.0\n"), *members):
        out += b"%-16s%-12d%-6d%-6d%-8s%-10d`\n" % (name, 0, 0, 0, b"100644", len(data)) + data + b"\n" * (len(data) % 2)
    return out


def told(data: bytes, cut: int = 1 << 20, path: bytes = b"opt/a") -> list[str]:
    chunks = [data[i : i + cut] for i in range(0, len(data), cut)]
    return [f.message for f in scan_file(path, len(data), chunks)]


TARRED = tar(entry("b", LINE))
DEEP = tar(entry("a.whl", zipped("a.tar.gz", gzip.compress(tar(entry("b.zip", zipped("c.xz", lzma.compress(LINE * 20))))))))
HELD = {
    "lzma": lzma.compress(LINE * 20, lzma.FORMAT_ALONE), "tar.lzma": lzma.compress(TARRED, lzma.FORMAT_ALONE),
    "zlib": zlib.compress(LINE * 20), "object of git": zlib.compress(b"blob 99\0" + LINE, 1),
    "deb": deb((b"control.tar.gz", gzip.compress(tar(entry("control")))), (b"data.tar.xz", lzma.compress(TARRED))),
    "zip behind a script": SCRIPT + zipped("b", LINE), "zip behind a launcher": b"MZ" + NOISE + zipped("b", LINE),
    "zip behind a program": elf() + zipped("b", LINE), "zip behind a small one": elf(32, ">") + zipped("b", LINE),
    "padded": elf() + bytes(4000) + zipped("b", LINE), "tar.gz behind a program": elf() + gzip.compress(TARRED),
    "tar behind a script": SCRIPT + gzip.compress(TARRED), "xz": SCRIPT + lzma.compress(TARRED),
    "bzip2": SCRIPT + bz2.compress(TARRED), "script in a gzip": gzip.compress(SCRIPT + zipped("b", LINE)),
    "lzma behind a script": SCRIPT + lzma.compress(TARRED, lzma.FORMAT_ALONE), "deep": DEEP,
}  # fmt: skip


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("cut", [1, 1000, 1 << 20])
def test_what_stands_within_is_found(held: str, cut: int) -> None:
    assert TOKEN not in HELD[held]
    (message,) = told(HELD[held], cut)
    assert message.startswith("Hugging Face token in 'opt/a!")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lzma.compress(NOISE, lzma.FORMAT_ALONE)[:9000], "ends early"), (zlib.compress(NOISE)[:9000], "ends early"),
        (deb((b"data.tar", b"1"))[:-40], "no header"), (SCRIPT + b"7z\xbc\xaf\x27\x1c" + NOISE, "7z archive behind a program"),
        (SCRIPT + b"Rar!\x1a\x07\1\0" + NOISE, "rar archive behind"), (elf() + b"hsqs" + NOISE, "squashfs archive behind"),
        (b"Rar!\x1a\x07\1\0" + NOISE, "rar archive"), (b"PACK\0\0\0\2\0\0\0\1\x30" + NOISE, "incorrect header"),
        (b"\x1f\x9d\x90" + NOISE, "compress archive"), (b"MSCF\0\0\0\0" + NOISE, "cabinet archive"),
    ],
    ids=["lzma", "zlib", "deb", "7z", "rar", "squashfs", "plain rar", "git", "compress", "cabinet"],
)  # fmt: skip
def test_what_is_not_looked_into_is_said_and_counted(data: bytes, why: str) -> None:
    (found,) = scan_file(b"opt/a", len(data), [data])
    assert (found.code, found.severity, found.actual) == ("policy.unsearched", "warning", "1")
    assert why in found.message and "opt/a" in found.message


@pytest.mark.parametrize(
    "data",
    [
        SCRIPT, elf(), elf() + NOISE, b"MZ" + NOISE, b"x^2 + y^2 = r^2\n" * 100, b"x\x9c" + NOISE, b"]\0\0" + NOISE,
        b"#!/bin/sh\necho PK\3\4\n" * 100, Path(sys.executable).resolve().read_bytes(), b"\x7fELF" + b"\xff" * 2000,
        elf()[:40],
    ],
    ids=["script", "program", "noise behind", "launcher", "formula", "no zlib", "no lzma", "mark", "python", "odd", "cut"],
)  # fmt: skip
def test_what_holds_no_archive_says_nothing(data: bytes) -> None:
    assert told(data) == []


def test_archives_are_opened_eight_deep_and_no_deeper() -> None:
    data = LINE * 20
    for _ in range(8):
        data = zipped("a", data)
    assert told(data)[0].startswith("Hugging Face token")
    assert "8 deep in others" in told(zipped("a", data))[0]


def test_decoders_in_decoders_stay_within_memory() -> None:
    """Each stream asks for as much as its format may: together they get what the program has."""
    data = LINE
    for _ in range(8):
        data = lzma.compress(data, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 64 << 20}])
    (message,) = told(data)
    assert "emory usage limit" in message


def test_an_archive_in_a_bomb_behind_a_script_is_opened_so_far_and_no_further() -> None:
    bomb = SCRIPT + gzip.compress(gzip.compress(bytes(64 << 20)))
    (found,) = scan_file(b"a", len(bomb), [bomb], options=ScanOptions(opened=1 << 20))
    assert found.code == "policy.unsearched"


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_a_package_that_dpkg_made_is_opened(tmp_path: Path) -> None:
    (tmp_path / "p/DEBIAN").mkdir(parents=True)
    (tmp_path / "p/DEBIAN/control").write_text("Package: a\nVersion: 1\nArchitecture: all\nMaintainer: a\nDescription: a\n")
    (tmp_path / "p/note").write_bytes(LINE * 20)
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", "p", "a.deb"], cwd=tmp_path, check=True, capture_output=True)
    (message,) = told((tmp_path / "a.deb").read_bytes())
    assert message.startswith("Hugging Face token in") and "note" in message


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("packed", [True, False])
def test_what_a_checkout_had_once_is_found(tmp_path: Path, packed: bool) -> None:
    """A file with a token was removed again, and its history travels with the tree."""
    line = b"".join(b"A_%d = 1\n" % i for i in range(900))

    def git(*args: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *args], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q", ".")
    for text in (line, line + LINE, line + b"B = 1\n"):
        (tmp_path / "settings").write_bytes(text)
        git("add", "settings")
        git("commit", "-q", "-m", "a")
    if packed:
        git("gc", "-q", "--aggressive", "--prune=now")
        (pack,) = (tmp_path / ".git/objects/pack").glob("*.pack")
        assert TOKEN not in pack.read_bytes()
        (message,) = told(pack.read_bytes(), 777)
        assert message.startswith("Hugging Face token in")
        return
    objects = [path.read_bytes() for path in (tmp_path / ".git/objects").glob("??/*")]
    assert not any(TOKEN in data for data in objects)
    assert sum(bool(told(data, 777)) for data in objects) == 1


@pytest.mark.skipif(shutil.which("xz") is None, reason="xz is not installed")
def test_a_file_that_xz_made_in_its_old_format_is_opened() -> None:
    data = subprocess.run(["xz", "--format=lzma", "-9e"], input=LINE * 20, check=True, capture_output=True).stdout
    assert told(data)[0].startswith("Hugging Face token")


def test_a_python_archive_with_a_long_start_is_opened(tmp_path: Path) -> None:
    """As zipapp writes it, with more in front than anybody expects."""
    with tarfile.open(tmp_path / "t", "w:gz") as out:
        info = tarfile.TarInfo("b")
        info.size = len(LINE)
        out.addfile(info, io.BytesIO(LINE))
    data = b"#!/usr/bin/env python3\n" + b"#" * 70_000 + b"\n" + zipped("t.tar.gz", (tmp_path / "t").read_bytes())
    assert told(data)[0].startswith("Hugging Face token")
