"""Files within files: what gzip, zstd, xz, bzip2, zip and tar hold, as streams, one pass, nothing kept.

A zip is read by its local headers, as they come: its directory, which may say something else, is not believed.
"""

from __future__ import annotations

import bz2
import lzma
import re
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
    """A container, or the rest of it, cannot be read here: damaged, too large. The message says why."""


class MemberClosed(NotOpened):
    """One member cannot be read here: encrypted, damaged; those behind it can be."""


TOO_MUCH = "it holds more than is opened"
_PIECE = 64 << 10
_OUT = 1 << 20
_LOCAL = b"PK\3\4"
_MEMORY = 128 << 20
_FIXED = 30
_ENCRYPTED = 1
_STREAMED = 8
_STORED, _DEFLATED = 0, 8
_ZIP64 = 1
_UNKNOWN = 0xFFFFFFFF
_DESCRIPTOR = re.compile(rb"PK\x07\x08(?=.{8})", re.DOTALL)


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
    (b"\xed\xab\xee\xdb", "rpm"), (b"\4\x22\x4d\x18", "lz4"), (b"070701", "cpio"), (b"hsqs", "squashfs"),
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
        if pull.offset and not any(head):  # xz may pad
            piece = bytes(pull.some(_PIECE))
            pull.push_back(piece.lstrip(b"\0"))
            continue
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
    """Its members in order. Read each before the next is asked for.

    Raises:
        MemberClosed: by a member's content: it is encrypted, damaged, or of an odd compression.
        NotOpened: a member is cut off.
    """
    pull, left = Pull(chunks), [limits.layer_size]
    while _seek(pull):
        header = bytes(pull.take(_FIXED))
        if len(header) < _FIXED:
            return
        flags, method = header[6] | header[7] << 8, header[8] | header[9] << 8
        name = bytes(pull.take(int.from_bytes(header[26:28], "little")))
        size = _size(header, bytes(pull.take(int.from_bytes(header[28:30], "little"))))
        if flags & _ENCRYPTED or method not in (_STORED, _DEFLATED):
            what = "encrypted" if flags & _ENCRYPTED else f"compressed by method {method}"
            content: Iterator[Chunk] = _closed(pull, size, f"a member is {what}")
        elif method == _DEFLATED:
            content = _deflated(pull, left)
        else:
            content = _streamed(pull) if flags & _STREAMED and not size else _stored(pull, size)
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


def _size(header: bytes, extra: bytes) -> int:
    """The compressed size; a large one stands in an extra field, behind the plain size (APPNOTE 4.5.3)."""
    size, at = int.from_bytes(header[18:22], "little"), 0
    while size == _UNKNOWN and at + 4 <= len(extra):
        kind, length = int.from_bytes(extra[at : at + 2], "little"), int.from_bytes(extra[at + 2 : at + 4], "little")
        if kind == _ZIP64:
            first = 12 if header[22:26] == _UNKNOWN.to_bytes(4, "little") else 4
            return int.from_bytes(extra[at + first : at + first + 8], "little")
        at += 4 + length
    return size


def _stored(pull: Pull, size: int) -> Iterator[Chunk]:
    while size and (piece := pull.some(min(size, _PIECE))):
        size -= len(piece)
        yield piece


def _streamed(pull: Pull) -> Iterator[Chunk]:
    """Stored, with its size behind it: it ends where a descriptor says the size that it has."""
    count = 0
    while head := bytes(pull.peek(_PIECE)):
        ends = (m.start() for m in _DESCRIPTOR.finditer(head))
        end = next((at for at in ends if head[at + 8 : at + 12] == (count + at & _UNKNOWN).to_bytes(4, "little")), -1)
        taken = end if end >= 0 else max(len(head) - 11, 0) if len(head) == _PIECE else len(head)
        yield bytes(pull.take(taken))
        count += taken
        if end >= 0:
            return
    raise NotOpened("a member has no end")


def _closed(pull: Pull, size: int, why: str) -> Iterator[Chunk]:
    for _ in _stored(pull, size):
        pass
    yield from ()
    raise MemberClosed(why)


def _deflated(pull: Pull, left: list[int]) -> Iterator[bytes]:
    inflater = Inflater()
    while not inflater.eof:
        piece: Chunk = pull.some(_PIECE) if inflater.needs_input else b""
        if inflater.needs_input and not piece:
            raise NotOpened("it ends early")
        try:
            data = inflater.decompress(piece, _OUT)
        except DeflateError as error:
            pull.push_back(piece)
            raise MemberClosed(f"a member is not deflate data ({error})") from None
        left[0] -= len(data)
        if left[0] < 0:
            raise NotOpened(TOO_MUCH)
        yield data
    pull.push_back(inflater.unused_data)


OPENERS: dict[str, Opener] = {
    "gzip": _whole("gzip"), "zstd": _whole("zstd"), "xz": _xz, "bzip2": _bzip2, "zip": _zip,
}  # fmt: skip
