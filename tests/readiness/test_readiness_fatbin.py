"""The fat binary reader on containers made by hand, whole and broken."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from oci_builder.payload.fatbin import (
    Arch,
    BadFatbin,
    Code,
    MemorySource,
    embedded_containers,
    read_container,
    section_containers,
)
from tests.lab.oracle import within
from tests.readiness.lab import entry, fatbin


def codes(data: bytes) -> list[Code]:
    return [c for box in section_containers(MemorySource(data), 0, len(data)) for c in box.entries]


def test_kinds_architectures_suffixes_and_isa_are_read() -> None:
    data = fatbin(entry("sass", 90, "a"), entry("sass", 100, "f"), entry("ptx", 80, isa=(9, 1)), entry("ltoir", 75))
    assert codes(data) == [
        Code("sass", Arch(90, "a")),
        Code("sass", Arch(100, "f")),
        Code("ptx", Arch(80), (9, 1)),
        Code("other", Arch(75)),
    ]


def test_containers_follow_each_other_with_zero_padding_between() -> None:
    data = fatbin(entry("sass", 80)) + bytes(5000) + fatbin(entry("sass", 90)) + bytes(24)
    assert [c.arch.number for c in codes(data)] == [80, 90]


def test_junk_in_a_section_is_an_error() -> None:
    with pytest.raises(BadFatbin):
        codes(fatbin(entry("sass", 80)) + b"junk" + fatbin(entry("sass", 90)))


@pytest.mark.parametrize("cut", [1, 8, 15, 16, 40, 79, 100])
def test_a_cut_container_is_an_error(cut: int) -> None:
    data = fatbin(entry("sass", 80), entry("sass", 90))[:-cut]
    with pytest.raises(BadFatbin):
        read_container(MemorySource(data), 0, len(data))


def test_an_entry_header_of_size_zero_cannot_loop() -> None:
    data = bytearray(fatbin(entry("sass", 80)))
    data[16 + 4 : 16 + 16] = bytes(12)
    with pytest.raises(BadFatbin):
        read_container(MemorySource(bytes(data)), 0, len(data))


def test_embedded_containers_are_found_at_any_offset_across_read_windows() -> None:
    one = fatbin(entry("sass", 100))
    for at in (0, 1, (1 << 20) - 4, (1 << 20) - 1, (1 << 20) + 3, (2 << 20) - 7):
        data = bytes(at) + one + bytes(100)
        assert [c.start for c in embedded_containers(MemorySource(data))] == [at]


def test_what_only_looks_like_a_container_is_passed_over() -> None:
    magic = fatbin()[:8]
    data = magic * 3 + b"\xff" * 40 + fatbin(entry("sass", 100)) + magic
    assert [c.entries[0].arch.number for c in embedded_containers(MemorySource(data))] == [100]


def test_known_ranges_are_skipped() -> None:
    one = fatbin(entry("sass", 100))
    data = one + bytes(64) + one
    found = list(embedded_containers(MemorySource(data), ((0, len(one)),)))
    assert [c.start for c in found] == [len(one) + 64]


def test_random_damage_never_does_more_than_say_no() -> None:
    dice = random.Random(9)
    good = fatbin(entry("sass", 80), entry("ptx", 90)) + bytes(16) + fatbin(entry("sass", 100, "f"))
    with within(10):
        for _ in range(3000):
            data = bytearray(good)
            for _ in range(dice.randint(1, 4)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            list(embedded_containers(MemorySource(bytes(data))))
            with suppress(BadFatbin):
                codes(bytes(data))
