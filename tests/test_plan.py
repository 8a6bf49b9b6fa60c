"""The plan: disjoint layers, links closed inside one layer, every path once, whatever the tiers hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from oci_builder.rootfs.layers_plan import BaseTree, LayerPlan, Normal, PlannedEntry, check_disjoint, folder_entry
from oci_builder.rootfs.layers_plan import order as sort_key
from oci_builder.rootfs.plan import MAX_LINKS, PlanOptions, plan_layers
from oci_builder.rootfs.scan import SourceEntry, Tree
from oci_builder.rootfs.scan_content import LINK_FLOOR
from oci_builder.wire.tar import Kind

SECOND = 1_000_000_000
OPTIONS = PlanOptions("/opt/rt", Normal(epoch=1000))


def make_tree(files: Mapping[str, SourceEntry]) -> Tree:
    """A tree of these entries, with the folders that lead to them."""
    entries = {b"": folder(b"")}
    for path, entry in files.items():
        name = path.encode()
        for count in range(1, len(name.split(b"/"))):
            above = b"/".join(name.split(b"/")[:count])
            entries.setdefault(above, folder(above))
        entries[name] = replace(entry, path=name)
    return Tree(Path("/src"), tuple(sorted(entries.values(), key=lambda e: sort_key(e.path))), started_ns=1 << 60)


def folder(path: bytes) -> SourceEntry:
    return SourceEntry(path, Kind.DIR, 0o755, 7, 7, 0, 5 * SECOND, 0, 1, hash(path) % 1000 + 10_000, 2)


def file(ino: int, size: int = 3, mode: int = 0o644, mtime: int = 7, nlink: int = 2, dev: int = 1) -> SourceEntry:
    return SourceEntry(b"", Kind.FILE, mode, 7, 7, size, mtime * SECOND, 0, dev, ino, nlink)


def link(target: bytes) -> SourceEntry:
    return SourceEntry(b"", Kind.SYMLINK, 0o777, 7, 7, 0, SECOND, 0, 1, 1, 1, target)


def names(plan: LayerPlan) -> list[str]:
    return [item.name.decode() for item in plan.items]


def item(plans: tuple[LayerPlan, ...], name: str) -> tuple[LayerPlan, PlannedEntry]:
    return next((plan, found) for plan in plans for found in plan.items if found.name == name.encode())


def test_one_inode_in_two_tiers_is_one_group_in_a_shared_layer() -> None:
    tiers = {"base": make_tree({"x": file(1)}), "vllm": make_tree({"y": file(1), "z": file(2)})}
    shared, own = plan_layers(tiers, OPTIONS)
    assert (shared.name, shared.tiers, own.name) == ("base+vllm", ("base", "vllm"), "vllm")
    assert names(shared) == ["opt", "opt/rt", "opt/rt/envs", "opt/rt/envs/base", "opt/rt/envs/base/x",
                             "opt/rt/envs/vllm", "opt/rt/envs/vllm/y"]  # fmt: skip
    assert shared.items[-1].entry.kind is Kind.HARDLINK
    assert shared.items[-1].entry.link == b"opt/rt/envs/base/x"
    assert names(own)[-1] == "opt/rt/envs/vllm/z"


def test_equal_digests_share_and_unequal_ones_do_not() -> None:
    tiers = {"a": make_tree({"x": file(1)}), "b": make_tree({"x": file(2), "y": file(3)})}
    plans = plan_layers(tiers, OPTIONS, {(1, 1): b"same", (1, 2): b"same", (1, 3): b"other"})
    assert [(plan.name, sum(i.source.kind is Kind.FILE for i in plan.items)) for plan in plans] == [
        ("a+b", 2),
        ("b", 1),
    ]


def test_equal_inode_numbers_on_two_devices_are_not_linked() -> None:
    """C6-15."""
    tiers = {"a": make_tree({"x": file(1, dev=1)}), "b": make_tree({"x": file(1, dev=2)})}
    assert [plan.name for plan in plan_layers(tiers, OPTIONS)] == ["a", "b"]


def test_other_metadata_is_not_shared() -> None:
    for other in (file(1, mode=0o755), file(1, mtime=8), replace(file(1), xattrs=((b"user.a", b"1"),))):
        tiers = {"a": make_tree({"x": file(1)}), "b": make_tree({"x": other})}
        assert [plan.name for plan in plan_layers(tiers, OPTIONS, {(1, 1): b"same"})] == ["a", "b"]


def test_times_that_the_epoch_clamps_to_the_same_are_the_same() -> None:
    tiers = {"a": make_tree({"x": file(1, mtime=2000)}), "b": make_tree({"x": file(2, mtime=3000)})}
    plans = plan_layers(tiers, OPTIONS, {(1, 1): b"same", (1, 2): b"same"})
    assert [plan.name for plan in plans] == ["a+b"]
    assert item(plans, "opt/rt/envs/a/x")[1].entry.mtime_ns == 1000 * SECOND


def test_files_patched_at_run_time_are_never_linked() -> None:
    tiers = {"a": make_tree({"p/x": file(1), "p/y": file(1)}), "b": make_tree({"p/x": file(1), "q": file(1)})}
    plans = plan_layers(tiers, replace(OPTIONS, never_share=("p/x",)))
    for name in ("opt/rt/envs/a/p/x", "opt/rt/envs/b/p/x"):
        plan, found = item(plans, name)
        assert (plan.tiers, found.carries, found.target) == ((name.split("/")[3],), 3, None)
    assert all(i.target is None or not i.target.name.endswith(b"p/x") for plan in plans for i in plan.items)
    assert item(plans, "opt/rt/envs/a/p/y")[0].name == "a+b"


def test_twins_of_one_tier_are_linked_only_when_that_saves_something() -> None:
    small, large = file(1, nlink=1), file(3, size=LINK_FLOOR, nlink=1)
    tiers = {"a": make_tree({"s": small, "t": replace(small, ino=2), "l": large, "m": replace(large, ino=4)})}
    same = {(1, 1): b"small", (1, 2): b"small", (1, 3): b"large", (1, 4): b"large"}
    plans = plan_layers(tiers, OPTIONS, same)
    assert item(plans, "opt/rt/envs/a/t")[1].target is None
    assert item(plans, "opt/rt/envs/a/m")[1].target is item(plans, "opt/rt/envs/a/l")[1]


def test_empty_files_stay_in_their_tiers_and_keep_their_own_links() -> None:
    tiers = {"a": make_tree({"x": file(1, size=0), "y": file(1, size=0)}), "b": make_tree({"x": file(1, size=0)})}
    plans = plan_layers(tiers, OPTIONS)
    assert [plan.name for plan in plans] == ["a", "b"]
    assert item(plans, "opt/rt/envs/a/y")[1].entry.link == b"opt/rt/envs/a/x"


def test_a_group_ends_before_a_file_system_refuses_its_links() -> None:
    tiers = {"a": make_tree({f"f{number:05}": file(1) for number in range(MAX_LINKS + 1)})}
    (plan,) = plan_layers(tiers, OPTIONS)
    assert [i.name for i in plan.items if i.carries] == [b"opt/rt/envs/a/f00000", b"opt/rt/envs/a/f%05d" % MAX_LINKS]


def test_empty_folders_and_links_go_to_their_tier() -> None:
    shared = {"lib/x": file(1)}
    tiers = {
        "a": make_tree(shared | {"lib/link": link(b"x"), "empty/deep": folder(b"")}),
        "b": make_tree(shared),
    }
    plans = plan_layers(tiers, OPTIONS)
    assert [plan.name for plan in plans] == ["a+b", "a"]
    assert "opt/rt/envs/a/empty/deep" in names(plans[1])
    assert "opt/rt/envs/a/lib" in names(plans[0])
    assert "opt/rt/envs/a/lib" in names(plans[1])


def test_an_empty_tier_is_there() -> None:
    (plan,) = plan_layers({"a": make_tree({})}, OPTIONS)
    assert names(plan) == ["opt", "opt/rt", "opt/rt/envs", "opt/rt/envs/a"]


def test_layers_come_most_shared_first_whatever_the_order_of_the_tiers() -> None:
    trees = {
        "c": make_tree({"all": file(1), "c": file(2), "bc": file(3)}),
        "a": make_tree({"all": file(1), "a": file(4)}),
        "b": make_tree({"all": file(1), "b": file(5), "bc": file(3)}),
    }
    seen = set()
    for arrangement in itertools.permutations(trees):
        plans = plan_layers({name: trees[name] for name in arrangement}, OPTIONS)
        seen.add(tuple((plan.name, tuple(names(plan))) for plan in plans))
    assert [name for name, _ in seen.pop()] == ["a+b+c", "b+c", "a", "b", "c"]
    assert not seen


def test_owner_and_times_are_normal() -> None:
    """B118, C8-11."""
    (plan,) = plan_layers({"a": make_tree({"new": file(1, mtime=5000), "old": file(2, mtime=-3)})}, OPTIONS)
    for planned in plan.items:
        entry = planned.entry
        assert (entry.uid, entry.gid, entry.uname, entry.gname) == (0, 0, b"", b"")
        assert 0 <= entry.mtime_ns <= 1000 * SECOND
        assert entry.mtime_ns % SECOND == 0
    owned = replace(OPTIONS, normal=Normal(1000, 12, 34))
    assert {(i.entry.uid, i.entry.gid) for i in plan_layers({"a": make_tree({})}, owned)[0].items} == {(12, 34)}


def test_folders_above_the_prefix_are_as_in_the_base() -> None:
    """B120: /tmp stays 1777 when the runtime is put below it."""
    tmp = replace(folder_entry(b"tmp", 0o1777), uid=0, gid=5)
    options = PlanOptions("/tmp/rt", base=BaseTree({b"tmp": tmp}))
    (plan,) = plan_layers({"a": make_tree({})}, options)
    first = plan.items[0].entry
    assert (first.name, first.mode, first.gid) == (b"tmp", 0o1777, 5)
    assert plan.items[1].entry.mode == 0o755


# Trees for properties: few names, inodes and contents, so that everything meets everything.
_PATHS = st.lists(st.sampled_from(["a", "b", "c", "d.e"]), min_size=1, max_size=3).map("/".join)
_ENTRIES = st.one_of(st.tuples(st.just("file"), st.integers(1, 8)), st.just(("link", 0)), st.just(("folder", 0)))
_TREES = st.dictionaries(_PATHS, _ENTRIES, max_size=12)


def _build(shape: Mapping[str, tuple[str, int]], never_links: int) -> Tree:
    files: dict[str, SourceEntry] = {}
    leaves = [path for path in shape if not any(other.startswith(path + "/") for other in shape)]
    for path in leaves:
        kind, ino = shape[path]
        # Inodes 1 and 2, 3 and 4, ... have equal content; the last ones are large.
        entry = file(ino, LINK_FLOOR * (1 + ino // 2) if ino > 6 else (ino + 1) // 2, nlink=3)
        files[path] = {"file": entry, "link": link(b"a"), "folder": folder(b"")}[kind]
    return make_tree(files)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["base", "auto", "vllm"]), _TREES, min_size=1), st.booleans())
def test_every_path_once_links_closed_parents_first(shapes: dict[str, dict[str, tuple[str, int]]], hide: bool) -> None:
    """B099, B100."""
    trees = {name: _build(shape, 0) for name, shape in shapes.items()}
    contents = {(1, ino): b"%d" % ((ino + 1) // 2) for ino in range(1, 7)}
    options = replace(OPTIONS, never_share=("a*",) if hide else ())
    plans = plan_layers(trees, options, contents)
    check_disjoint(plans)
    wanted = {
        (f"opt/rt/envs/{name}/".encode() + e.path).rstrip(b"/"): e for name, t in trees.items() for e in t.entries
    }
    found: dict[bytes, PlannedEntry] = {}
    for plan in plans:
        keys = [sort_key(i.name) for i in plan.items]
        assert keys == sorted(set(keys))
        here: dict[bytes, PlannedEntry] = {}
        for planned in plan.items:
            parent = planned.name.rpartition(b"/")[0]
            assert not parent or here[parent].source.kind is Kind.DIR
            if planned.target is not None:
                assert here[planned.target.name] is planned.target
                assert planned.target.target is None
                assert planned.source.size == planned.target.source.size
                assert not hide or not planned.source.path.startswith(b"a")
            here[planned.name] = planned
        found |= here
    assert {name: found[name].source for name in wanted} == wanted
    assert set(found) - set(wanted) == {b"opt", b"opt/rt", b"opt/rt/envs"}


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["base", "auto", "vllm"]), _TREES, min_size=1), st.randoms())
def test_the_plan_does_not_depend_on_how_files_are_linked(
    shapes: dict[str, dict[str, tuple[str, int]]], chance: random.Random
) -> None:
    """Copies and hard links between tiers give the same layers: what counts is content."""

    def headers(split: bool) -> list[tuple[str, list[object]]]:
        trees, contents = {}, {}
        for index, (name, shape) in enumerate(sorted(shapes.items())):
            tree = _build(shape, 0)
            offset = 100 * (index + 1) if split else 0
            moved = tuple(replace(e, ino=e.ino + offset) if e.kind is Kind.FILE else e for e in tree.entries)
            trees[name] = replace(tree, entries=moved)
            contents |= {(1, ino + offset): b"%d" % ((ino + 1) // 2) for ino in range(1, 9)}
        return [(p.name, [(i.entry.name, i.entry.kind, i.entry.link, i.entry.size) for i in p.items])
                for p in plan_layers(trees, OPTIONS, contents)]  # fmt: skip

    assert headers(True) == headers(False)
