"""What fuzzing starts from: the hostile catalogue's own bytes and what our writers make, and seeded changes to them."""

from __future__ import annotations

import functools
import gzip
import random
import zlib
from collections.abc import Iterator

import zstandard

from oci_builder.wire.compress import Codec, encode_layer
from tests.hostile.cases import LABS, TARS

_SPEC = (
    b'{"name":"lab/x","tag":"t","base":{"registry":"docker.io/a/b:c","digest":"sha256:' + b"1" * 64 + b'"},'
    b'"prefix":"/opt/rt","tiers":{"base":{"path":"/a"}},"limits":{"layers":5},"env":["A=b"]}'
)
_TOKENS = (
    b"\0", b"\xff" * 8, b"-1", b"..", b"/", b".wh.", b'"', b"{", b"[", b"1e999", b"NaN", b"\\ud800", b"\x1f\x8b\x08\x04",
    b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18\xff\xff\xff\x7f", b"ustar\x0000", b"\x80" + b"\xff" * 11, b"99999999999",
    b"GNU.sparse.major=1\n", b"OB\x04\0", b"\x80\0\0\0\0\0\0\1",
)  # fmt: skip


def _ours(pack: str) -> bytes:
    blocks = [bytes([n]) * 3000 + b"text\n" * 500 for n in range(6)]
    out: list[bytes] = []
    encode_layer(blocks, out.append, Codec(pack, 1), 1)
    return b"".join(out)


@functools.cache
def seeds(target: str) -> tuple[bytes, ...]:
    """Inputs to begin with, small ones only."""
    if target == "tar":
        found = [layer for case in TARS if case.lab for layer in case.lab.layers]
    elif target == "documents":
        members = [case.members() for case in LABS]
        found = [_SPEC, *(data for m in members for data in m.values() if data[:1] in b"{[")]
    elif target == "gzip":
        plain = b"hello\n" * 3000
        found = [_ours("gzip"), gzip.compress(plain, mtime=0), gzip.compress(b"") + gzip.compress(plain), _far()]
        found += _blobs("gzip")
    else:
        plain = random.Random(1).randbytes(5000) + b"x" * 20000
        checked = zstandard.ZstdCompressor(write_checksum=True)
        found = [_ours("zstd"), checked.compress(plain), checked.compress(b"a") + checked.compress(plain), *_blobs("zstd")]
    return tuple(dict.fromkeys(data for data in found if len(data) <= 1 << 16))


def _far() -> bytes:
    """A member whose end copies from before its beginning; how much comes before the error depends on the pieces."""
    noise = zlib.compressobj(9, zlib.DEFLATED, -15)
    good = noise.compress(random.Random(2).randbytes(2000)) + noise.flush(zlib.Z_SYNC_FLUSH)
    # The last block, with fixed codes: length 3 at distance 24577, then the end (RFC 1951, 3.2.6).
    bits = "1" + "10" + "0000001" + "11101" + "0" * 13 + "0000000"
    wrong = int(bits[::-1], 2).to_bytes(5, "little")
    return gzip.compress(b"", mtime=0)[:10] + good + wrong + bytes(8)


def _blobs(pack: str) -> list[bytes]:
    labs = [case.lab for case in LABS if case.lab and case.lab.pack == pack and case.id.startswith("C9")]
    return [blob for lab in labs for _, blob in lab.blobs()[0]]


def mutations(target: str, seed: int) -> Iterator[bytes]:
    """Endless changes of the corpus: bits, bytes, tokens, cuts, doublings, splices; one to four at once."""
    rnd, base = random.Random(f"{target} {seed}"), seeds(target)
    while True:
        data = bytearray(rnd.choice(base))
        for _ in range(rnd.choice((1, 1, 1, 2, 4))):
            data = _change(rnd, data, base)
        if target == "tar" and rnd.random() < 0.8:
            _right_checksums(data)
        yield bytes(data[: 1 << 17])


def _right_checksums(data: bytearray) -> None:
    """Give every header its checksum, so that a change is not found by that alone."""
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar" or data[at + 154 : at + 156] == b"\0 ":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])


def _change(rnd: random.Random, data: bytearray, base: tuple[bytes, ...]) -> bytearray:
    at = rnd.randrange(len(data) + 1)
    match rnd.randrange(8):
        case 0 | 1 if data:
            data[at % len(data)] ^= 1 << rnd.randrange(8)
        case 2 if data:
            data[at % len(data)] = rnd.choice((0, 0x2D, 0x30, 0x37, 0x7F, 0x80, 0xFF))
        case 3:
            token = rnd.choice(_TOKENS)
            data[at : at + rnd.choice((0, len(token)))] = token
        case 4:
            del data[at : at + rnd.choice((1, 7, 512, 1024))]
        case 5:
            data[at:at] = data[at : at + rnd.choice((1, 8, 512, 1536))]
        case 6:
            del data[at:]
        case _:
            other = rnd.choice(base)
            cut = rnd.randrange(len(other) + 1) // 512 * 512 if rnd.random() < 0.5 else rnd.randrange(len(other) + 1)
            data[at // 512 * 512 if rnd.random() < 0.5 else at :] = other[cut:]
    return data
