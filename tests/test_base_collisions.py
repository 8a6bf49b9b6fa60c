"""A base that has what our layers would hide, replace or mix with: refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.model.errors import SpecError
from oci_builder.rootfs.layers_assemble import InlineFile, assemble, place_files, place_tree, rewrite_parents
from oci_builder.rootfs.layers_base import BaseCollector
from oci_builder.rootfs.layers_plan import BaseTree
from oci_builder.rootfs.scan import scan_tree
from oci_builder.unpack import unpack_image
from oci_builder.wire.tar import Kind, TarEntry
from tests.conftest import small_tiers, write_spec

BUILT = "built"


def outcome(tmp_path: Path, prefix: str, prepare: Callable[[Path], object]) -> tuple[str, str]:
    """Build on a base folder; the error's code and message, or ``built``."""
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    prepare(root)
    spec = write_spec(tmp_path, small_tiers(tmp_path), base={"rootfs": str(root)}, prefix=prefix)
    try:
        build(spec, tmp_path / "out", BuildOptions(tmp_path / "cache", 2))
    except SpecError as error:
        assert list((tmp_path / "out").iterdir()) == []
        return error.code, error.message
    return BUILT, ""


def file_at(place: str) -> Callable[[Path], object]:
    def prepare(root: Path) -> None:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text("of the base\n")

    return prepare


def link_at(place: str, target: str, more: Callable[[Path], object] = lambda _root: None) -> Callable[[Path], object]:
    def prepare(root: Path) -> None:
        (root / place).symlink_to(target)
        more(root)

    return prepare


@pytest.mark.parametrize(("prefix", "prepare", "named"), [
    ("/etc/passwd", file_at("etc/shadow"), "/etc/passwd"),
    ("/etc/passwd/rt", file_at("etc/shadow"), "/etc/passwd"),
    ("/opt/rt", link_at("opt", "/etc/passwd"), "/etc/passwd"),
    ("/opt/rt", file_at("opt/rt/envs"), "/opt/rt/envs"),
    ("/opt/rt", file_at("opt/rt/envs/one"), "/opt/rt/envs/one"),
])  # fmt: skip
def test_a_prefix_through_a_file_of_the_base_is_refused(
    tmp_path: Path, prefix: str, prepare: Callable[[Path], object], named: str
) -> None:
    """The file would become a folder in the image, without a word."""
    code, message = outcome(tmp_path, prefix, prepare)
    assert code == "layers.base"
    assert repr(named) in message


@pytest.mark.parametrize("prepare", [
    file_at("opt/rt/envs/two/stale"), file_at("opt/rt/envs/two/lib/pkg/deep/stale"),
    link_at("opt", "usr/opt", file_at("usr/opt/rt/envs/two/stale")),
])  # fmt: skip
def test_a_base_with_something_in_a_tier_is_refused(tmp_path: Path, prepare: Callable[[Path], object]) -> None:
    """The tier of the image would hold it too, the portable one not."""
    code, message = outcome(tmp_path, "/opt/rt", prepare)
    assert code == "layers.base"
    assert "envs/two" in message


def test_what_the_base_has_beside_the_tiers_stays(tmp_path: Path) -> None:
    """Empty folders of a tier's name, and files in the folders above, are no obstacle."""

    def prepare(root: Path) -> None:
        (root / "opt/rt/envs/one").mkdir(parents=True)
        file_at("opt/rt/README")(root)
        file_at("opt/rt/envs/other/x")(root)

    assert outcome(tmp_path, "/opt/rt", prepare) == (BUILT, "")
    unpack_image(tmp_path / "out/runtime.oci.tar", tmp_path / "unpacked")
    for kept in ("opt/rt/README", "opt/rt/envs/other/x", "opt/rt/envs/one/bin/hello"):
        assert (tmp_path / "unpacked" / kept).is_file()


def base_of(*layers: list[TarEntry]) -> BaseTree:
    collector = BaseCollector()
    for layer in layers:
        collector.apply(layer)
    return collector.tree()


def entry(name: bytes, kind: Kind = Kind.FILE) -> TarEntry:
    return TarEntry(name, kind)


@pytest.mark.parametrize("folder", [entry(b"opt/rt/activate.sh", Kind.DIR), entry(b"opt/rt/activate.sh/deep/x")])
def test_a_file_of_ours_over_a_folder_of_the_base_is_refused(folder: TarEntry) -> None:
    """Also over one that only a path below it tells of, as in a tar without entries for folders."""
    plan = assemble("inventory", place_files({b"activate.sh": InlineFile(b"x")}, b"opt/rt"))
    with pytest.raises(SpecError) as caught:
        rewrite_parents(plan, base_of([folder]))
    assert caught.value.code == "layers.base"


def test_a_tree_beside_the_tiers_is_not_mixed_with_the_base(tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python/python3").write_text("x")
    base = base_of([entry(b"opt/rt/python", Kind.DIR), entry(b"opt/rt/python/stale", Kind.SYMLINK)])
    with pytest.raises(SpecError) as caught:
        assemble("python", place_tree(scan_tree(tmp_path / "python"), b"opt/rt/python"), base=base)
    assert caught.value.code == "layers.base"


@pytest.mark.parametrize("above", [
    [entry(b"a/.wh.f"), entry(b"b/.wh..wh..opq"), entry(b".wh.c")],
    [entry(b"a/f", Kind.DIR), entry(b"b", Kind.SYMLINK), entry(b"c", Kind.SYMLINK)],
])  # fmt: skip
def test_files_that_an_upper_layer_of_the_base_removes_are_gone(above: list[TarEntry]) -> None:
    lower = [entry(b"a/f"), entry(b"b/f"), entry(b"b/deep/f"), entry(b"c"), entry(b"d/stays")]
    tree = base_of(lower, above)
    assert [path for path in (b"a/f", b"b/f", b"b/deep/f", b"c", b"d/stays") if tree.has_file(path)] == [b"d/stays"]
    assert not tree.has_folder(b"b/deep")
