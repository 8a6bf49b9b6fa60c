"""A compressed archive, read once: layers that come in order are passed on, the others wait in a scratch file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from oci_builder.judge.survey import sight_layer
from oci_builder.model.errors import FormatError, OciBuilderError
from oci_builder.transports.opened_members import OpenedMembers
from oci_builder.transports.wanted import Chunks, WantedLayer, guess_layers
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import TarReader

# How often the documents are tried before the archive's end: they may come one by one, each trial parses them all.
_TRIALS = 8


class Stream:
    """The members of a compressed archive as they come.

    Which layers are wanted is a guess as long as there may be more documents; the judge confirms it at the end, and
    whoever believed the guess must not have shown anything yet.
    """

    def __init__(self, file: OpenedMembers, chunks: Chunks) -> None:
        self._file = file
        self._parts = file.parts
        self._reader = TarReader(chunks, limits=file.options.limits, where=file.path.name, warn=file.unusual)
        self._spool = file.files.enter_context(tempfile.TemporaryFile(dir=file.options.scratch, buffering=0))
        self._spooled = 0
        self._trials = _TRIALS
        self._guess: tuple[WantedLayer, ...] | None = None
        self._waiting: list[WantedLayer] = []

    def layers(self) -> Iterator[tuple[WantedLayer, Chunks]]:
        """As ``ImageFile.layers``."""
        for entry in self._reader:
            name = self._file.admit(entry, sparse=self._reader.sparse)
            if not name:
                continue
            self._try()
            if self._is_next(name):
                yield self._waiting.pop(0), self._passing(name, entry.size)
            else:
                self._put_aside(name)
            while self._waiting and self._parts.real(self._waiting[0].name) in self._parts.ranges:
                yield self._next()
        found = self._file.found().layers
        if self._guess is None:
            self._waiting = list(found)
        elif self._guess != found:
            raise FormatError(
                "platform.ambiguous", f"{self._parts.where}: its documents mean one image by the index and another"
                " by the configs", where=self._parts.where,
            )  # fmt: skip
        while self._waiting:
            yield self._next()

    def _try(self) -> None:
        """Find out about the image before the archive's end, if all its documents are there."""
        if self._guess is None and self._trials and {"index.json", "oci-layout"} <= self._parts.ranges.keys():
            self._trials -= 1
            try:
                self._guess = self._guessed()
            except OciBuilderError:
                return
            self._waiting = list(self._guess)

    def _guessed(self) -> tuple[WantedLayer, ...]:
        options = self._file.options
        return guess_layers(self._parts, options.platform, options.image, options.limits)

    def _is_next(self, name: str) -> bool:
        names = [layer.name for layer in self._waiting]
        return names[:1] == [name] and names.count(name) == 1

    def _next(self) -> tuple[WantedLayer, Chunks]:
        layer = self._waiting.pop(0)
        return layer, self._parts.get(layer.name).chunks()

    def _passing(self, name: str, size: int) -> Chunks:
        """A layer's bytes. Its place is taken, so that a second member of the name is a duplicate."""
        self._parts.ranges[name] = FileRange(self._spool.fileno(), 0, 0)
        data = self._reader.data()
        first = next(data, memoryview(b""))
        self._file.members[name] = sight_layer(name, size, bytes(first[:64]))
        yield first
        yield from data

    def _put_aside(self, name: str) -> None:
        start = self._spooled
        for part in self._reader.data():
            view = memoryview(part)
            while len(view):
                view = view[self._spool.write(view) :]
            self._spooled += len(part)
        self._file.note(name, FileRange(self._spool.fileno(), start, self._spooled - start))
