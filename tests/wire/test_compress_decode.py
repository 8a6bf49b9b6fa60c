"""The strict decoders: what they refuse (C9), and that the parallel way is the serial way."""

from __future__ import annotations

import gzip
import random
import resource
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import zstandard

from oci_builder.model.errors import OciBuilderError
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.wire.compress import BLOCK, Codec, Options, compress_bytes, decode_chunks, encode_layer, sniff
from oci_builder.wire.compress.gzipframe import encode_member
from oci_builder.wire.compress.pull import Pull
from oci_builder.wire.compress.within import Budget, Units, decode_units

TEXT = b"".join(b"line %d of a text\n" % i for i in range(9000))
LIMITS = replace(DEFAULT_LIMITS, layer_size=64 << 20, ratio_floor=8 << 20)


def cut(data: bytes, step: int) -> Iterator[bytes]:
    yield from (data[at : at + step] for at in range(0, len(data), step))


def outcome(
    blob: bytes, kind: str, threads: int = 1, step: int = 1 << 20, limits: Limits = LIMITS, strict: bool = False
) -> tuple[bytes, str]:
    """The data that came out, and the error's code ("" for none)."""
    data = bytearray()
    try:
        for chunk in decode_chunks(cut(blob, step), kind, Options(limits, "blob", threads, strict)):  # type: ignore[arg-type]
            assert len(chunk) <= 4 << 20
            data += chunk
    except OciBuilderError as error:
        return bytes(data), error.code
    return bytes(data), ""


def both(blob: bytes, kind: str, **options: object) -> str:
    serial, parallel = outcome(blob, kind, 1, **options), outcome(blob, kind, 4, **options)  # type: ignore[arg-type]
    assert serial[1] == parallel[1]
    if serial[1].startswith("limit."):  # how much came out before a limit depends on the size of the pieces
        assert serial[0].startswith(parallel[0]) or parallel[0].startswith(serial[0])
    else:
        assert serial[0] == parallel[0]
    return serial[1]


@pytest.fixture(scope="module", params=["gzip", "zstd"])
def ours(request: pytest.FixtureRequest) -> tuple[str, bytes, bytes]:
    """A layer of ours with members of many sizes: (compression, blob, data)."""
    rnd = random.Random(3)
    blocks = [rnd.choice([TEXT[:n], rnd.randbytes(n)]) for n in (0, 1, 512, 70_000, 3000, 100_000, 9, 1024)]
    out: list[bytes] = []
    encode_layer(blocks, out.append, Codec(request.param), 1)
    return request.param, b"".join(out), b"".join(blocks)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
def test_round_trip_with_any_read_size(ours: tuple[str, bytes, bytes], threads: int, step: int) -> None:
    kind, blob, data = ours
    assert outcome(blob, kind, threads, step) == (data, "")


def test_any_mutation_ends_the_same_way_in_parallel_and_serially(ours: tuple[str, bytes, bytes]) -> None:
    kind, blob, data = ours
    rnd = random.Random(5)
    silent = 0
    for _ in range(400):
        bad = bytearray(blob)
        at = rnd.randrange(len(bad))
        match rnd.randrange(4):
            case 0:
                bad[at] ^= 1 << rnd.randrange(8)
            case 1:
                del bad[at : at + rnd.randrange(1, 40)]
            case 2:
                bad[at:at] = rnd.randbytes(rnd.randrange(1, 40))
            case 3:
                del bad[at:]
        serial = outcome(bytes(bad), kind, 1)
        assert serial == outcome(bytes(bad), kind, 4, rnd.choice([100, 5000, 1 << 20]))
        silent += serial == (data, "")
    # gzip leaves a few header bytes (mtime, OS, our length field) out of its checks; a digest covers those.
    assert silent < 10


def test_a_false_length_field_changes_nothing() -> None:
    """A member hidden behind another inside one declared length must not vanish in the parallel way."""
    member = Codec().compress(TEXT)
    for declared in (len(member) * 2, 28, 29, len(member) - 1, len(member) + 1, 0xFFFFFFFF):
        lying = member[:16] + struct.pack("<I", declared) + member[20:]
        blob = lying + member + member
        assert outcome(blob, "gzip", 4) == outcome(blob, "gzip", 1) == (TEXT * 3, "")


def test_a_member_that_says_less_than_it_holds_is_read_the_bounded_way() -> None:
    big = bytes(40 << 20)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    member = encode_member(packer.compress(big) + packer.flush(), zlib.crc32(big), 5)
    assert both(member, "gzip", limits=replace(LIMITS, ratio_floor=1 << 30)) == "gzip.size"


@pytest.mark.parametrize("cut_at", [0, 1, 2, 3, 9, 10, 15, 19, 20, 21, -9, -8, -4, -1])
def test_c9_08_gzip_truncated_anywhere(cut_at: int) -> None:
    assert both(Codec().compress(TEXT)[:cut_at], "gzip") == "gzip.truncated"


@pytest.mark.parametrize("cut_at", [0, 1, 3, 4, 5, 9, 40, -5, -4, -1])
def test_c9_08_zstd_truncated_anywhere(cut_at: int) -> None:
    assert both(Codec("zstd").compress(TEXT)[:cut_at], "zstd") == "zstd.truncated"


def test_c9_03_trailer() -> None:
    member = Codec().compress(TEXT)
    for at, code in ((-8, "gzip.crc"), (-5, "gzip.crc"), (-4, "gzip.size"), (-1, "gzip.size")):
        bad = bytearray(member)
        bad[at] ^= 1
        assert both(bytes(bad), "gzip") == code


def test_c9_03_a_flipped_bit_in_a_raw_zstd_block() -> None:
    frame = bytearray(Codec("zstd").compress(random.Random(2).randbytes(5000)))
    frame[2000] ^= 1
    assert both(bytes(frame), "zstd") == "zstd.data"


@pytest.mark.parametrize(
    "junk", [b"junk", b"\0\0\0x", b"\x1f", b"\x1f\x8b", b"\x1f\x00", bytes(300) + b"\x1f\x8b\x08\x00"]
)
def test_c9_05_junk_after_the_last_member(junk: bytes) -> None:
    wanted = "gzip.truncated" if junk[:2] in (b"\x1f", b"\x1f\x8b") else "gzip.trailing"
    assert both(Codec().compress(TEXT) + junk, "gzip") == wanted


def test_c9_05_nul_padding_is_a_warning_unless_strict() -> None:
    blob, said = Codec().compress(TEXT) + bytes(70_000), []
    options = Options(LIMITS, "blob", 1, False, lambda code, message: said.append(code))
    assert b"".join(decode_chunks([blob], "gzip", options)) == TEXT
    assert said == ["gzip.trailing"]
    assert both(blob, "gzip", strict=True) == "gzip.trailing"


@pytest.mark.parametrize("junk", [b"junk", bytes(1000), b"\x28\xb5\x2f\x00"])
def test_c9_05_junk_after_the_last_frame(junk: bytes) -> None:
    assert both(Codec("zstd").compress(TEXT) + junk, "zstd") == "zstd.trailing"


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"\x1f\x8b\x07\0" + bytes(20), "gzip.header"),
        (b"\x1f\x8b\x08\x20" + bytes(20), "gzip.header"),
        (b"\x1f\x8b\x08\x80" + bytes(20), "gzip.header"),
        (b"PK\x03\x04" + bytes(20), "gzip.header"),
        (b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 200_000, "gzip.header"),
        (b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 512 + b"\0", "gzip.header"),
        (b"\x1f\x8b\x08\x18" + bytes(6) + b"n\0" + b"c" * 512 + b"\0", "gzip.header"),
        (b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 511, "gzip.truncated"),
        (b"\x1f\x8b\x08\x02" + bytes(6) + b"\x01\x02" + bytes(20), "gzip.header"),
        (b"\x1f\x8b\x08\x00" + bytes(6) + b"\xff" * 20, "gzip.data"),
    ],
)
def test_gzip_headers_that_no_writer_makes(head: bytes, code: str) -> None:
    assert both(head, "gzip") == code


def test_foreign_gzip_with_every_header_field_is_read() -> None:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    raw = packer.compress(TEXT) + packer.flush()
    head = b"\x1f\x8b\x08\x1f" + b"\x01\x02\x03\x04\x02\x03" + b"\x06\0AB\x02\0xy" + b"n" * 511 + b"\0comment\0"
    head += struct.pack("<H", zlib.crc32(head) & 0xFFFF)
    blob = head + raw + struct.pack("<II", zlib.crc32(TEXT), len(TEXT))
    assert outcome(blob + gzip.compress(TEXT), "gzip") == (TEXT * 2, "")


def test_c9_07_zstd_window_dictionary_and_skippable_frames() -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=28, compression_level=3)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    frame = packer.compress(TEXT) + packer.flush()
    assert both(frame, "zstd") == "zstd.window"
    samples = [TEXT[n * 300 : n * 300 + 400] for n in range(400)]
    trained = zstandard.train_dictionary(4000, samples)
    assert both(zstandard.ZstdCompressor(dict_data=trained).compress(TEXT), "zstd") == "zstd.dictionary"
    skip = b"\x5a\x2a\x4d\x18\x05\0\0\0junk!"
    blob = skip + Codec("zstd").compress(TEXT) + skip
    assert outcome(blob, "zstd", 4) == outcome(blob, "zstd", 1, 3) == (TEXT, "")
    assert both(blob[:-1], "zstd") == "zstd.truncated"


def test_foreign_zstd_without_size_or_checksum_is_read() -> None:
    packer = zstandard.ZstdCompressor(level=1, write_checksum=False).compressobj()
    blob = packer.compress(TEXT * 40) + packer.flush()
    assert outcome(blob, "zstd", 4) == outcome(blob, "zstd", 1, 999) == (TEXT * 40, "")


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@pytest.mark.parametrize("members", [1, 60])
def test_c9_01_bombs_stop_at_the_ratio(kind: str, members: int) -> None:
    zeros = bytes((60 << 20) // members)
    blob = (gzip.compress(zeros, 9) if kind == "gzip" else zstandard.compress(zeros)) * members
    data, code = outcome(blob, kind)
    assert code == "limit.ratio" and len(data) <= LIMITS.ratio_floor + (8 << 20)


def test_c9_01_our_own_members_are_no_way_around_the_ratio() -> None:
    assert both(compress_bytes(bytes(30 << 20)), "gzip") == "limit.ratio"
    assert both(compress_bytes(bytes(30 << 20), Codec("zstd")), "zstd") == "limit.ratio"


@pytest.mark.parametrize("kind", ["gzip", "zstd", "identity"])
def test_c9_01_the_layer_limit_holds_at_all_times(kind: str) -> None:
    data = random.Random(1).randbytes(3 << 20)
    blob = compress_bytes(data, Codec(kind))  # type: ignore[arg-type]
    assert both(blob, kind, limits=replace(LIMITS, layer_size=len(data) - 1)) == "limit.layer"
    assert both(blob, kind, limits=replace(LIMITS, layer_size=len(data))) == ""


def test_c9_01_a_bomb_of_zstd_run_length_blocks_needs_little_memory() -> None:
    """4 bytes of input are 128 KiB of output: 4 MB say 128 GiB."""
    block = struct.pack("<I", (128 << 10) << 3 | 1 << 1)[:3] + b"\0"
    frame = b"\x28\xb5\x2f\xfd" + b"\x00\x60" + block * 1_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = both(frame, "zstd")
    assert code in ("limit.ratio", "limit.layer")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_stream_of_tiny_members_is_read_in_good_time() -> None:
    blob = gzip.compress(b"x", 9) * 40_000
    assert outcome(blob, "gzip") == (b"x" * 40_000, "")


def test_c3_14_sniffing_looks_at_bytes_only() -> None:
    assert sniff(gzip.compress(b"")) == sniff(b"\x1f\x8b") == "gzip"
    assert sniff(Codec("zstd").compress(b"")) == sniff(b"\x50\x2a\x4d\x18") == "zstd"
    assert sniff(b"") == sniff(b"\x1f") == sniff(bytes(512)) == sniff(b"\x28\xb5\x2f") == "identity"


def test_blocks_are_one_mebibyte() -> None:
    assert BLOCK == 1 << 20


@pytest.mark.parametrize("threads", [1, 4])
def test_members_are_reported_with_their_place_and_whether_they_are_ours(threads: int) -> None:
    first, foreign = Codec().compress(TEXT), gzip.compress(b"abc")
    touched = bytearray(first)
    touched[4] ^= 1  # mtime: nothing inside gzip protects it
    seen: list[tuple[int, int, bool]] = []
    options = Options(LIMITS, "blob", threads, on_member=lambda m: seen.append((m.offset, m.data_offset, m.ours)))
    blob = first + bytes(touched) + foreign + first
    assert len(b"".join(decode_chunks([blob], "gzip", options))) == len(TEXT) * 3 + 3
    size, text = len(first), len(TEXT)
    assert seen == [
        (0, 0, True),
        (size, text, False),
        (2 * size, 2 * text, False),
        (2 * size + len(foreign), 2 * text + 3, True),
    ]


def test_a_generator_left_behind_is_finished_without_waiting() -> None:
    """The garbage collector may finish it inside a thread that is starting: to join a pool there never ends."""
    release = threading.Event()
    blob = Codec().compress(TEXT) * 20

    def slow(packed: memoryview) -> bytes:
        release.wait(300)
        return b"x"

    pull = Pull([Codec().compress(b"first") + blob])
    units = Units(
        lambda p, _b: len(p.peek(100)), lambda m: slow(m) if pull.offset > 300 else b"1", lambda _m: (False, False)
    )
    decoded = decode_units(pull, Budget(LIMITS, ""), 2, units)
    next(decoded)
    started = time.monotonic()
    decoded.close()
    release.set()
    assert time.monotonic() - started < 250
