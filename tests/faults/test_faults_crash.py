"""``kill -9`` at random moments: nothing unfinished is ever visible, and the next run makes the same bytes.

Two hundred kills in all, over four verbs; ``OCI_BUILDER_KILLS`` asks for another number of each.
"""

from __future__ import annotations

import os
import random
from statistics import median

import pytest

from tests.faults.lab import Zygote
from tests.faults.work import VERBS, Bench

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("OCI_BUILDER_KILLS", "50"))
# Kills in a row on the same folders, before a run is left alone: what one left, the next may stumble over.
IN_A_ROW = 4


def killed(bench: Bench, zygote: Zygote, verb: str, kills: int, seed: int) -> int:
    """Kill this many runs; how many of them were still running."""
    rnd = random.Random(f"{verb} {seed}")
    model = bench.work(verb)
    model.finish(zygote)
    seconds = median(_fresh(bench, zygote, verb, model.good) for _ in range(3))
    hit = 0
    for begin in range(0, kills, IN_A_ROW):
        work = bench.work(verb)
        work.good = model.good
        for _ in range(min(IN_A_ROW, kills - begin)):
            ran = zygote.run(*work.argv, kill_after=rnd.uniform(0, seconds))
            assert ran.status in (-9, 0), ran.text
            hit += ran.status == -9
            # A machine that is quicker now than it was when the time was taken would end every run before its kill.
            seconds *= 1.03 if ran.status else 0.9
            work.never_partial()
            work.unmake_whole()
        work.finish(zygote)
    return hit


def _fresh(bench: Bench, zygote: Zygote, verb: str, good: object) -> float:
    work = bench.work(verb)
    work.good = good
    return work.finish(zygote).seconds


@pytest.mark.parametrize("verb", VERBS)
def test_kill_9_at_random_moments(bench: Bench, zygote: Zygote, verb: str) -> None:
    assert killed(bench, zygote, verb, KILLS, 1) > KILLS // 3


@pytest.mark.soak
@pytest.mark.parametrize("verb", VERBS)
def test_kill_9_again_and_again(bench: Bench, zygote: Zygote, verb: str) -> None:
    assert killed(bench, zygote, verb, 400, random.randrange(10**9)) > 100
