"""Archives behind a program or script that unpacks them: self-extracting shell archives, launchers, applications.

A zip's directory stands at its end, which a stream has not reached yet. So what stands behind is looked for from the
front: behind the end that an ELF program states, and anywhere in a script or a program for Windows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from oci_builder.release.inside import FIRST_OF_ZIP, HEAD, kind_of
from oci_builder.wire.compress.pull import Pull

Chunk = bytes | memoryview

_ELF = b"\x7fELF"
_PIECE = 64 << 10
# A zip's first member; streams begin a line, as makeself and others write them.
_PAYLOAD = re.compile(
    FIRST_OF_ZIP.pattern + rb"|(?<=\n)(?:\x1f\x8b\x08|\xfd7zXZ\0|\x28\xb5\x2f\xfd|BZh[1-9]1AY&SY"
    rb"|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|LZIP\x01|\x04\x22\x4d\x18|\x5d\0\0.{2}\xff{8}\0)", re.DOTALL,
)  # fmt: skip
_LONGEST = 32


def is_stub(head: bytes, size: int) -> bool:
    """Whether an archive may stand behind what begins so, of ``size`` bytes (0: unknown)."""
    if head.startswith((b"#!", b"MZ")):
        return not size or size > HEAD
    end = _elf_end(head) if head.startswith(_ELF) else 0
    return end > 0 and (not size or size > end)


def behind(chunks: Iterable[Chunk]) -> tuple[str, Iterator[Chunk]]:
    """The kind of the first archive behind a stub, and its bytes; an empty kind where there is none."""
    pull = Pull(chunks)
    head = bytes(pull.peek(HEAD))
    if head.startswith(_ELF):
        if not _skip(pull, _elf_end(head)):
            return "", iter(())
        found = _find(pull, bytes(pull.take(_PIECE)), start=True)
    else:
        found = _scan(pull)
    return (kind_of(bytes(pull.peek(HEAD))), _rest(pull)) if found else ("", iter(()))


def _scan(pull: Pull) -> bool:
    kept = b""
    while piece := bytes(pull.some(_PIECE)):
        if _find(pull, kept + piece):
            return True
        kept = (kept + piece)[-_LONGEST:]
    return False


def _find(pull: Pull, data: bytes, *, start: bool = False) -> bool:
    """Give back what begins with an archive, if one is there."""
    if start and kind_of(data[:HEAD]):
        pull.push_back(data)
        return True
    match = _PAYLOAD.search(data)
    if match is not None:
        pull.push_back(data[match.start() :])
    return match is not None


def _skip(pull: Pull, size: int) -> bool:
    while size and (piece := pull.some(min(size, _PIECE))):
        size -= len(piece)
    return not size


def _rest(pull: Pull) -> Iterator[Chunk]:
    while piece := pull.some(_PIECE):
        yield piece


def _elf_end(head: bytes) -> int:
    """Where an ELF file says that it ends: behind its section headers, which stand last; 0 where it has none."""
    if len(head) < 64 or head[4] not in (1, 2) or head[5] not in (1, 2):
        return 0
    order = "little" if head[5] == 1 else "big"
    start, width, sizes = (40, 8, 58) if head[4] == 2 else (32, 4, 46)
    table = int.from_bytes(head[start : start + width], order)  # type: ignore[arg-type]
    size, count = (int.from_bytes(head[at : at + 2], order) for at in (sizes, sizes + 2))  # type: ignore[arg-type]
    return table + size * count if table else 0


__all__ = ["behind", "is_stub"]
