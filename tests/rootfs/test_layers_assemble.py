"""Layers that are no tier's: copied trees, inline files, the base's folders and links."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from rootfs_trees import fill, plan_of, untar

from oci_builder.model.errors import OciBuilderError, SpecError
from oci_builder.rootfs.layers_assemble import InlineFile, assemble, follow, place_files, place_tree, rewrite_parents
from oci_builder.rootfs.layers_base import BaseCollector, base_from_json, base_to_json
from oci_builder.rootfs.layers_blocks import layer_blocks
from oci_builder.rootfs.layers_plan import BaseTree, LayerPlan, Normal, check_disjoint, folder_entry
from oci_builder.rootfs.scan import scan_tree
from oci_builder.wire.tar import Kind, TarEntry, TarReader

USRMERGE = BaseTree(
    {b"usr": folder_entry(b"usr"), b"usr/lib": folder_entry(b"usr/lib", 0o751), b"usr/bin": folder_entry(b"usr/bin")},
    {b"lib": b"usr/lib", b"bin": b"/usr/bin", b"usr/lib64": b"lib"},
)


def tar_file(plan: LayerPlan, place: Path) -> Path:
    place.write_bytes(b"".join(layer_blocks(plan)))
    return place


def names(plan: LayerPlan) -> list[bytes]:
    return [item.name for item in plan.items]


def test_inline_files_links_and_their_folders(tmp_path: Path) -> None:
    """B100: every parent has an entry, before its children."""
    files = {b"etc/a.conf": InlineFile(b"data", 0o600), b"etc/d/run": InlineFile(b"#!/bin/sh\n", 0o755),
             b"link": InlineFile(link=b"etc/a.conf")}  # fmt: skip
    plan = assemble("runtime", place_files(files, b"opt/rt", Normal(1000)), normal=Normal(1000))
    out = untar(tar_file(plan, tmp_path / "layer.tar"), tmp_path / "out")
    assert (out / "opt/rt/link").read_bytes() == b"data"
    assert (out / "opt/rt/etc/d/run").stat().st_mode & 0o7777 == 0o755
    assert {int(path.lstat().st_mtime) for path in out.rglob("*")} == {1000}
    assert names(plan)[:3] == [b"opt", b"opt/rt", b"opt/rt/etc"]


def test_a_path_given_twice_is_an_overlap() -> None:
    one = list(place_files({b"a": InlineFile(b"1")}))
    with pytest.raises(SpecError) as caught:
        assemble("x", [*one, *place_files({b"a": InlineFile(b"2")})])
    assert caught.value.code == "layers.overlap"


def test_a_file_where_a_folder_is_needed_is_an_overlap() -> None:
    with pytest.raises(SpecError) as caught:
        assemble("x", place_files({b"a": InlineFile(b"1"), b"a/b": InlineFile(b"2")}))
    assert caught.value.code == "layers.overlap"


def test_layers_may_share_folders_only() -> None:
    one = assemble("one", place_files({b"d/a": InlineFile(b"1")}))
    check_disjoint([one, assemble("two", place_files({b"d/b": InlineFile(b"2")}))])
    for files in ({b"d/a": InlineFile(b"2")}, {b"d": InlineFile(b"2")}, {b"d/a/x": InlineFile(b"2")}):
        for plans in itertools.permutations([one, assemble("two", place_files(files))]):
            with pytest.raises(SpecError, match=r"layers\.overlap"):
                check_disjoint(plans)


def test_entries_move_to_where_the_base_links_point(tmp_path: Path) -> None:
    """B104, B105: lib/x lands in usr/lib/x, the base's links and its folder's mode stay."""
    root = fill(tmp_path / "tree", {"lib/x": b"content", "bin/tool": b"#!/bin/sh\n", "usr/lib64/deep/y": b"y"})
    os.link(root / "lib/x", root / "usr/lib64/z")
    plan = assemble("x", place_tree(scan_tree(root), b""))
    moved = rewrite_parents(plan, USRMERGE)
    assert [name for name in names(moved) if not name.startswith(b"usr")] == []
    base = tmp_path / "base"
    for folder in ("usr/lib", "usr/bin"):
        (base / folder).mkdir(parents=True)
    (base / "usr/bin/sh").write_text("sh")
    (base / "lib").symlink_to("usr/lib")
    (base / "bin").symlink_to("usr/bin")
    untar(tar_file(moved, tmp_path / "layer.tar"), base)
    assert (base / "lib").is_symlink() and (base / "bin").is_symlink()
    assert (base / "bin/sh").read_text() == "sh"
    assert (base / "lib/x").read_bytes() == (base / "usr/lib/z").read_bytes() == b"content"
    assert (base / "usr/lib/x").samefile(base / "usr/lib/z")
    assert (base / "usr/lib").stat().st_mode & 0o7777 == 0o751


def test_tiers_below_a_linked_prefix_move_with_their_links_intact(tmp_path: Path) -> None:
    root = fill(tmp_path / "tree", {"a": b"x"})
    os.link(root / "a", root / "b")
    from dataclasses import replace

    base = replace(USRMERGE, symlinks={b"opt": b"usr/local/opt"})
    (plan,) = plan_of({"t": root})
    moved = rewrite_parents(plan, base)
    links = {item.name: item.entry.link for item in moved.items if item.entry.kind is Kind.HARDLINK}
    assert links == {b"usr/local/opt/rt/envs/t/b": b"usr/local/opt/rt/envs/t/a"}
    assert moved.tiers == plan.tiers


def test_nothing_to_move_gives_the_same_plan(tmp_path: Path) -> None:
    (plan,) = plan_of({"t": fill(tmp_path / "tree", {"a": b"x"})})
    assert rewrite_parents(plan, USRMERGE) is plan


@pytest.mark.parametrize(
    ("path", "target"),
    [
        (b"lib/x", b"usr/lib/x"), (b"bin", b"usr/bin"), (b"usr/lib64/y", b"usr/lib/y"), (b"up/x", b"x"),
        (b"home/u/x", b"home/u/x"), (b"abs/../x", b"usr/x"), (b"chain/x", b"usr/lib/x"),
    ],
)  # fmt: skip
def test_following_the_links_of_a_base(path: bytes, target: bytes) -> None:
    links = {**USRMERGE.symlinks, b"up": b"../../..", b"abs": b"/usr/bin", b"chain": b"lib/."}
    assert follow(path, BaseTree({}, links)) == target


def test_links_in_circles_are_refused() -> None:
    """C6-05."""
    with pytest.raises(OciBuilderError) as caught:
        follow(b"a/x", BaseTree({}, {b"a": b"b", b"b": b"a"}))
    assert caught.value.code == "layers.symlink"


def collect(*layers: Sequence[TarEntry]) -> BaseTree:
    collector = BaseCollector()
    for layer in layers:
        collector.apply(layer)
    return collector.tree()


def d(name: bytes, mode: int = 0o755) -> TarEntry:
    return TarEntry(name, Kind.DIR, mode=mode)


def f(name: bytes) -> TarEntry:
    return TarEntry(name, Kind.FILE)


def s(name: bytes, link: bytes = b"x") -> TarEntry:
    return TarEntry(name, Kind.SYMLINK, link=link)


def test_a_base_is_its_layers_applied_in_order() -> None:
    tree = collect(
        [d(b""), d(b"a"), d(b"a/b"), s(b"a/l"), d(b"gone"), s(b"gone/l"), d(b"opaque"), d(b"opaque/old"),
         s(b"m", b"1")],
        [f(b".wh.gone"), d(b"opaque/new"), f(b"opaque/.wh..wh..opq"), s(b"m", b"2"), f(b"a/l"), d(b"a", 0o700)],
        [f(b"a/b"), d(b"m"), s(b"n", b"3"), f(b".wh.n")],
    )  # fmt: skip
    assert set(tree.folders) == {b"a", b"opaque", b"opaque/new", b"m"}
    assert tree.folders[b"a"].mode == 0o700
    assert dict(tree.symlinks) == {b"n": b"3"}


def test_a_file_that_replaces_a_folder_hides_what_was_in_it() -> None:
    tree = collect([d(b"a"), d(b"a/b"), s(b"a/l")], [s(b"a", b"elsewhere")])
    assert (dict(tree.folders), dict(tree.symlinks)) == ({}, {b"a": b"elsewhere"})


def test_a_record_of_a_base_survives_json() -> None:
    tree = collect([TarEntry(b"caf\xe9", Kind.DIR, mode=0o1777, gid=5, mtime_ns=9, xattrs={b"user.\xff": b"\0"}),
                    s(b"\xff", b"\xfe/x")])  # fmt: skip
    again = base_from_json(json.loads(json.dumps(base_to_json(tree))))
    assert again == tree


@pytest.mark.parametrize(
    "value", [{}, [], None, {"folders": {"a": [1]}, "symlinks": {}}, {"folders": 1, "symlinks": {}}]
)
def test_a_record_that_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(OciBuilderError) as caught:
        base_from_json(value)  # type: ignore[arg-type]
    assert caught.value.code == "json.shape"


def test_the_machine_root_agrees_with_its_own_links() -> None:
    """The collector on a real tar of this machine's top folders gives what the machine has."""
    made = subprocess.run(
        ["tar", "-c", "--no-recursion", "-C", "/", "bin", "usr", "usr/bin", "tmp", "lib"],
        capture_output=True,
        check=True,
    )
    collector = BaseCollector()
    collector.apply(TarReader([made.stdout], where="root"))
    tree = collector.tree()
    assert tree.folders[b"tmp"].mode == Path("/tmp").stat().st_mode & 0o7777
    for name in (b"bin", b"lib"):
        place = Path("/") / name.decode()
        assert (name in tree.symlinks) == place.is_symlink()
        assert Path("/") / follow(name, tree).decode() == place.resolve()
