"""A byte stream with look-ahead and push-back, over chunks of any size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Pull:
    """Chunks as a stream. ``offset`` is where the next byte stands in the stream."""

    __slots__ = ("_at", "_buffer", "_chunks", "offset")

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks: Iterator[bytes | memoryview] = iter(chunks)
        self._buffer = memoryview(b"")
        self._at = 0
        self.offset = 0

    def peek(self, size: int) -> memoryview:
        """The next ``size`` bytes without taking them; fewer only at the end of the stream."""
        have = len(self._buffer) - self._at
        if have < size:
            parts: list[bytes | memoryview] = [self._buffer[self._at :]] if have else []
            for chunk in self._chunks:
                parts.append(chunk)
                have += len(chunk)
                if have >= size:
                    break
            self._buffer = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
            self._at = 0
        return self._buffer[self._at : self._at + size]

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes; fewer only at the end of the stream."""
        data = self.peek(size)
        self._at += len(data)
        self.offset += len(data)
        return data

    def some(self, most: int) -> memoryview:
        """Between 1 and ``most`` bytes, whatever is at hand; none at the end of the stream."""
        self.peek(1)
        return self.take(min(most, len(self._buffer) - self._at))

    def push_back(self, data: bytes | memoryview) -> None:
        """Give back the bytes that were taken last."""
        if len(data) <= self._at:
            self._at -= len(data)
        else:
            self._buffer = memoryview(b"".join((data, self._buffer[self._at :])))
            self._at = 0
        self.offset -= len(data)
