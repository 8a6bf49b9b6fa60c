"""Known shapes of credentials in a stream of many texts: one pass, bounded memory, whatever the bytes are.

Nearly all of a runtime image is machine code and source text, in which forty literals are looked for at 85 MB/s (one
core of a loaded machine). But what is secret in a credential is random and long: the bytes are translated into classes,
in which a run of twenty letters and digits is one literal. Such runs, 4 % of source text and 0.2 % of machine code,
alone are looked at for the shapes; where one shows, its whole rule is applied to the bytes themselves. 412 MB of a
real tier, one file or piece of a file in fourteen, go at 292 MB/s: machine code at 378, Python at 210, C++ that is full
of long names at 92; beside other work on both cores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from oci_builder.release.shapes import LONGEST, RULES, URL, Rule

# A core's own cache holds it, and memory of this size is used again: larger pieces get new pages each time, which costs
# as much as half of the search.
WINDOW = 256 << 10
# A match that begins so near to the end of a window is left to the next one: it may go on. Few can be longer, and those
# show by what they begin with. A character may have four bytes.
SHORT, _WIDEST = 2 << 10, 4
# Labels are larger than the texts that they belong to where those are small.
_FEW_LABELS = 4 << 10
_BEFORE = 80
_CONTEXT = 600
_NEARBY = 300

_CLASS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_+/-"
_TABLE = bytes(97 if byte in _CLASS else 0 if byte == 0 else 120 for byte in range(256))
_NEEDLE = b"a" * 20
# Where a run is one long word, its credential can only be all of it: a mark, behind a byte of length in bytecode.
_FIRST = 24
# UTF-16 and UTF-32 (strings of C's wchar_t), of either byte order: NULs with every character.
_WIDE: tuple[tuple[int, bytes, re.Pattern[bytes]], ...] = tuple(
    (width, (b"a" + bytes(width - 1)) * 20, re.compile(rb"(?:[\t\n\r -~]\0{%d}){20,}[\t\n\r -~]?" % (width - 1)))
    for width in (2, 4)
)
# Some shapes begin before their run. AWS', SendGrid's, Weights & Biases', Azure's and PuTTY's are of these lengths.
_LENGTHS = frozenset({40, 43, 64, 86})
_EQUALS = 0x3D
_MARKED = tuple(rule for rule in RULES if rule.mark)
_ARMOUR = tuple(rule for rule in RULES if rule.literal.startswith(b"-----BEGIN "))
_QUOTED = tuple(rule for rule in RULES if not rule.mark and rule not in _ARMOUR)
# Faster than one search for each: the engine looks for the quotation mark first.
_ANY_QUOTED = re.compile(b"\"(?:%s)" % b"|".join(re.escape(rule.literal[1:]) for rule in _QUOTED))
LONG = frozenset((b"-----BEGIN ", b"-----BEGIN PGP", b"LS0tLS1CRUdJTi", b'"auth"', b'"identitytoken"'))

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

    __slots__ = ("_addresses", "_buffer", "_done", "_found", "_labels", "_own", "_short", "_window")

    def __init__(self, found: Callable[[Hit], None], own: tuple[bytes, ...] = (), *, addresses: bool = False) -> None:
        self._found, self._own, self._addresses = found, own, addresses
        self._short = _WIDEST * max([SHORT, *map(len, own)])
        self._window = max(WINDOW, 8 * self._short)
        self._buffer = bytearray()
        self._done = 0  # bytes of the buffer in which no match may begin: they were searched, and are kept as context
        self._labels: list[tuple[int, object]] = []  # (where a text begins in the buffer, its label)

    def begin(self, label: object) -> None:
        """What is fed from now on belongs to another text."""
        if len(self._labels) > self._short + _FEW_LABELS:
            self._search()
        self._buffer += b"\n"
        self._labels.append((len(self._buffer), label))

    def feed(self, data: bytes | memoryview) -> None:
        """The next piece of a text."""
        buffer, rest = self._buffer, memoryview(data)
        while len(buffer) + len(rest) >= self._window:
            room = max(self._window - len(buffer), 0)
            buffer += rest[:room]
            rest = rest[room:]
            self._search()
        buffer += rest

    def end(self) -> None:
        """Search what is left."""
        self._search(last=True)

    def _search(self, *, last: bool = False) -> None:
        window = Window(bytes(self._buffer))
        until = len(window.data) if last else max(self._done, self._decided(window))
        for kind, start, secret in window.find(self._own, addresses=self._addresses):
            if self._done <= start < until:
                self._found(Hit(kind, self._label(start), secret))
        keep = max(0, until - _CONTEXT)
        del self._buffer[:keep]
        self._done = until - keep
        known = [(start - keep, label) for start, label in self._labels]
        current = [pair for pair in known if pair[0] <= self._done][-1:]
        self._labels = current + [pair for pair in known if pair[0] > self._done]

    def _decided(self, window: Window) -> int:
        """Where what follows may change what begins there: in the last text only, those before it are whole."""
        size = len(window.data)
        lowest = max(size - _WIDEST * LONGEST, self._labels[-1][0] if self._labels else 0)
        return min(size - self._short, *window.long(lowest))

    def _label(self, at: int) -> object:
        low, high = 0, len(self._labels)
        while low < high:
            middle = (low + high) // 2
            if self._labels[middle][0] <= at:
                low = middle + 1
            else:
                high = middle
        return self._labels[low - 1][1] if low else None


class Window:
    """Some bytes, and which rules may match in them."""

    __slots__ = ("_rules", "_wide", "data")

    def __init__(self, data: bytes) -> None:
        classes = data.translate(_TABLE)
        self.data = data
        self._rules = list(_likely(data, _runs(data, classes)))
        self._wide = [(width, _wide(data, classes, needle, text)) for width, needle, text in _WIDE if needle in classes]

    def find(self, own: tuple[bytes, ...] = (), *, addresses: bool = False) -> Iterator[tuple[str, int, bytes]]:
        """(kind, offset, secret) of all that has a credential's shape."""
        for rule in self._rules:
            yield from _apply(rule, self.data)
        if addresses:
            yield from _apply(URL, self.data)
        for secret in own:
            at = self.data.find(secret)
            while at >= 0:
                yield "a secret of this machine's environment", at, secret
                at = self.data.find(secret, at + len(secret))
        for width, text in self._wide:
            for start, end in text:
                narrow = Window(self.data[start:end:width])
                yield from ((kind, start + width * at, secret) for kind, at, secret in narrow.find(own))

    def long(self, lowest: int) -> list[int]:
        """Where what may be long begins, from ``lowest`` on; at least the end of the window."""
        found = [self.data.find(rule.literal, lowest) for rule in self._rules if rule.literal in LONG]
        return [len(self.data), *(at for at in found if at >= 0), *([lowest] if self._wide else [])]


def _wide(window: bytes, classes: bytes, needle: bytes, text: re.Pattern[bytes]) -> list[tuple[int, int]]:
    """Where texts of wide characters begin and end that have a long run of letters and digits."""
    found, at = [], 0
    while (hit := classes.find(needle, at)) >= 0:
        match = text.search(window, max(at, hit - _WIDEST * _CONTEXT))
        at = match.end()  # type: ignore[union-attr]  # it matches: the needle did
        found.append(match.span())  # type: ignore[union-attr]
    return found


def _runs(window: bytes, classes: bytes) -> bytes:
    """The long runs of letters and digits, one a line; with what stands before one where that may matter.

    Names in lower case are left out: of tokens of twenty characters that have no capital among them there are two in a
    hundred thousand.
    """
    find, out, end = classes.find, set(), len(classes)
    at, other, nul = 0, -1, -1
    while (start := find(_NEEDLE, at)) >= 0:
        # Each is looked for once: a window may have a million of one and none of the other.
        if other < start and (other := find(b"x", start)) < 0:
            other = end
        if nul < start and (nul := find(b"\0", start)) < 0:
            nul = end
        at = other if other < nul else nul
        if at - start in _LENGTHS or window[start - 1] == _EQUALS:
            out.add(window[max(0, start - _BEFORE) : at])
        elif not (run := window[start:at]).islower():
            # A run of more than one word may have its credential anywhere.
            out.add(run if at - start <= _FIRST or b"-" in run or b"/" in run or b"+" in run else run[:_FIRST])
    return b"\n".join(out)


def _likely(window: bytes, runs: bytes) -> Iterator[Rule]:
    """Rules that may match."""
    yield from (rule for rule in _MARKED if rule.mark in runs)
    if b"-----BEGIN " in window:
        yield from _ARMOUR
    if _ANY_QUOTED.search(window):
        yield from _QUOTED


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


__all__ = ["LONG", "SHORT", "WINDOW", "Hit", "Search", "Window"]
