"""The quick way through ordinary headers gives what the careful way gives."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from oci_builder.model.errors import OciBuilderError
from oci_builder.model.limits import Limits
from oci_builder.wire.tar import END_OF_ARCHIVE, Kind, TarEntry, TarReader, encode_header
from oci_builder.wire.tar.header import byte_sum

LIMITS = Limits(depth=4, component=40, entry_size=1 << 20)
pieces = st.sampled_from([b"a", b".", b"..", b"/", b"b.py", b"..x", b"\0", b"\\", b"\xe9", b"x" * 41, b"d" * 70])


def outcome(data: bytes, quick: bool) -> object:
    with patch("oci_builder.wire.tar.reader.plain_entry", **({} if quick else {"return_value": None})) as plain:
        if quick:
            from oci_builder.wire.tar.plain import plain_entry

            plain.side_effect = plain_entry
        try:
            return list(TarReader([data], limits=LIMITS, strict=False))
        except OciBuilderError as error:
            return error.code


@settings(max_examples=600, deadline=None)
@given(
    st.lists(pieces, min_size=1, max_size=6).map(b"".join),
    st.sampled_from(list(Kind)),
    st.lists(pieces, max_size=3).map(b"".join),
    st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=2),
)
def test_quick_equals_careful(name: bytes, kind: Kind, link: bytes, flips: list[tuple[int, int]]) -> None:
    block = bytearray(encode_header(TarEntry(name=name[:90], kind=kind, link=link[:90], uname=b"u"))[-512:])
    for at, value in flips:
        block[at] = value
    if not flips or flips[0][1] % 4:  # mostly with a right checksum, so that the fields themselves are reached
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    data = bytes(block) + END_OF_ARCHIVE
    assert outcome(data, True) == outcome(data, False)


@given(st.binary(max_size=256))
def test_byte_sum(data: bytes) -> None:
    assert byte_sum(data) == sum(data)
