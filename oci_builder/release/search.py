"""Known shapes of credentials in a stream of many texts: one pass, bounded memory, whatever the bytes are.

Nearly all of a runtime image is machine code and source text, in which forty literals are looked for at 85 MB/s (one
core of a loaded machine). But what is secret in a credential is random and long: the bytes are translated into classes,
in which a run of twenty letters and digits is one literal. Such runs, 4 % of source text and 0.2 % of machine code,
alone are looked at for the shapes; where one shows, its whole rule is applied to the bytes themselves. Machine code
goes at 305 MB/s, source text at 165, symbol tables at 80, and 4.1 GB of a real tier at 254, reading included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from oci_builder.release.shapes import LONGEST, RULES, URL, Rule

WINDOW = 1 << 20
# A match that begins here, before the end of a window, is left to the next one: it may go on.
_OVERLAP = 2 * LONGEST
# Labels are larger than the texts that they belong to where those are small; more texts than an overlap has room for.
_MOST_LABELS = _OVERLAP + (4 << 10)
_BEFORE = 80
_CONTEXT = 600
_NEARBY = 300

_CLASS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_+/-"
_TABLE = bytes(97 if byte in _CLASS else 0 if byte == 0 else 120 for byte in range(256))
_NEEDLE = b"a" * 20
_RUN = re.compile(rb"[A-Za-z0-9_]*([+/-])?[A-Za-z0-9_+/-]*")
# Where a run is one long word, its credential can only be all of it: a mark, behind a byte of length in bytecode.
_FIRST = 24
# UTF-16, of either byte order: a NUL with every character.
_WIDE_NEEDLE = b"a\0" * 20
_WIDE = re.compile(rb"(?:[\t\n\r -~]\0){20,}[\t\n\r -~]?")
# Some shapes begin before their run. AWS', SendGrid's, Weights & Biases', Azure's and PuTTY's are of these lengths.
_LENGTHS = frozenset({40, 43, 64, 86})
_EQUALS = 0x3D
_MARKED = tuple(rule for rule in RULES if rule.mark)
_OTHERS = tuple(rule for rule in RULES if not rule.mark and rule.literal != b"-----BEGIN PGP")
_PGP = tuple(rule for rule in RULES if rule.literal == b"-----BEGIN PGP")

# Strings of marshal (bytecode) and pickle: a code, their length, their bytes.
_SHORT = frozenset(b"zZ\xfa\xda\x8cU")
_LONG = frozenset(b"auAts\xe1\xf5\xc1\xf4\xf3XTB")


@dataclass(frozen=True, slots=True)
class Hit:
    """Something that has a credential's shape: what it is, where it was (a label as it was given), and its bytes."""

    kind: str
    label: object
    secret: bytes


class Search:
    """Feed it texts, each after a ``begin`` with its label; ``end`` when there are no more.

    What is found depends neither on how the texts were cut into pieces nor on what was fed before.

    Args:
        found: takes each hit; the same secret in one text may come twice.
        own: values that are searched for whatever they look like.
        addresses: passwords in addresses count too: these texts are settings.
    """

    __slots__ = ("_addresses", "_buffer", "_done", "_found", "_labels", "_own")

    def __init__(self, found: Callable[[Hit], None], own: tuple[bytes, ...] = (), *, addresses: bool = False) -> None:
        self._found, self._own, self._addresses = found, own, addresses
        self._buffer = bytearray()
        self._done = 0  # bytes of the buffer in which no match may begin: they were searched, and are kept as context
        self._labels: list[tuple[int, object]] = []  # (where a text begins in the buffer, its label)

    def begin(self, label: object) -> None:
        """What is fed from now on belongs to another text."""
        if len(self._labels) > _MOST_LABELS:
            self._search(max(self._done, len(self._buffer) - _OVERLAP))
        self._buffer += b"\n"
        self._labels.append((len(self._buffer), label))

    def feed(self, data: bytes | memoryview) -> None:
        """The next piece of a text."""
        self._buffer += data
        if len(self._buffer) >= WINDOW:
            self._search(len(self._buffer) - _OVERLAP)

    def end(self) -> None:
        """Search what is left."""
        self._search(len(self._buffer))

    def _search(self, until: int) -> None:
        window = bytes(self._buffer)
        for kind, start, secret in find(window, self._own, addresses=self._addresses):
            if self._done <= start < until:
                self._found(Hit(kind, self._label(start), secret))
        keep = max(0, until - _CONTEXT)
        del self._buffer[:keep]
        self._done = until - keep
        known = [(start - keep, label) for start, label in self._labels]
        current = [pair for pair in known if pair[0] <= self._done][-1:]
        self._labels = current + [pair for pair in known if pair[0] > self._done]

    def _label(self, at: int) -> object:
        low, high = 0, len(self._labels)
        while low < high:
            middle = (low + high) // 2
            if self._labels[middle][0] <= at:
                low = middle + 1
            else:
                high = middle
        return self._labels[low - 1][1] if low else None


def find(window: bytes, own: tuple[bytes, ...] = (), *, addresses: bool = False) -> Iterator[tuple[str, int, bytes]]:
    """(kind, offset, secret) of all that has a credential's shape."""
    classes = window.translate(_TABLE)
    for rule in _likely(window, _runs(window, classes)):
        yield from _apply(rule, window)
    if addresses:
        yield from _apply(URL, window)
    for secret in own:
        at = window.find(secret)
        while at >= 0:
            yield "a secret of this machine's environment", at, secret
            at = window.find(secret, at + len(secret))
    if _WIDE_NEEDLE in classes:
        for text in _WIDE.finditer(window):
            yield from ((kind, text.start() + 2 * at, secret) for kind, at, secret in find(text.group()[::2], own))


def _runs(window: bytes, classes: bytes) -> bytes:
    """The long runs of letters and digits, one a line; with what stands before one where that may matter.

    Names in lower case are left out: of tokens of twenty characters that have no capital among them there are two in a
    hundred thousand.
    """
    find, match, out, at = classes.find, _RUN.match, [], 0
    while (start := find(_NEEDLE, at)) >= 0:
        found = match(window, start)
        at = found.end()  # type: ignore[union-attr]  # whatever the bytes are, it matches: the needle did
        if at - start in _LENGTHS or window[start - 1] == _EQUALS:
            out.append(window[max(0, start - _BEFORE) : at])
        elif not (run := window[start:at]).islower():
            out.append(run if found.lastindex else run[:_FIRST])  # type: ignore[union-attr]
    return b"\n".join(out)


def _likely(window: bytes, runs: bytes) -> Iterator[Rule]:
    """Rules that may match."""
    yield from (rule for rule in _MARKED if rule.mark in runs)
    for rule in _OTHERS:
        if rule.literal in window:
            yield rule
            if rule.literal == b"-----BEGIN ":
                yield from _PGP


def _apply(rule: Rule, window: bytes) -> Iterator[tuple[str, int, bytes]]:
    at = window.find(rule.literal)
    while at >= 0:
        found = rule.pattern.match(window, at)
        end = found.end() if found else at + 1
        if found and rule.holds(found.group()) and _bounded(rule, window, at, end):
            yield rule.kind, at, found.group()
        # Behind a match, as one does: marks within marks, each with kilobytes behind it, would take hours.
        at = window.find(rule.literal, end)


def _bounded(rule: Rule, window: bytes, start: int, end: int) -> bool:
    """Whether a match stands by itself: between other characters, or at the ends of a string whose length is given."""
    size = end - start
    free = start == 0 or window[start - 1] not in rule.before
    done = end == len(window) or window[end] not in rule.after
    if (free and done) or window.find(0, max(0, start - _NEARBY), end + _NEARBY) < 0:
        return free and done  # text has no lengths
    if window[start - 1] == size:
        return True
    return (free or _begins_string(window, start, size)) and (done or _ends_string(window, start, end))


def _begins_string(window: bytes, start: int, size: int) -> bool:
    """Whether a string of bytecode or a pickle, of at least this size, begins at ``start``."""
    if start >= 2 and window[start - 1] > size and window[start - 2] in _SHORT:
        return True
    return start >= 5 and window[start - 5] in _LONG and int.from_bytes(window[start - 4 : start], "little") >= size


def _ends_string(window: bytes, start: int, end: int) -> bool:
    """Whether some string of bytecode or a pickle that began at ``start`` or before ends at ``end``."""
    for at in range(start, max(2, start - 255), -1):
        if window[at - 1] == end - at and window[at - 2] in _SHORT:
            return True
    first = max(1, start - _CONTEXT)
    at = window.rfind(b"\0\0", first, start)
    while at >= 0:  # the upper half of a length
        begin = at + 2
        size = int.from_bytes(window[max(0, begin - 4) : begin], "little")
        if begin >= 5 and size == end - begin and window[begin - 5] in _LONG:
            return True
        at = window.rfind(b"\0\0", first, at + 1)
    return False


__all__ = ["WINDOW", "Hit", "Search", "find"]
