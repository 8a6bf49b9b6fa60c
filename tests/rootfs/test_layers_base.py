"""A base's tree of names: the same as from the plain definition, in time that its size bounds."""

from __future__ import annotations

import random

import pytest

from oci_builder.rootfs.layers_base import BaseCollector
from oci_builder.wire.tar import Kind, TarEntry
from tests.lab.oracle import within

Plain = dict[bytes, Kind]
NAMES = [b"a", b"b", b"ab", b"a.b", b"c"]


def plainly(tree: Plain, layer: list[TarEntry]) -> None:
    """Image-spec layer.md word by word: a deletion looks at every name."""
    for entry in layer:
        folder, _, name = entry.name.rpartition(b"/")
        if name == b".wh..wh..opq":
            below = folder + b"/" if folder else b""
            for path in [p for p in tree if p.startswith(below)]:
                del tree[path]
        elif name.startswith(b".wh."):
            drop(tree, folder + b"/" + name[4:] if folder else name[4:])
    for entry in layer:
        if not entry.name.rpartition(b"/")[2].startswith(b".wh."):
            if entry.kind is not Kind.DIR:
                drop(tree, entry.name)
            tree[entry.name] = entry.kind


def drop(tree: Plain, path: bytes) -> None:
    for one in [p for p in tree if p == path or p.startswith(path + b"/")]:
        del tree[one]


def some_layer(chance: random.Random) -> list[TarEntry]:
    """Entries whose parents come first; a folder is never put where the same layer has a file."""
    made: dict[bytes, Kind] = {}
    hidden: list[bytes] = []
    for _ in range(chance.randrange(1, 9)):
        folder = chance.choice([b"", *(path for path, kind in made.items() if kind is Kind.DIR)])
        path = (folder + b"/" if folder else b"") + chance.choice(NAMES)
        what = chance.random()
        if what < 0.25:
            hidden.append((folder + b"/" if folder else b"") + (b".wh." + chance.choice([*NAMES, b".wh..opq"])))
        elif path not in made:
            made[path] = chance.choice([Kind.DIR, Kind.DIR, Kind.FILE, Kind.SYMLINK])
    entries = [TarEntry(path, kind, link=b"x" if kind is Kind.SYMLINK else b"") for path, kind in made.items()]
    return entries + [TarEntry(path, Kind.FILE) for path in dict.fromkeys(hidden)]


@pytest.mark.parametrize("seed", range(300))
def test_c4_12_layers_on_layers_give_what_the_plain_definition_gives(seed: int) -> None:
    chance = random.Random(seed)
    collector, tree = BaseCollector(), Plain()
    for _ in range(5):
        layer = some_layer(chance)
        collector.apply(layer)
        plainly(tree, layer)
    found = collector.tree()
    seen = dict.fromkeys(found.folders, Kind.DIR) | dict.fromkeys(found.symlinks, Kind.SYMLINK)
    for folder, names in found.files.items():
        seen |= {folder + b"/" + name if folder else name: Kind.FILE for name in names}
    assert seen == tree


def test_c4_12_many_deletions_in_a_large_base_take_time_by_their_number() -> None:
    """A look at every name for each of them would be 5 billion comparisons, half an hour."""
    names = [b"d%d" % number for number in range(40_000)]
    collector = BaseCollector()
    collector.apply([TarEntry(n, Kind.DIR) for n in names] + [TarEntry(n + b"/f", Kind.FILE) for n in names])
    with within(20):
        collector.apply([TarEntry(b".wh." + n, Kind.FILE) for n in names])
    assert not any(collector.tree().folders)
