"""Files within files: what gzip, zstd, xz, bzip2, zip and tar hold, as streams, one pass, nothing kept.

A zip is read by its local headers, as they come: its directory, which may say something else, is not believed.
"""

from __future__ import annotations

import bz2
import lzma
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from oci_builder.model.errors import OciBuilderError
from oci_builder.model.limits import Limits
from oci_builder.wire.compress import Options, decode_chunks
from oci_builder.wire.compress.codecs import DeflateError, Inflater
from oci_builder.wire.compress.pull import Pull
from oci_builder.wire.tar.header import BLOCK, parse_header

Chunk = bytes | memoryview
# (name in the container, content); empty for a stream that is compressed as a whole.
Member = tuple[bytes, Iterable[Chunk]]
Opener = Callable[[Iterable[Chunk], Limits, str], Iterator[Member]]

HEAD = 1024


class NotOpened(Exception):
    """A container, or the rest of it, cannot be read here: encrypted, damaged, too large. The message says why."""


TOO_MUCH = "it holds more than is opened"
_PIECE = 64 << 10
_OUT = 1 << 20
_LOCAL = b"PK\3\4"
_MEMORY = 128 << 20
_FIXED = 30
_ENCRYPTED = 1
_STORED, _DEFLATED = 0, 8
_UNKNOWN = 0xFFFFFFFF


def kind_of(head: bytes) -> str:
    """What container begins so: ``gzip``, ``zstd``, ``xz``, ``bzip2``, ``zip``, ``tar``, or another's name (``7z``);
    empty for anything else. A zip may begin with a program (a launcher, a pex)."""
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            return kind
    if head[257:262] == b"ustar":
        return "tar"
    return "zip" if head.startswith((b"#!", b"MZ")) and _LOCAL in head else ""


_MAGICS = (
    (b"\x1f\x8b\x08", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\0", "xz"), (b"BZh", "bzip2"), (_LOCAL, "zip"),
    (b"7z\xbc\xaf\x27\x1c", "7z"), (b"Rar!\x1a\x07", "rar"), (b"LZIP\x01", "lzip"), (b"!<arch>\ndebian-binary", "deb"),
)  # fmt: skip


def is_tar(head: bytes) -> bool:
    """Whether a tar of any age begins so: its first block is a header whose checksum is right."""
    try:
        return any(head[:BLOCK]) and len(head) >= BLOCK and parse_header(head[:BLOCK], "") is not None
    except OciBuilderError:
        return False


def peeked(chunks: Iterable[Chunk]) -> tuple[bytes, Iterator[Chunk]]:
    """The first bytes, and all of them."""
    stream = iter(chunks)
    first = next(stream, b"")
    if len(first) < HEAD:
        taken = bytearray(first)
        for chunk in stream:
            taken += chunk
            if len(taken) >= HEAD:
                break
        first = bytes(taken)
    return bytes(first[:HEAD]), chain([first], stream)


def _whole(compression: str) -> Opener:
    def opener(chunks: Iterable[Chunk], limits: Limits, where: str) -> Iterator[Member]:
        yield b"", decode_chunks(chunks, compression, Options(limits, where))  # type: ignore[arg-type]

    return opener


def _xz(chunks: Iterable[Chunk], limits: Limits, where: str) -> Iterator[Member]:
    yield b"", _streams(chunks, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _MEMORY), limits)


def _bzip2(chunks: Iterable[Chunk], limits: Limits, where: str) -> Iterator[Member]:
    yield b"", _streams(chunks, bz2.BZ2Decompressor, limits)


def _streams(
    chunks: Iterable[Chunk], make: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor], limits: Limits
) -> Iterator[bytes]:
    """All streams of a file, one after the other; what follows the last one is none of ours."""
    pull, out = Pull(chunks), 0
    while head := bytes(pull.peek(3)):
        if pull.offset and not head.startswith((b"\xfd7z", b"BZh")):
            return
        inflater = make()
        while not inflater.eof:
            piece = bytes(pull.some(_PIECE)) if inflater.needs_input else b""
            if inflater.needs_input and not piece:
                raise NotOpened("it ends early")
            try:
                data = inflater.decompress(piece, _OUT)
            except (lzma.LZMAError, OSError) as error:
                raise NotOpened(f"{error}") from None
            out += len(data)
            if out > limits.layer_size:
                raise NotOpened(TOO_MUCH)
            yield data
        pull.push_back(inflater.unused_data)


def _zip(chunks: Iterable[Chunk], limits: Limits, where: str) -> Iterator[Member]:
    """Its members in order. Read each before the next is asked for, or never.

    Raises:
        NotOpened: a member is encrypted, of an odd compression, or cut off.
    """
    pull, left = Pull(chunks), [limits.layer_size]
    while _seek(pull):
        header = bytes(pull.take(_FIXED))
        if len(header) < _FIXED:
            return
        flags, method = header[6] | header[7] << 8, header[8] | header[9] << 8
        size = int.from_bytes(header[18:22], "little")
        name = bytes(pull.take(int.from_bytes(header[26:28], "little")))
        pull.take(int.from_bytes(header[28:30], "little"))
        if flags & _ENCRYPTED or method not in (_STORED, _DEFLATED):
            what = "encrypted" if flags & _ENCRYPTED else f"compressed by method {method}"
            raise NotOpened(f"a member is {what}")
        content = _deflated(pull, left) if method == _DEFLATED else _stored(pull, size, flags)
        yield name, content
        for _ in content:
            pass


def _seek(pull: Pull) -> bool:
    """To the next local header."""
    while len(head := bytes(pull.peek(4))) == 4:
        if head == _LOCAL:
            return True
        piece = bytes(pull.some(_PIECE))
        at = piece.find(_LOCAL)
        keep = len(piece) - at if at >= 0 else min(3, len(piece) - 1)
        if keep:
            pull.push_back(piece[-keep:])
    return False


def _stored(pull: Pull, size: int, flags: int) -> Iterator[Chunk]:
    # Written as a stream, its size stands after it: the next header ends it, and the container's own bytes have it.
    left = 0 if flags & 8 or size == _UNKNOWN else size
    while left and (piece := pull.some(min(left, _PIECE))):
        left -= len(piece)
        yield piece


def _deflated(pull: Pull, left: list[int]) -> Iterator[bytes]:
    inflater = Inflater()
    while not inflater.eof:
        piece: Chunk = pull.some(_PIECE) if inflater.needs_input else b""
        if inflater.needs_input and not piece:
            raise NotOpened("it ends early")
        try:
            data = inflater.decompress(piece, _OUT)
        except DeflateError as error:
            raise NotOpened(f"not deflate data ({error})") from None
        left[0] -= len(data)
        if left[0] < 0:
            raise NotOpened(TOO_MUCH)
        yield data
    pull.push_back(inflater.unused_data)


OPENERS: dict[str, Opener] = {
    "gzip": _whole("gzip"), "zstd": _whole("zstd"), "xz": _xz, "bzip2": _bzip2, "zip": _zip,
}  # fmt: skip
