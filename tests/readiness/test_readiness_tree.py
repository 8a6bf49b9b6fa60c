"""Layers over each other, and paths through links: the rules of image-spec layer.md and of the kernel."""

from __future__ import annotations

import pytest

from oci_builder.payload.readiness.tree import Delta, Node, Tree, overlay
from tests.lab.oracle import within


def delta(*paths: str) -> Delta:
    """A layer: ``a/`` is a folder, ``a>b`` a link, anything else a file (or a whiteout by its name)."""
    out = Delta()
    for path in paths:
        name, _, target = path.partition(">")
        if target:
            out.add(name.encode(), Node("link", link=target.encode()))
        elif name.endswith("/"):
            out.add(name[:-1].encode(), Node("dir"))
        else:
            out.add(name.encode(), Node("file"))
    return out


def files(*deltas: Delta) -> set[str]:
    return {p.decode() for p, n in overlay(deltas).items() if n.kind != "dir"}


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        (["a/x", "a/y"], ["a/.wh.x"], {"a/y"}),
        (["a/b/x", "a/b/y", "c"], ["a/.wh.b"], {"c"}),
        (["a/x", "a/y"], ["a/.wh..wh..opq", "a/z"], {"a/z"}),
        (["a/x"], ["a/z", "a/.wh..wh..opq"], {"a/z"}),
        (["a/x"], ["a"], {"a"}),
        (["a"], ["a/x"], {"a/x"}),
        (["x"], ["x", ".wh.x"], {"x"}),
        (["a/x"], [".wh.nothing"], {"a/x"}),
        (["ab/x"], [".wh.a"], {"ab/x"}),
        (["usr/lib/x", "lib>usr/lib"], ["lib/y"], {"usr/lib/x", "usr/lib/y", "lib"}),
        (["usr/lib/x", "lib>usr/lib"], ["lib/", "lib/y"], {"usr/lib/x", "lib/y"}),
        (["x"], [".wh..wh..opq"], set()),
    ],
)
def test_what_an_upper_layer_leaves(lower: list[str], upper: list[str], expected: set[str]) -> None:
    assert files(delta(*lower), delta(*upper)) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/f", "a/f"),
        ("/a/./f", "a/f"),
        ("rel/f", "a/f"),
        ("abs/f", "a/f"),
        ("a/up/f", "a/f"),
        ("out/f", "a/f"),
        ("to_file", "a/f"),
        ("loop", None),
        ("gone", None),
        ("a/none", None),
        ("a/f/f", None),
    ],
)
def test_a_path_is_found_inside_the_tree(path: str, expected: str | None) -> None:
    tree = Tree(
        overlay([delta("a/f", "rel>a", "abs>/a", "a/up>..//a", "out>../../a", "to_file>rel/f", "loop>loop", "gone>x")])
    )
    assert tree.resolve(path.encode()) == (expected.encode() if expected else None)


def test_links_that_use_links_twice_end_at_once() -> None:
    names = [f"l{n}>l{n - 1}/../l{n - 1}" for n in range(1, 60)]
    tree = Tree(overlay([delta("l0/x", *names)]))
    with within(1):
        assert tree.resolve(b"l59/x") is None
