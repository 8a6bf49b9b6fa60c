"""Waiting for what happens, not for a time: tests run on machines of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(found: Callable[[], T], seconds: float = 300) -> T:
    """The first true answer; the time is only for what never comes."""
    end = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
    return answer
