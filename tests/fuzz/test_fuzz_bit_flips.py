"""1,000 single-bit flips over both archives of a built image: verify finds every one, padding and headers included.

An archive alone cannot be told from another honest one everywhere (a word in index.json that no digest covers); the two
together can, because each proves the other. Of the portable archive, ``ensure_runtime.sh`` compares the SHA-256.
"""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path

import pytest

from oci_builder.verify import VerifyOptions, verify_archives
from oci_builder.wire.compress import Codec
from oci_builder.wire.compress.gzipframe import encode_stored, is_our_member, is_stored
from tests.conftest import Built, build_small
from tests.lab.archives import Lab, files, write

FLIPS = 500


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Small tiers on a base whose layer another gzip made, with a time in its header."""
    folder = tmp_path_factory.mktemp("flips")
    layer = files(**{"etc/os-release": b"NAME=lab\n", "bin/x": bytes(range(256)) * 8})
    lab = Lab(layers=[layer], edit_layer=lambda _n, _b: gzip.compress(layer, 6, mtime=1_700_000_000))
    write(folder / "base.tar", lab.oci())
    return build_small(folder, base={"oci": str(folder / "base.tar")})


def flipped(built: Built, which: str, at: int, bit: int, folder: Path) -> bool:
    """Whether verify finds this flip."""
    source = built.oci if which == "oci" else built.docker
    bad = folder / source.name
    if not bad.exists():
        bad.write_bytes(source.read_bytes())
    fd = os.open(bad, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte ^ 1 << bit]), at)
        pair = [bad, built.docker] if which == "oci" else [built.oci, bad]
        report = verify_archives(pair, VerifyOptions("strict", threads=1))
        os.pwrite(fd, bytes([byte]), at)
        return not report.ok
    finally:
        os.close(fd)


def missed(built: Built, which: str, count: int, seed: object, folder: Path) -> list[tuple[int, int]]:
    rnd, size = random.Random(f"{which} {seed}"), (built.oci if which == "oci" else built.docker).stat().st_size
    spots = [(rnd.randrange(size), rnd.randrange(8)) for _ in range(count)]
    return [spot for spot in spots if not flipped(built, which, *spot, folder)]


@pytest.mark.parametrize("which", ["oci", "docker"])
def test_random_flips_are_all_found(built: Built, which: str, tmp_path: Path) -> None:
    assert verify_archives([built.oci, built.docker], VerifyOptions("strict")).findings == ()
    assert missed(built, which, FLIPS, 1, tmp_path) == []


@pytest.mark.soak
@pytest.mark.parametrize("which", ["oci", "docker"])
def test_every_byte_is_covered(built: Built, which: str, tmp_path: Path) -> None:
    """Not some: each byte in turn, one bit of it."""
    rnd, size = random.Random(which), (built.oci if which == "oci" else built.docker).stat().st_size
    spots = [(at, rnd.randrange(8)) for at in range(size)]
    assert [spot for spot in spots if not flipped(built, which, *spot, tmp_path)] == []


def test_what_no_digest_covers_is_stored(built: Built) -> None:
    """Deflate leaves bits to chance, stored blocks none: between the layers of a Docker archive all is stored."""
    outside = []
    data, at = built.docker.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at + 16 : at + 20], "little")
        if data[at + 12 : at + 16] != b"OB\x04\x00":  # the base's layer, of another gzip, has no length
            size = data.index(b"\x1f\x8b\x08\x04", at + 1) - at
        elif is_stored(data[at : at + size]):
            outside.append(gzip.decompress(data[at : at + size]))
        at += size
    headers = b"".join(outside)
    assert all(name in headers for name in (b"index.json", b"manifest.json", b"oci-layout", b"diff_ids"))
    assert headers.endswith(bytes(1024))


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 200_000])
def test_the_stored_form(size: int) -> None:
    member = encode_stored(bytes(size))
    assert gzip.decompress(member) == bytes(size)
    assert is_stored(member) and is_our_member(member)
    assert not is_stored(Codec().compress(bytes(size + 5000)))
    for at in range(20, len(member) - 8, 65540):
        for bit in range(8):
            bad = bytearray(member)
            bad[at] ^= 1 << bit
            assert not is_stored(bytes(bad)), (at, bit)
