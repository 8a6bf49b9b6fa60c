"""Calls that fail: EIO, a full disk, a read-only disk, at the first, the last and other calls of each kind.

A run ends with a code that says what happened (or did without the call), shows no traceback and nothing unfinished, and
the next run makes the same bytes.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from tests.faults.lab import Ran, Zygote
from tests.faults.work import VERBS, Bench, Work

pytestmark = pytest.mark.slow

CODES = {errno.EIO: "io.error", errno.ENOSPC: "io.space", errno.EROFS: "io.readonly"}
# Kind of call and error; what is read lies elsewhere than what is written.
FAULTS = [
    ("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC), ("sync", errno.EIO), ("sync", errno.ENOSPC),
    ("rename", errno.EIO), ("rename", errno.ENOSPC), ("mkdir", errno.ENOSPC), ("mkdir", errno.EROFS),
    ("open", errno.EROFS), ("open", errno.EIO),
]  # fmt: skip
PLACES = 4


def inputs(work: Work, bench: Bench) -> Path:
    """Where reading is to fail."""
    name = type(work).__name__
    return {"Build": bench.spec.parent / "envs", "Pull": work.folder}.get(name, bench.built.out)


def settings(work: Work, bench: Bench, call: str, number: int) -> dict[str, object]:
    place = inputs(work, bench) if call == "read" else work.folder
    return {"FAULT_CALLS": call, "FAULT_PATH": place, "FAULT_ERRNO": number}


def calls(bench: Bench, zygote: Zygote, verb: str, call: str, good: object) -> int:
    """How many of these calls a run makes."""
    work = bench.work(verb)
    work.good = good
    count = bench.folder / "count"
    count.unlink(missing_ok=True)
    ran = zygote.run(*work.argv, **settings(work, bench, call, 0), FAULT_AT=-1, FAULT_COUNT=count)
    assert ran.status == 0, ran.text
    return count.stat().st_size if count.exists() else 0


def places(total: int, most: int) -> list[int]:
    """Up to ``most`` of ``total`` calls, the first and the last among them."""
    if total <= most:
        return list(range(total))
    return sorted({round(n * (total - 1) / (most - 1)) for n in range(most)})


def judge(ran: Ran, number: int, what: str) -> None:
    assert "Traceback" not in ran.text, f"{what}: {ran.text}"
    assert ran.status in (0, 5), f"{what}: exit status {ran.status}\n{ran.text}"
    if ran.status:
        assert CODES[number] in re.findall(r"io\.\w+", ran.text), f"{what}: {ran.text}"


def sweep(bench: Bench, zygote: Zygote, verb: str, call: str, number: int, most: int) -> None:
    model = bench.work(verb)
    model.finish(zygote)
    total = calls(bench, zygote, verb, call, model.good)
    for at in places(total, most):
        for more in ({}, {"FAULT_MORE": "1"}):
            work = bench.work(verb)
            work.good = model.good
            ran = zygote.run(*work.argv, **settings(work, bench, call, number), FAULT_AT=at, **more)
            judge(ran, number, f"{verb}, {call} {at} of {total}{' and on' if more else ''}")
            work.never_partial()
            work.unmake_whole()
            work.finish(zygote)


@pytest.mark.parametrize(("call", "number"), FAULTS, ids=[f"{c}-{errno.errorcode[n]}" for c, n in FAULTS])
@pytest.mark.parametrize("verb", VERBS)
def test_a_call_fails(bench: Bench, faulty: Zygote, verb: str, call: str, number: int) -> None:
    sweep(bench, faulty, verb, call, number, PLACES)


@pytest.mark.soak
@pytest.mark.parametrize(("call", "number"), FAULTS, ids=[f"{c}-{errno.errorcode[n]}" for c, n in FAULTS])
@pytest.mark.parametrize("verb", VERBS)
def test_every_call_fails_once(bench: Bench, faulty: Zygote, verb: str, call: str, number: int) -> None:
    sweep(bench, faulty, verb, call, number, 200)


def test_the_faults_do_happen(bench: Bench, faulty: Zygote) -> None:
    """Each verb makes calls of the kinds that are made to fail."""
    for verb in VERBS:
        work = bench.work(verb)
        work.finish(faulty)
        assert calls(bench, faulty, verb, "read", work.good) > (0 if verb != "pull" else -1)
        assert calls(bench, faulty, verb, "write", work.good) > 0
