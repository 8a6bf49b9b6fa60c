"""C9 as layers of an archive: what compression can hide."""

from __future__ import annotations

import gzip
from collections.abc import Callable

import zstandard

from tests.lab.archives import Lab, files

Case = tuple[str, str, Lab, str | None]
BLOB = bytes
LAYERS = [files(a=bytes(range(256)) * 40)]


def case(change: Callable[[bytes], bytes], pack: str = "gzip") -> Lab:
    return Lab(layers=LAYERS, pack=pack, edit_layer=lambda _n, blob: change(blob))


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda blob: blob[:at] + bytes([blob[at] ^ 1]) + (blob[at + 1 :] if at != -1 else b"")


MORE = files(hidden=b"hidden")
SKIP = b"\x50\x2a\x4d\x18\x04\0\0\0skip"
CASES: list[Case] = [
    ("C9-03a", "bad CRC", case(flip(-8)), "gzip.crc"),
    ("C9-03b", "bad length", case(flip(-1)), "gzip.size"),
    ("C9-03c", "flipped bit in a raw zstd block", Lab(
        layers=LAYERS, pack="zstd", edit_layer=lambda _n, _b: flip(100)(
            zstandard.ZstdCompressor(level=-100, write_checksum=True).compress(LAYERS[0]))), "zstd.data"),
    ("C9-04a", "a second gzip member with more tar", case(lambda b: b + gzip.compress(MORE)), "layer.trailing"),
    ("C9-04b", "a second zstd frame with more tar", case(
        lambda b: b + zstandard.compress(MORE), "zstd"), "layer.trailing"),
    ("C9-04c", "more tar in the same member", Lab(
        layers=[LAYERS[0] + MORE], edit_layer=lambda _n, b: b), "tar.trailing"),
    ("C9-04d", "a tar in two members is legal", Lab(layers=LAYERS, edit_layer=lambda _n, _b: gzip.compress(
        LAYERS[0][:700]) + gzip.compress(LAYERS[0][700:])), None),
    ("C9-05a", "trailing NULs", case(lambda b: b + bytes(100)), None),
    ("C9-05b", "trailing junk", case(lambda b: b + b"junk"), "gzip.trailing"),
    ("C9-05c", "trailing junk after a frame", case(lambda b: b + b"junk", "zstd"), "zstd.trailing"),
    ("C9-07", "skippable frame first", case(lambda b: SKIP + b, "zstd"), None),
    ("C9-08a", "magic only", case(lambda b: b[:2]), "gzip.truncated"),
    ("C9-08b", "cut in the middle", case(lambda b: b[: len(b) // 2]), "gzip.truncated"),
    ("C9-08c", "zstd cut in the middle", case(lambda b: b[: len(b) // 2], "zstd"), "zstd.truncated"),
    ("C9-08d", "an empty blob", case(lambda _b: b"", "identity"), "tar.truncated"),
]  # fmt: skip
