"""Small real inputs for readiness: fat binaries by hand, shared objects by gcc, trees that hold them."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from oci_builder.payload.readiness.allow import Rules
from oci_builder.payload.readiness.arch import Target
from oci_builder.payload.readiness.collect import folder_delta
from oci_builder.payload.readiness.host import Glibc
from oci_builder.payload.readiness.judge import Contract, judge
from oci_builder.payload.readiness.report import ReadinessReport, Row
from oci_builder.payload.readiness.tree import Tree, overlay

SUFFIX = {"": 0, "a": 0x100000, "f": 0x200000}
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def entry(
    kind: str, number: int, suffix: str = "", *, isa: tuple[int, int] = (8, 0), payload: bytes = b"x" * 24
) -> bytes:
    """One entry of a fat binary, header and payload."""
    code = {"ptx": 1, "sass": 2, "ltoir": 8}[kind]
    major, minor = isa if kind == "ptx" else (1, 8)
    padded = payload + bytes(-len(payload) % 8)
    head = struct.pack(
        "<HHIQIIHHIIIQ", code, 0x101, 64, len(padded), 0, 0, minor, major, number, 0, 0, SUFFIX[suffix] | 0x11
    )
    return head + bytes(64 - len(head)) + padded


def fatbin(*entries: bytes) -> bytes:
    """One container."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def cubin(number: int, *, note: str = "", flags: int = 0) -> bytes:
    """The start of a cubin: an ELF header of the CUDA machine, ABI 8, and the compiler's note."""
    head = bytearray(64)
    head[:9] = b"\x7fELF\x02\x01\x01\x41\x08"
    struct.pack_into("<HHI", head, 16, 2, 190, 1)
    struct.pack_into("<I", head, 48, number << 8 | 2 | flags)
    return bytes(head) + (f"\0-arch {note} -m 64 \0".encode() if note else b"")


def library(
    path: Path, *, code: bytes = b"", section: str = ".nv_fatbin", source: str = "", flags: tuple[str, ...] = ()
) -> Path:
    """Build a shared object with gcc that holds ``code`` in ``section``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(path.name + ".build")
    work.mkdir()
    lines = [source or f"int marker_{abs(hash(path.name))};"]
    if code:
        (work / "code.bin").write_bytes(code)
        lines.append(f'__asm__(".section {section},\\"a\\"\\n.balign 8\\n.incbin \\"{work}/code.bin\\"\\n.text\\n");')
    (work / "in.c").write_text("\n".join(lines) + "\n")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", path, work / "in.c", *flags], check=True, capture_output=True, text=True
    )
    shutil.rmtree(work)
    return path


def package(site: Path, name: str, version: str, files: tuple[str, ...] = (), requires: tuple[str, ...] = ()) -> None:
    """Record an installed distribution."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n\nLong text.\nName: not-this\n")
    (info / "RECORD").write_text("".join(f"{f},sha256=x,1\n" for f in files))


def assess(
    root: Path, target: str = "sm_100", *, glibc: str = "2.35", env: dict[str, str] | None = None, rules: str = ""
) -> ReadinessReport:
    """Judge a folder as the verb does."""
    all_rules = Rules.load().joined(Rules.parse(rules, "test"))
    contract = Contract(Target.parse(target), Glibc.parse(glibc), all_rules)
    return judge(Tree(overlay([folder_delta(root)]), env), str(root), contract)


def rows(report: ReadinessReport, code: str) -> list[Row]:
    """The report's rows with this code."""
    return [r for r in report.rows if r.code == code]
