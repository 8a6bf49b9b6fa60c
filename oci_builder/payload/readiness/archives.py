"""The tree of an image archive or layout, as the judge of archives lets it pass, or of a tar of a tree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from oci_builder.judge.options import JudgeOptions
from oci_builder.judge.path import is_member_name
from oci_builder.judge.whole import read_image
from oci_builder.model.events import Emit, Event
from oci_builder.model.limits import Limits
from oci_builder.payload.readiness.collect import Scratch, io_error, take, tree_delta
from oci_builder.payload.readiness.tree import Delta, Tree, overlay
from oci_builder.wire.compress import Options, decode_chunks, sniff
from oci_builder.wire.source import FileRange
from oci_builder.wire.tar import TarEntry, TarReader


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read: limits, decompression threads, platform of a multi-platform index, progress, which image."""

    limits: Limits
    threads: int
    platform: str
    emit: Emit
    image: str = ""


def read_file(path: Path, reading: Reading) -> Tree:
    """The final tree of an image archive, or of a tar of a tree, compressed or not.

    Raises:
        OciBuilderError: as ``image_tree``; of a tar, what is wrong with it.
        TransportError: ``io.*``.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise io_error(error, str(path)) from None
    try:
        source = FileRange(fd, 0, os.fstat(fd).st_size)
        return _read_stream(path, source, reading)
    except OSError as error:
        raise io_error(error, str(path)) from None
    finally:
        os.close(fd)


def _read_stream(path: Path, source: FileRange, reading: Reading) -> Tree:
    # An entry for the root itself says nothing; the first real name tells an image from a tree.
    first = next((entry.name for entry in _reader(path, source, source.chunks(), reading) if entry.name), None)
    if first is None:
        return Tree({})
    if is_member_name(first):
        return image_tree(path, reading)
    reader = _reader(path, source, _counted(str(path), source, reading.emit), reading)
    return Tree(overlay([tree_delta(reader)]))


def _reader(path: Path, source: FileRange, chunks: Iterator[bytes], reading: Reading) -> TarReader:
    # The stream is a whole tree: its bound is the image's, not one layer's.
    limits = replace(reading.limits, layer_size=reading.limits.image_size, entry_size=reading.limits.image_size)
    options = Options(limits, str(path), reading.threads)
    return TarReader(decode_chunks(chunks, sniff(source.pread(4, 0)), options), limits=limits, where=str(path))


def _counted(task: str, source: FileRange, emit: Emit) -> Iterator[bytes]:
    emit(Event("start", f"read {task}", total=source.size))
    for chunk in source.chunks():
        yield chunk
        emit(Event("advance", f"read {task}", amount=len(chunk)))
    emit(Event("done", f"read {task}"))


def image_tree(path: Path, reading: Reading) -> Tree:
    """The final tree of the one image that an archive or layout folder holds for the platform.

    Raises:
        OciBuilderError: what ``verify`` finds, the most telling of it; ``platform.ambiguous`` for several images.
    """
    deltas: dict[str, Delta] = {}
    with Scratch() as scratch:

        def told(member: str, entry: TarEntry, tar: TarReader) -> None:
            take(deltas.setdefault(member, Delta()), entry, tar, scratch)

        options = JudgeOptions(
            platform=reading.platform, image=reading.image, limits=reading.limits, threads=reading.threads,
            emit=reading.emit, task="read", entries=told,
        )  # fmt: skip
        image = read_image(path, options)
    config = image.config.config
    env = dict(text.partition("=")[::2] for text in (config.env if config else None) or ())
    return Tree(overlay([deltas.get(layer.name, Delta()) for layer in image.layers if layer]), env)
