"""Extended headers and sparse maps cost no more than their bytes are worth: an archive of nothing else is read in time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from oci_builder.model.errors import FormatError, PolicyError
from oci_builder.wire.tar import TarReader
from tests.lab import tarlang as t
from tests.lab.oracle import bounded

MIB = 1 << 20


@contextmanager
def cheap(mib: int) -> Iterator[None]:
    """At most 0.8 s of this process's own time for each MiB of tar, and 64 MiB of memory; idle, 0.1 s is enough."""
    with bounded(0.8 * mib):
        yield


def read(data: bytes) -> tuple[list[bytes], list[str]]:
    """Every file's content, and the codes of the warnings."""
    warnings: list[str] = []
    reader = TarReader([data], warn=lambda code, _: warnings.append(code))
    return [b"".join(map(bytes, reader.data())) for _ in reader], warnings


def sparse_1_0(text: bytes, stored: bytes, size: int) -> bytes:
    records = {b"major": b"1", b"minor": b"0", b"name": b"s", b"realsize": b"%d" % size}
    head = t.pax(*(t.record(b"GNU.sparse." + key, value) for key, value in records.items()))
    return head + t.file(b"GNUSparseFile/s", t.pad(text) + stored)


def sparse_0_1(text: bytes, stored: bytes, size: int) -> bytes:
    head = t.pax(t.record(b"GNU.sparse.size", b"%d" % size), t.record(b"GNU.sparse.map", text))
    return head + t.file(b"s", stored)


def sparse_0_0(pieces: list[tuple[int, int]], stored: bytes, size: int) -> bytes:
    pairs = [t.record(b"GNU.sparse." + key, b"%d" % value) for piece in pieces
             for key, value in zip((b"offset", b"numbytes"), piece, strict=True)]  # fmt: skip
    return t.pax(t.record(b"GNU.sparse.size", b"%d" % size), *pairs) + t.file(b"s", stored)


def lines(*numbers: int) -> bytes:
    return b"".join(b"%d\n" % number for number in numbers)


def test_c7_20_maps_of_empty_pieces_are_read_in_time() -> None:
    """C7-20: five maps of 1 MiB, read anew for each of their 2,048 blocks, took ten seconds."""
    count = MIB // 4 - 4
    one = sparse_1_0(lines(count) + b"0\n0\n" * count, b"", 0)
    with cheap(5):
        assert read(t.tar(*[one] * 5)) == ([b""] * 5, [])


def test_c7_20_maps_of_many_pieces_are_read_in_time() -> None:
    count = 80_000
    pieces = b"".join(lines(2 * n, 1) for n in range(count))
    one = sparse_1_0(lines(count) + pieces, b"x" * count, 2 * count)
    with cheap(5):
        assert read(t.tar(*[one] * 5))[0] == [b"x\0" * count] * 5


def test_c7_20_a_map_in_a_record_is_read_in_time() -> None:
    one = sparse_0_1(b",".join([b"0"] * (MIB // 2 - 100)), b"", 0)
    with cheap(5):
        assert read(t.tar(*[one] * 5)) == ([b""] * 5, [])


def test_c7_20_more_pairs_of_records_than_other_headers_have_records_are_expanded() -> None:
    """Format 0.0 has two records for each piece: they are no sign of anything."""
    count = 1000
    data = sparse_0_0([(2 * n, 1) for n in range(count)], b"x" * count, 2 * count)
    assert read(t.tar(data)) == ([b"x\0" * count], [])


@pytest.mark.parametrize("digits", [507, 508, 509, 510, 511])
def test_c7_20_a_number_across_two_blocks_of_the_map_is_one_number(digits: int) -> None:
    """The first pairs are empty ones that put the last numbers anywhere about the border."""
    front = (digits - 4) // 4
    text = lines(front + 1) + b"0\n0\n" * front
    text += b"0" * (digits - len(text) - 1) + b"\n" if (digits - len(text)) > 19 else b""
    text += lines(100_000, 4)
    content = bytes(100_000) + b"abcd"
    assert read(t.tar(sparse_1_0(text, b"abcd", len(content)))) == ([content], [])


@pytest.mark.parametrize(
    "text",
    [b"x", b"\n", b"1\n0\n", b"1\n0\nx\n", b"1\n-1\n1\n", b"1\n\n0\n", b"1\n" + b"1" * 20 + b"\n0\n",
     b"9" * 19 + b"\n0\n0\n", b"9" * 20 + b"\n", b"1" * 3000, b"2\n" + b"0\n" * 3 + b"1" * 3000],
)  # fmt: skip
def test_c7_20_a_map_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(FormatError) as error:
        read(t.tar(sparse_1_0(text, b"", 0)))
    assert error.value.code == "entry.sparse"


def test_c7_20_what_fills_the_last_block_of_a_map_is_not_read() -> None:
    assert read(t.tar(sparse_1_0(lines(1, 0, 4) + b"\nx\n7\n", b"abcd", 4))) == ([b"abcd"], [])


def test_more_records_than_any_writer_has_use_for_are_refused() -> None:
    """SECURITY.md: ``record``."""
    bomb = t.pax(b"6 a=b\n" * (MIB // 6)) + t.file(b"f", b"x")
    with cheap(1), pytest.raises(PolicyError) as error:
        read(t.tar(bomb))
    assert error.value.code == "limit.record"


@pytest.mark.parametrize("kind", [b"x", b"g"])
def test_as_many_records_as_are_allowed_are_read_in_time(kind: bytes) -> None:
    one = t.pax(b"6 a=b\n" * 1024, kind=kind) + t.file(b"f", b"x")
    with cheap(2):
        contents, _ = read(t.tar(*[one] * (2 * MIB // len(one))))
    assert set(contents) == {b"x"}


def test_a_key_that_stands_many_times_is_one_warning() -> None:
    assert read(t.tar(t.pax(b"6 a=b\n" * 1000), t.file(b"f", b"x"))) == ([b"x"], ["tar.pax"])


def test_c8_09_a_file_with_a_thousand_attributes_is_read() -> None:
    records = [t.record(b"SCHILY.xattr.user.%d" % n, b"value") for n in range(1000)]
    reader = TarReader([t.tar(t.pax(*records), t.file(b"f", b"x"))])
    assert [len(entry.xattrs) for entry in reader] == [1000]
