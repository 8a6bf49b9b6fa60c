"""When a download is too slow to wait for: a byte now and then keeps a socket's timeout from ever coming (C11-10)."""

from __future__ import annotations

import time
from collections.abc import Callable

from oci_builder.model.errors import TransportError

# Far below any real line (128 B/s at the default of 60 s), far above a drip that is there to hold us.
_LEAST_BYTES = 8 << 10


class Pace:
    """Counts the bytes of one response in windows of time.

    Args:
        seconds: length of a window.
        where: what is downloaded, for the message.
        clock: seconds, monotonic.
    """

    def __init__(self, seconds: float, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._where, self._clock = seconds, where, clock
        self._start, self._bytes = clock(), 0

    def count(self, size: int) -> None:
        """``size`` more bytes are here.

        Raises:
            TransportError: ``http.timeout`` when a whole window brought next to nothing.
        """
        self._bytes += size
        now = self._clock()
        if now - self._start < self._seconds:
            return
        if self._bytes < _LEAST_BYTES:
            raise TransportError(
                "http.timeout", f"{self._where}: {self._bytes} bytes in {now - self._start:.0f} s; the server drips",
                where=self._where, expected=f">= {_LEAST_BYTES} bytes", actual=self._bytes,
            )  # fmt: skip
        self._start, self._bytes = now, 0
