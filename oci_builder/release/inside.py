"""Files within files: what gzip, zstd, xz, lzma, bzip2, zlib, zip, deb, tar hold, as streams, one pass, nothing kept.

A zip is read by its local headers, as they come: its directory, which may say something else, is not believed. What
stands behind a program or script (``release.stubs``) is found on the way.
"""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Protocol

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


class _Wrong(NotOpened):
    """Bytes that their decompressor refuses."""


class MemberClosed(NotOpened):
    """One member cannot be read here: encrypted, damaged; those behind it can be."""


TOO_MUCH = "it holds more than is opened"
_PIECE = 64 << 10
_OUT = 1 << 20
_LOCAL = b"PK\3\4"
# Of which only the bytes with one meaning are asked for: versions and flags are small, methods few.
FIRST_OF_ZIP = re.compile(rb"PK\x03\x04..[\0-\x0f].[\0\x08\x09\x0c\x0e\x5d\x5f\x63]\0", re.DOTALL)
_ENDLESS = (1 << 64) - 1
_OFFSET, _REFERENCE = 6, 7
_AR, _AR_HEADER = b"!<arch>\n", 60
_FIXED = 30
_ENCRYPTED = 1
_STREAMED = 8
_STORED, _DEFLATED = 0, 8
_ZIP64 = 1
_UNKNOWN = 0xFFFFFFFF
_DESCRIPTOR = re.compile(rb"PK\x07\x08(?=.{8})", re.DOTALL)


def kind_of(head: bytes) -> str:
    """What container begins so: one of ``OPENERS``, ``tar``, or another's name (``7z``), which cannot be opened here;
    empty for anything else. A zip may begin with a program (a launcher, a pex)."""
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            return kind
    if head[257:262] == b"ustar":
        return "tar"
    if head.startswith((b"#!", b"MZ")) and FIRST_OF_ZIP.search(head):
        return "zip"
    return "lzma" if _is_lzma(head) else "zlib" if _is_zlib(head) else ""


def _is_lzma(head: bytes) -> bool:
    """The format before xz, which has no magic: usual properties, a dictionary of 2^n or 3 * 2^n bytes, a size that is
    unknown or sensible, and the first byte of the coder, which is always 0 (lzma-file-format.txt, 1.1)."""
    if len(head) < 18 or head[0] != 0x5D or head[13]:
        return False
    dictionary, size = int.from_bytes(head[1:5], "little"), int.from_bytes(head[5:13], "little")
    odd = dictionary // (dictionary & -dictionary) if dictionary else 0
    return odd in (1, 3) and dictionary >= 4096 and (size == _ENDLESS or size < 1 << 40)


def _is_zlib(head: bytes) -> bool:
    """As git keeps an object: a header that is a multiple of 31 (RFC 1950), and data that can be inflated."""
    if len(head) < 8 or head[0] != 0x78 or (head[0] << 8 | head[1]) % 31 or head[1] & 0x20:
        return False
    try:
        return len(zlib.decompressobj().decompress(head, _OUT)) > 0
    except zlib.error:
        return False


_MAGICS = (
    (b"\x1f\x8b\x08", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\0", "xz"), (b"BZh", "bzip2"), (_LOCAL, "zip"),
    (b"7z\xbc\xaf\x27\x1c", "7z"), (b"Rar!\x1a\x07", "rar"), (b"LZIP\x01", "lzip"), (b"!<arch>\ndebian-binary", "deb"),
    (b"\xed\xab\xee\xdb", "rpm"), (b"\4\x22\x4d\x18", "lz4"), (b"070701", "cpio"), (b"hsqs", "squashfs"),
    (b"\x1f\x9d", "compress"), (b"\x89LZO\0\r\n\x1a\n", "lzop"), (b"MSCF\0\0\0\0", "cabinet"), (b"xar!\0", "xar"),
    (b"PACK\0\0\0\2", "git pack"), (b"\xff\6\0\0sNaPpY", "snappy"),
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


def _streamed_by(make: Callable[[int], _Decompressor], *, more: bool = True) -> Opener:
    def opener(chunks: Iterable[Chunk], limits: Limits, where: str) -> Iterator[Member]:
        yield b"", _streams(chunks, lambda: make(limits.zstd_window), limits, more)

    return opener


class _Decompressor(Protocol):
    """What the standard library's have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: Chunk, max_length: int, /) -> bytes: ...


class _Zlib:
    """``zlib``'s, as the others are."""

    def __init__(self) -> None:
        self._of = zlib.decompressobj()
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._of.eof

    @property
    def unused_data(self) -> bytes:
        return self._of.unused_data

    def decompress(self, data: Chunk, max_length: int, /) -> bytes:
        try:
            out = self._of.decompress(self._of.unconsumed_tail + data, max_length)
        except zlib.error as error:
            raise OSError(str(error)) from None
        self.needs_input = not self._of.unconsumed_tail
        return out


def _streams(
    chunks: Iterable[Chunk], make: Callable[[], _Decompressor], limits: Limits, more: bool
) -> Iterator[bytes]:
    """All streams of a file, one after the other; what follows the last one is none of ours."""
    pull, left = Pull(chunks), [limits.layer_size]
    while head := bytes(pull.peek(3)):
        if pull.offset and not any(head):  # xz may pad
            piece = bytes(pull.some(_PIECE))
            pull.push_back(piece.lstrip(b"\0"))
            continue
        if pull.offset and not (more and head.startswith((b"\xfd7z", b"BZh"))):
            return
        yield from _stream(pull, make(), left)


def _stream(pull: Pull, inflater: _Decompressor, left: list[int]) -> Iterator[bytes]:
    """One stream to its end; ``left`` is what all may hold together."""
    while not inflater.eof:
        piece: Chunk = pull.some(_PIECE) if inflater.needs_input else b""
        if inflater.needs_input and not piece:
            raise NotOpened("it ends early")
        try:
            data = inflater.decompress(piece, _OUT)
        except (lzma.LZMAError, OSError, DeflateError) as error:
            pull.push_back(piece)
            raise _Wrong(f"{error}") from None
        left[0] -= len(data)
        if left[0] < 0:
            raise NotOpened(TOO_MUCH)
        yield data
    pull.push_back(inflater.unused_data)


def _ar(chunks: Iterable[Chunk], limits: Limits, where: str) -> Iterator[Member]:
    """Members of a Debian package (ar(5)): a header of 60 bytes, the content, a byte to make it even."""
    pull = Pull(chunks)
    pull.take(len(_AR))
    while header := bytes(pull.take(_AR_HEADER)):
        digits = header[48:58].strip()
        if len(header) < _AR_HEADER or not header.endswith(b"`\n") or not digits.isdigit():
            raise NotOpened("a member has no header")
        content = _stored(pull, int(digits))
        yield header[:16].rstrip(b" /"), content
        for _ in content:
            pass
        if int(digits) % 2:
            pull.take(1)


def _git_pack(chunks: Iterable[Chunk], limits: Limits, where: str) -> Iterator[Member]:
    """Objects of a git pack (gitformat-pack(5)), without names: texts, and what makes others of them."""
    pull, left = Pull(chunks), [limits.layer_size]
    for _number in range(int.from_bytes(bytes(pull.take(12))[8:], "big")):
        kind = _varint(pull) >> 4 & 7
        if kind == _OFFSET:
            _varint(pull)
        elif kind == _REFERENCE:
            pull.take(20)
        content = _stream(pull, _Zlib(), left)
        yield b"", content
        for _ in content:
            pass


def _varint(pull: Pull) -> int:
    """The first byte of a number of seven bits a byte, which goes on while the eighth is set."""
    first = last = bytes(pull.take(1))
    while last and last[0] & 0x80:
        last = bytes(pull.take(1))
    if not last:
        raise NotOpened("it ends early")
    return first[0]


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
    if size:
        raise NotOpened("it ends early")


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
    try:
        yield from _stream(pull, Inflater(), left)
    except _Wrong as error:
        raise MemberClosed(f"a member is not deflate data ({error})") from None


OPENERS: dict[str, Opener] = {
    "gzip": _whole("gzip"), "zstd": _whole("zstd"), "zip": _zip, "deb": _ar, "git pack": _git_pack,
    "xz": _streamed_by(lambda memory: lzma.LZMADecompressor(lzma.FORMAT_XZ, memory)),
    "lzma": _streamed_by(lambda memory: lzma.LZMADecompressor(lzma.FORMAT_ALONE, memory), more=False),
    "bzip2": _streamed_by(lambda memory: bz2.BZ2Decompressor()),
    "zlib": _streamed_by(lambda memory: _Zlib(), more=False),
}  # fmt: skip
