"""VerifiedReader: C2-01 to C2-06."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oci_builder.model.digest import Digest
from oci_builder.model.errors import IntegrityError
from oci_builder.wire.verified import VerifiedReader

DATA = bytes(range(256)) * 40
DIGEST = Digest.of(DATA)


def cut(data: bytes, step: int = 1000) -> Iterator[bytes]:
    yield from (data[at : at + step] for at in range(0, len(data), step))


def read(data: bytes, size: int = len(DATA)) -> bytes:
    with VerifiedReader(cut(data), DIGEST, size, "blob") as reader:
        return b"".join(reader)


def code_of(data: bytes, size: int = len(DATA)) -> str:
    with pytest.raises(IntegrityError) as caught:
        read(data, size)
    return caught.value.code


def test_the_right_bytes_pass() -> None:
    assert read(DATA) == DATA


def test_an_empty_blob_passes() -> None:
    with VerifiedReader(iter(()), Digest.of(b""), 0, "blob") as reader:
        assert list(reader) == []


@pytest.mark.parametrize("at", [0, 5000, len(DATA) - 1])
def test_c2_01_one_bit(at: int) -> None:
    bad = bytearray(DATA)
    bad[at] ^= 4
    assert code_of(bytes(bad)) == "blob.digest"


@pytest.mark.parametrize("tail", [b"x", bytes(5000)])
def test_c2_02_longer(tail: bytes) -> None:
    assert code_of(DATA + tail) == "blob.size"


def test_c2_02_shorter() -> None:
    assert code_of(DATA[:-1]) == "blob.size"


def test_c2_02_an_endless_source_is_left_at_once() -> None:
    pulled = 0

    def endless() -> Iterator[bytes]:
        nonlocal pulled
        while True:
            pulled += 1
            yield bytes(1000)

    got = 0
    with pytest.raises(IntegrityError):
        for chunk in VerifiedReader(endless(), DIGEST, len(DATA), "blob"):
            got += len(chunk)
    assert got <= len(DATA) and pulled == len(DATA) // 1000 + 1


def test_c2_04_negative_size_before_any_read() -> None:
    def untouched() -> Iterator[bytes]:
        raise AssertionError("was read")
        yield b""

    with pytest.raises(IntegrityError) as caught:
        VerifiedReader(untouched(), DIGEST, -1, "blob")
    assert caught.value.code == "blob.size"


def test_c2_05_closing_half_way_reads_and_judges_the_rest() -> None:
    bad = DATA[:-1] + b"?"
    reader = VerifiedReader(cut(bad), DIGEST, len(bad), "blob")
    next(iter(reader))
    with pytest.raises(IntegrityError) as caught:
        reader.close()
    assert caught.value.code == "blob.digest"


def test_c2_06_a_consumer_that_stops_early_still_finds_the_tampered_end() -> None:
    bad = DATA[:-1] + b"?"
    with pytest.raises(IntegrityError):
        with VerifiedReader(cut(bad), DIGEST, len(bad), "blob") as reader:
            for _ in reader:
                break


def test_closing_twice_is_closing_once() -> None:
    pieces = list(cut(DATA))
    left = iter(pieces)
    reader = VerifiedReader(left, DIGEST, len(DATA), "blob")
    reader.close()
    assert next(left, None) is None
    reader.close()
