"""Our compressed bytes: the same everywhere, and ordinary gzip and zstd to everybody else."""

from __future__ import annotations

import gzip
import hashlib
import random
import shutil
import subprocess
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from isal import isal_zlib

from oci_builder.model.errors import FormatError
from oci_builder.wire.compress import BLOCK, Codec, EncodedLayer, compress_bytes, encode_layer, gzip_members
from oci_builder.wire.source import FileRange

CODECS = [Codec(), *(Codec("gzip", n) for n in (0, 1, 2, 4, 9)), Codec("zstd"), Codec("zstd", 1), Codec("identity")]


def payload() -> list[bytes]:
    """Blocks of every kind: text, noise, zeros, short, empty, and the end marker."""
    rnd = random.Random(7)
    text = b"".join(b"def f%d(x): return x + %d\n" % (i, i * 7) for i in range(40_000))[:BLOCK]
    noise = rnd.randbytes(BLOCK)
    mixed = b"".join(text[i : i + 4096] + noise[i : i + 1024] for i in range(0, 800_000, 4096))
    return [text, noise, bytes(BLOCK), mixed, b"", b"x", rnd.randbytes(700) + text[:70_000], bytes(1024)]


def encode(codec: Codec, threads: int = 2) -> tuple[EncodedLayer, bytes]:
    out: list[bytes] = []
    layer = encode_layer(payload(), out.append, codec, threads)
    return layer, b"".join(out)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_c9_09_bytes_do_not_depend_on_the_thread_count(codec: Codec) -> None:
    assert encode(codec, 1) == encode(codec, 2) == encode(codec, 8)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_result_names_what_was_written(codec: Codec) -> None:
    layer, blob = encode(codec)
    tar = b"".join(payload())
    assert (layer.size, layer.tar_size) == (len(blob), len(tar))
    assert layer.digest.hex == hashlib.sha256(blob).hexdigest()
    assert layer.diff_id.hex == hashlib.sha256(tar).hexdigest()


def test_members_cover_tar_and_blob_without_gaps() -> None:
    layer, blob = encode(Codec())
    tar, at, tar_at = b"".join(payload()), 0, 0
    for member in layer.members:
        assert (member.blob_offset, member.tar_offset) == (at, tar_at)
        at, tar_at = at + member.blob_size, tar_at + member.tar_size
        assert gzip.decompress(blob[member.blob_offset : at]) == tar[member.tar_offset : tar_at]
    assert (at, tar_at) == (len(blob), len(tar))


def test_the_end_marker_is_a_member_of_its_own() -> None:
    layer, blob = encode(Codec())
    assert gzip.decompress(blob[layer.members[-1].blob_offset :]) == bytes(1024)


def test_the_walk_over_members_finds_what_the_writer_recorded(tmp_path: Path) -> None:
    layer, blob = encode(Codec())
    (tmp_path / "blob").write_bytes(b"before" + blob + b"after")
    with (tmp_path / "blob").open("rb") as file:
        assert tuple(gzip_members(FileRange(file.fileno(), 6, len(blob)), "blob")) == layer.members
        with pytest.raises(FormatError) as caught:
            list(gzip_members(FileRange(file.fileno(), 6, len(blob) - 1), "blob"))
    assert caught.value.code == "gzip.truncated"


def test_b204_b205_every_gzip_header_is_constant_but_for_its_length() -> None:
    layer, blob = encode(Codec("gzip", 2))
    for member in layer.members:
        head = blob[member.blob_offset : member.blob_offset + 20]
        assert head[:16] == bytes.fromhex("1f8b0804 00000000 00ff 0800 4f42 0400".replace(" ", ""))
        assert int.from_bytes(head[16:], "little") == member.blob_size


def test_b205_adaptive_bytes_are_pinned() -> None:
    """Changes only with a library's version, and then the golden digest says so before a user's digest does."""
    blob = compress_bytes(b"".join(b"%d\n" % i for i in range(30_000)))
    assert zlib.decompress(blob, 31) == b"".join(b"%d\n" % i for i in range(30_000))
    assert hashlib.sha256(blob).hexdigest() == GOLDEN


GOLDEN = "e809494ecb3bd229ac5f6b2c0922719eb128c954f6eaacbe2fd6baf5cfb55115"


@pytest.mark.parametrize("program", [["gzip", "-dc"], ["pigz", "-dc"], ["python3", "-c", "PY"]], ids=lambda p: p[0])
def test_other_gzip_programs_read_our_members(program: list[str]) -> None:
    if program[-1] == "PY":
        program = [*program[:-1], "import sys,gzip;sys.stdout.buffer.write(gzip.decompress(sys.stdin.buffer.read()))"]
    if not shutil.which(program[0]):
        pytest.skip(f"{program[0]} is not installed")
    _, blob = encode(Codec())
    assert subprocess.run(program, input=blob, capture_output=True, check=True).stdout == b"".join(payload())


def test_zlib_and_isal_read_our_members() -> None:
    layer, blob = encode(Codec())
    for member in layer.members:
        piece = blob[member.blob_offset : member.blob_offset + member.blob_size]
        assert zlib.decompress(piece, 31) == isal_zlib.decompress(piece, 31)


def test_the_zstd_program_reads_our_frames() -> None:
    if not shutil.which("zstd"):
        pytest.skip("zstd is not installed")
    _, blob = encode(Codec("zstd"))
    assert subprocess.run(["zstd", "-dc"], input=blob, capture_output=True, check=True).stdout == b"".join(payload())


def test_b206_the_codec_is_recorded_with_its_libraries() -> None:
    assert Codec().describe().keys() == {"codec", "level", "libraries", "block"}
    assert Codec("zstd").describe()["level"] == 3


@pytest.mark.parametrize(("name", "level"), [("gzip", 10), ("zstd", 0), ("zstd", 23), ("lzma", 1), ("identity", 1)])
def test_unknown_codecs_and_levels_are_refused(name: str, level: int) -> None:
    with pytest.raises(ValueError):
        Codec(name, level)  # type: ignore[arg-type]


def test_errors_of_the_source_and_of_the_sink_come_through() -> None:
    def source() -> Iterator[bytes]:
        yield bytes(BLOCK)
        raise LookupError

    def sink(_data: bytes) -> None:
        raise OSError(28, "no space")

    with pytest.raises(LookupError):
        encode_layer(source(), lambda _: None, Codec(), 2)
    with pytest.raises(OSError):
        encode_layer(payload(), sink, Codec(), 2)


def test_memory_does_not_grow_with_the_layer() -> None:
    """Of 64 blocks a few are on their way at a time, however the threads take turns."""
    block = random.Random(1).randbytes(BLOCK)
    tracemalloc.start()
    encode_layer((bytes(bytearray(block)) for _ in range(64)), lambda _: None, Codec("gzip", 1), 2)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 24 * BLOCK
