"""The same compressed bytes on other processors: the libraries choose their code by what a processor can.

Emulated: one with AVX2 and one that ends at SSE 4.2, against the one that runs this (which may have AVX-512).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from oci_builder.wire.compress import BLOCK, Codec
from tests.golden.test_golden_layer import pattern

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from tests.golden.test_golden_processors import digests
print(json.dumps(digests()))
"""


def digests() -> list[str]:
    """Of blocks of several kinds, by both codecs and three levels."""
    with open(hashlib.__file__, "rb") as file:
        text = file.read() * 40
    kinds = [pattern(BLOCK, 1), b"hello world\n" * 80_000, bytes(BLOCK), text[:BLOCK], b"", b"x"]
    codecs = [Codec(name, level) for name in ("gzip", "zstd") for level in (1, 2, 3)]
    return [hashlib.sha256(codec.compress(data)).hexdigest() for codec in codecs for data in kinds]


@pytest.mark.parametrize("processor", ["Haswell", "Nehalem"])
def test_another_processor_makes_the_same_bytes(processor: str) -> None:
    emulator = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if emulator is None or os.uname().machine != "x86_64":
        pytest.skip("qemu-user is not installed")
    # The interpreter itself: an emulator does not start what a venv's link or a script names.
    command = [emulator, "-cpu", processor, os.path.realpath(sys.executable), "-c", PROGRAM, json.dumps(sys.path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout) == digests()
