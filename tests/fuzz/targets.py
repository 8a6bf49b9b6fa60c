"""What a fuzzer calls: each target takes any bytes, lets only our own errors pass, and holds a property beyond that.

The same functions serve seeded mutation, atheris and anything else that makes bytes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from oci_builder.model.documents import DockerArchiveItem, ImageConfig, Index, Manifest, parse_document
from oci_builder.model.errors import OciBuilderError
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import MIB, Limits
from oci_builder.model.spec import parse_spec
from oci_builder.wire.compress import Options, decode_chunks
from oci_builder.wire.tar import END_OF_ARCHIVE, Kind, TarReader, encode_header, padding

# Small enough that a bomb is over in a moment, large enough for everything in the corpus.
LIMITS = replace(Limits(), layer_size=8 * MIB, entry_size=2 * MIB, ratio_floor=MIB, entries=2000, zstd_window=8 * MIB)
Target = Callable[[bytes], None]


def pieces(data: bytes, size: int) -> Iterable[bytes]:
    """``data`` in pieces."""
    return (data[at : at + size] for at in range(0, len(data), size))


def _entries(chunks: Iterable[bytes], *, strict: bool) -> tuple[list[tuple[Any, bytes]], str]:
    """All entries with their content, and the code of the error that ended it."""
    found: list[tuple[Any, bytes]] = []
    try:
        reader = TarReader(chunks, limits=LIMITS, where="fuzz", strict=strict)
        for entry in reader:
            found.append((entry, b"".join(reader.data())))
    except OciBuilderError as error:
        return found, error.code
    return found, ""


def tar(data: bytes) -> None:
    """How the bytes are cut changes nothing; strict accepts no more than lenient; what is read can be written again."""
    whole, code = _entries([data], strict=False)
    assert _entries(pieces(data, 509), strict=False) == (whole, code)
    _, strict_code = _entries([data], strict=True)
    assert strict_code or not code, f"strict accepts what lenient refuses with {code}"
    if not code:
        _written_again(whole)


def _written_again(entries: list[tuple[Any, bytes]]) -> None:
    out = []
    for entry, content in entries:
        out.append(encode_header(entry))
        if entry.kind is Kind.FILE:
            assert len(content) == entry.size
            out += [content, padding(entry.size)]
    again, code = _entries([b"".join([*out, END_OF_ARCHIVE])], strict=False)
    assert not code, f"our own tar is refused with {code}"
    for (one, content), (two, same) in zip(entries, again, strict=True):
        kept = replace(one, offset=0, raw_name=b"", uname=b"", gname=b"", mtime_ns=one.mtime_ns // 10**9 * 10**9)
        assert replace(two, offset=0, raw_name=b"") == kept
        assert content == same


def _decoded(data: bytes, kind: Any, threads: int, size: int) -> tuple[bytes, str]:
    out = bytearray()
    try:
        for chunk in decode_chunks(pieces(data, size), kind, Options(LIMITS, "fuzz", threads)):
            out += chunk
    except OciBuilderError as error:
        return bytes(out), error.code
    return bytes(out), ""


def _alike(data: bytes, kind: Any) -> tuple[bytes, str]:
    """What one thread and four agree on, bytes and error; otherwise cut, only a broken end is longer or shorter."""
    found, code = _decoded(data, kind, 1, 1 << 16)
    assert _decoded(data, kind, 4, 1 << 16) == (found, code)
    other, other_code = _decoded(data, kind, 2, 777)
    assert other_code == code
    assert other == found or (code and (other.startswith(found) or found.startswith(other)))
    return found, code


def gzip_framing(data: bytes) -> None:
    """However it is decoded, the outcome is the same; what is accepted, Python's gzip reads alike."""
    found = _alike(data, "gzip")
    if not found[1]:
        assert gzip.decompress(data) == found[0]


def zstd_framing(data: bytes) -> None:
    """However it is decoded, the outcome is the same."""
    _alike(data, "zstd")


def documents(data: bytes) -> None:
    """Every parser of documents; what strict JSON accepts, Python's parser reads alike."""
    for model in (Index, Manifest, ImageConfig, DockerArchiveItem):
        _quietly(lambda model=model: parse_document(model, data, "fuzz", LIMITS))  # type: ignore[misc]
    _quietly(lambda: parse_spec(data, "fuzz"))
    value = _quietly(lambda: load_json(data, "fuzz", LIMITS))
    if value is not None:
        assert value == json.loads(data)


def _quietly(action: Callable[[], object]) -> object:
    try:
        return action()
    except OciBuilderError as error:
        str(error).encode("utf-8", "backslashreplace")
        return None


TARGETS: dict[str, Target] = {
    "tar": tar, "gzip": gzip_framing, "zstd": zstd_framing, "documents": documents,
}  # fmt: skip
