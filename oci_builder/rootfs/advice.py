"""What a staged tree will be like in an image, where that is not what its maker saw: said, and left as it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice

from oci_builder.rootfs.layers_plan import Normal
from oci_builder.rootfs.scan import SourceEntry, Tree
from oci_builder.wire.tar import Kind

_FOLDER = b"__pycache__"
# One compileall made all of a tree's bytecode: a few files tell.
_LOOKED_AT = 32
_HEADER = 16


def advice(tree: Tree, normal: Normal) -> Iterator[str]:
    """Warnings about a tree that somebody else made, for people.

    Args:
        normal: what its times become.
    """
    if tree.entries[0].mode & 0o005 != 0o005:  # as mktemp -d makes folders (field reports B121, B139)
        yield f"its folder has mode {tree.entries[0].mode:04o}: in the image only its owner may enter; chmod it to 0755"
    stale = sum(1 for one, source in _bytecode(tree) if _is_stale(tree, one, source, normal))
    if stale:  # field report B155
        yield (
            "its bytecode is checked by time, and times are cut to the spec's epoch: Python will compile at every start"
            "; make it with python -m compileall -f --invalidation-mode checked-hash, or leave it out"
        )


def _bytecode(tree: Tree) -> Iterator[tuple[SourceEntry, SourceEntry]]:
    """The first bytecode files, each with the source that it was made of."""
    found = (e for e in tree.entries if e.kind is Kind.FILE and e.path.endswith(b".pyc"))
    sources = {name: one for one in islice(found, _LOOKED_AT) if (name := _source_of(one.path))}
    for entry in tree.entries if sources else ():
        if entry.kind is Kind.FILE and entry.path in sources:
            yield sources[entry.path], entry


def _source_of(path: bytes) -> bytes:
    """``a/__pycache__/m.cpython-311.pyc`` is made of ``a/m.py`` (PEP 3147)."""
    folder, _, name = path.rpartition(b"/")
    above, slash, last = folder.rpartition(b"/")
    return above + slash + name.split(b".")[0] + b".py" if last == _FOLDER else b""


def _is_stale(tree: Tree, entry: SourceEntry, source: SourceEntry, normal: Normal) -> bool:
    """Whether Python would find other times there than the bytecode names (PEP 552)."""
    try:
        with open(os.fsencode(tree.root) + b"/" + entry.path, "rb") as file:
            header = file.read(_HEADER)
    except OSError:  # whoever reads it for the layer says so
        return False
    by_time = len(header) == _HEADER and header[4:8] == bytes(4)
    seconds = int.from_bytes(header[8:12], "little")
    return by_time and seconds == source.mtime_ns // 1_000_000_000 % 2**32 != normal.seconds(source.mtime_ns) % 2**32
