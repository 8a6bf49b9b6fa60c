"""C12-12: seeded mutation of the hostile corpus; only our own errors escape, in time and in memory.

``OCI_BUILDER_SOAK=SECONDS`` spends that long on each target, from a new seed; the seed and the input of a failure are
in its message.
"""

from __future__ import annotations

import os
import time
from itertools import count, islice

import pytest

from tests.fuzz.corpus import mutations, seeds
from tests.fuzz.targets import TARGETS
from tests.lab.oracle import bounded, slowness, work

# About five seconds each on one core.
ROUNDS = {"tar": 12_000, "gzip": 8000, "zstd": 8000, "documents": 6000}


def once(target: str, data: bytes, note: str) -> None:
    start = work()
    try:
        TARGETS[target](data)
    except Exception as error:
        raise AssertionError(f"{target}, {note}: {error!r} from {data[:4000].hex()}") from error
    took = work() - start
    assert took < 5 or took < 5 * slowness(), f"{target}, {note}: slow input {data[:4000].hex()}"


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_itself(target: str) -> None:
    assert len(seeds(target)) > 10
    with bounded(30, 128):
        for number, data in enumerate(seeds(target)):
            once(target, data, f"seed {number}")


@pytest.mark.parametrize("target", TARGETS)
def test_mutations(target: str) -> None:
    with bounded(60, 128):
        for number, data in enumerate(islice(mutations(target, 1), ROUNDS[target])):
            once(target, data, f"round {number} of seed 1")


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS)
def test_mutations_for_long(target: str) -> None:
    seed = int(os.environ.get("OCI_BUILDER_SEED", time.time_ns() % 10**9))
    until = time.monotonic() + float(os.environ.get("OCI_BUILDER_SOAK", "60"))
    for number, data in zip(count(), mutations(target, seed), strict=False):
        once(target, data, f"round {number} of OCI_BUILDER_SEED={seed}")
        if time.monotonic() > until:
            break
