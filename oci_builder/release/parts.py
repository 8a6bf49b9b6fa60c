"""Large files in parts that ``cat NAME.part*`` joins again, and the digests of both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.model.errors import IntegrityError, SpecError, show
from oci_builder.release.files import io_error, open_file

# The Hub refuses files above 50 GB (huggingface_hub#2030); a part stays well below.
MAX_FILE = 50_000_000_000
PART_SIZE = 40_000_000_000
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A file, or one range of a file, under the name that it has where it is published.

    Attributes:
        name: path in the repository.
        source: file on disk.
        offset, size: bytes of the source.
        sha256: hex digest of that range; empty until ``hash_parts``.
        replace: whether another content may stand under that name already.
    """

    name: str
    source: Path
    offset: int
    size: int
    sha256: str = ""
    replace: bool = False

    def to_json(self) -> dict[str, Any]:
        """What the delivery receipt says about it."""
        return {"name": self.name, "size": self.size, "sha256": self.sha256}


def plan_parts(name: str, source: Path, *, max_file: int = MAX_FILE, part_size: int = PART_SIZE) -> tuple[Part, ...]:
    """The file as it is, or in parts ``name.part000``, ``name.part001``, ... Only its size is read.

    The numbers have one width, so that sorting them as text and as numbers is the same.

    Raises:
        SpecError: ``publish.parts``: a part size that makes no sense, or more than 1000 parts.
        TransportError: ``io.*``.
    """
    try:
        size = source.stat().st_size
    except OSError as error:
        raise io_error(error, source) from None
    if not 0 < part_size <= max_file:
        raise SpecError("publish.parts", f"a part of {part_size} bytes does not fit a limit of {max_file}", where=name)
    if size <= max_file:
        return (Part(name, source, 0, size),)
    starts = range(0, size, part_size)
    if len(starts) > 1000:
        raise SpecError("publish.parts", f"{show(name)}: {len(starts)} parts, at most 1000", where=name)
    return tuple(Part(f"{name}.part{i:03d}", source, at, min(part_size, size - at)) for i, at in enumerate(starts))


def hash_parts(parts: tuple[Part, ...], expected: str = "") -> tuple[str, tuple[Part, ...]]:
    """Read the source once: the digest of the whole, and the parts with theirs.

    Args:
        parts: of ``plan_parts``.
        expected: sha256 hex that the whole must have; empty: not compared.

    Raises:
        IntegrityError: ``blob.digest``, ``blob.size``: the file is not what it was.
        TransportError: ``io.*``.
    """
    whole = hashlib.sha256()
    done = []
    source = parts[0].source
    try:
        with open_file(source) as file:
            for part in parts:
                done.append(Part(part.name, source, part.offset, part.size, _hash_range(file, part, whole)))
            if file.read(1):
                raise IntegrityError("blob.size", f"{show(str(source))} grew while it was read", where=str(source))
    except OSError as error:
        raise io_error(error, source) from None
    if expected and whole.hexdigest() != expected:
        raise IntegrityError(
            "blob.digest", f"{show(str(source))} is not the archive that its record names",
            where=str(source), expected=expected, actual=whole.hexdigest(),
        )  # fmt: skip
    return whole.hexdigest(), tuple(done)


def _hash_range(file: Any, part: Part, whole: Any) -> str:
    own = hashlib.sha256()
    left = part.size
    while left:
        data = file.read(min(_BLOCK, left))
        if not data:
            raise IntegrityError("blob.size", f"{show(str(part.source))} shrank while it was read", where=part.name)
        own.update(data)
        whole.update(data)
        left -= len(data)
    return str(own.hexdigest())


def checksums(wholes: Mapping[str, str], parts: Iterable[Part]) -> bytes:
    """A ``SHA256SUMS`` file: every published file, and as comments the archives that parts join to."""
    published = {p.name: p.sha256 for p in parts}
    lines = [f"{sha}  {name}" for name, sha in sorted(published.items())]
    joined = [(name, sha) for name, sha in sorted(wholes.items()) if name not in published]
    lines += [f"# cat {name}.part* > {name}   gives {sha}" for name, sha in joined]
    return ("\n".join(lines) + "\n").encode()
