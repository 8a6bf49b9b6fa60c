"""The ELF reader on files that gcc makes, whole and damaged."""

from __future__ import annotations

import random
from pathlib import Path

from oci_builder.payload.elf import BadElf, read_elf
from oci_builder.payload.fatbin import MemorySource
from oci_builder.payload.readiness.facts import FileFacts, wanted
from tests.lab.oracle import within
from tests.readiness.lab import cubin, entry, fatbin, library, needs_gcc


def facts(path: bytes, data: bytes) -> FileFacts | None:
    read = wanted(path, data[:8])
    return read(path, MemorySource(data)) if read else None


@needs_gcc
def test_facts_of_a_library(tmp_path: Path) -> None:
    flags = ("-Wl,-soname,libx.so.4", "-Wl,-rpath,$ORIGIN/a:/b", "-Wl,--no-as-needed", "-lm")
    elf = read_elf(MemorySource(library(tmp_path / "x.so", flags=flags).read_bytes()))
    assert (elf.machine, elf.kind, elf.soname) == ("x64", "dyn", "libx.so.4")
    assert "libm.so.6" in elf.needed
    assert elf.runpath == ("$ORIGIN/a", "/b")
    assert not elf.exec_stack and not elf.textrel


@needs_gcc
def test_names_that_are_not_ascii_are_read_as_utf_8(tmp_path: Path) -> None:
    library(tmp_path / "x.so", flags=("-Wl,-soname,libü.so.1",))
    assert read_elf(MemorySource((tmp_path / "x.so").read_bytes())).soname == "libü.so.1"


@needs_gcc
def test_a_cpu_level_note_is_read(tmp_path: Path) -> None:
    library(tmp_path / "x.so", flags=("-Wl,-z,x86-64-v3",))
    assert read_elf(MemorySource((tmp_path / "x.so").read_bytes())).isa == 3


@needs_gcc
def test_random_damage_never_does_more_than_say_no(tmp_path: Path) -> None:
    good = library(tmp_path / "x.so", code=fatbin(entry("sass", 100))).read_bytes()
    dice = random.Random(9)
    refused = 0
    with within(20):
        for round_ in range(1500):
            data = bytearray(good)
            # Headers and the tables at the end decide; most of the file is padding.
            for _ in range(dice.randint(1, 6)):
                where = dice.randrange(64) if round_ % 2 else dice.randrange(len(data))
                data[where] = dice.randrange(256)
            data[:4] = b"\x7fELF"
            try:
                read_elf(MemorySource(bytes(data)))
            except BadElf:
                refused += 1
    assert refused > 100


def test_headers_that_claim_more_than_the_file_has_are_refused_at_once() -> None:
    head = bytearray(bytes.fromhex("7f454c46020101000000000000000000") + bytes(48))
    head[16:24] = bytes.fromhex("03003e0001000000")
    head[40:48] = (64).to_bytes(8, "little")
    head[58:64] = (64).to_bytes(2, "little") + (65535).to_bytes(2, "little") + bytes(2)
    with within(1):
        found = facts(b"x.so", bytes(head))
    assert found is not None and found.bad


def test_files_of_no_interest_are_not_read() -> None:
    assert wanted(b"a/b.py", b"import os") is None
    assert wanted(b"a/b.so", b"\x7fEL") is None


def test_a_short_cubin_head_is_no_crash() -> None:
    for size in range(8, 64):
        found = facts(b"x.cubin", cubin(100)[:size])
        assert found is not None and found.gpu is None


def test_an_archive_with_a_lying_member_size_ends() -> None:
    header = b"x/".ljust(16) + b"0".ljust(12) + b"0".ljust(12) + b"644".ljust(8) + b"9999999999" + b"`\n"
    found = facts(b"x.a", b"!<arch>\n" + header + b"\x7fELF" + fatbin(entry("sass", 80)))
    assert found is not None and found.gpu is not None and found.gpu.bad


def test_a_fat_binary_file_is_code_itself() -> None:
    found = facts(b"k.fatbin", fatbin(entry("sass", 100)))
    assert found is not None and found.loose and found.gpu is not None and len(found.gpu.modules) == 1
