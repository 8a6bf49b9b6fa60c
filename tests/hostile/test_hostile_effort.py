"""What an archive gets for a few bytes must not take us for long: folders that have many names, and long ways to them.

C7-19 is such a kind: the bound of its cases is time and memory, whatever the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oci_builder.difference import diff_archives
from oci_builder.inspection import inspect_archive
from oci_builder.model.errors import PolicyError
from oci_builder.model.limits import Limits
from oci_builder.rootfs.tree_model import TreeModel
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.verify import VerifyOptions, verify_archives
from oci_builder.wire.tar import TarReader
from tests.hostile.test_hostile_limits import Bound
from tests.lab.archives import Lab, write
from tests.lab.oracle import within
from tests.lab.tarlang import file, folder, hardlink, pax, record, symlink, tar

MANY = 2000
# Idle, a seventh of it or less; what looked at everything again took 2, 22 and 4 s.
SECONDS = {"verify": 1.0, "unpack": 8.0, "diff": 2.0}
Layers = Callable[[], list[bytes]]


def names_of_one_folder(target: bytes, hides: bytes) -> Layers:
    """A folder full of files of this layer, as many links to (above) it, and whiteouts through all of them."""
    return lambda: [tar(file(b"d/old")), tar(
        *(symlink(b"l%d" % n, target) for n in range(MANY)), *(file(b"d/f%d" % n) for n in range(MANY)),
        *(file(b"l%d/%s" % (n, hides)) for n in range(MANY)))]  # fmt: skip


def long_ways() -> list[bytes]:
    """C6-05: forty links, each over as many folders as a link may name, and files beyond them."""
    steps = b"a/../" * 63
    links = [symlink(b"m0", b"d"), *(
        pax(record(b"linkpath", steps + b"m%d" % (n - 1))) + symlink(b"m%d" % n, b"x") for n in range(1, 39))]
    return [tar(folder(b"a"), folder(b"d"), *links), tar(*(file(b"m38/f%d" % n) for n in range(MANY)))]


WAYS: dict[str, Layers] = {
    "opaque": names_of_one_folder(b"d", b".wh..wh..opq"),
    "whiteouts of it": names_of_one_folder(b".", b".wh.d"),
    "whiteouts of a folder above it": names_of_one_folder(b"/", b".wh.d"),
    "long links": long_ways,
    "whiteouts of files": lambda: [
        tar(*(file(b"f%d" % n) for n in range(4 * MANY))), tar(*(file(b".wh.f%d" % n) for n in range(4 * MANY)))],
}  # fmt: skip


def verify(archive: Path) -> None:
    assert verify_archives([archive], VerifyOptions(threads=1)).ok


def unpack(archive: Path) -> None:
    unpack_image(archive, archive.with_name("out"), UnpackOptions(threads=1))


def diff(archive: Path) -> None:
    assert diff_archives(archive, archive).same


@pytest.mark.parametrize("verb", [verify, unpack, diff], ids=lambda verb: str(verb.__name__))
@pytest.mark.parametrize("way", WAYS)
def test_work_is_in_proportion_to_the_entries(way: str, verb: Callable[[Path], None], tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", Lab(layers=WAYS[way]()).oci())
    with within(SECONDS[verb.__name__]):
        verb(archive)


def test_inspect_takes_no_longer_than_verify(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", Lab(layers=WAYS["opaque"]()).oci())
    with within(SECONDS["verify"]):
        inspect_archive(archive)


def test_what_is_hidden_twice_is_as_if_hidden_once(tmp_path: Path) -> None:
    """C4-04, C4-06: the second whiteout of a folder in a layer finds nothing of a lower one, also below it."""
    layers = [
        tar(file(b"d/old"), file(b"d/s/old"), folder(b"e")),
        tar(symlink(b"l", b"d"), file(b"d/.wh..wh..opq"), file(b"d/s/new", b"1"), file(b"l/.wh..wh..opq"),
            file(b"d/t/new", b"2"), file(b".wh.d"), file(b"l/.wh.s"), folder(b"e"), file(b".wh.e")),
        tar(file(b"d/.wh..wh..opq"), file(b"d/u", b"3")),
    ]  # fmt: skip
    for count, left in ((2, ["s", "t"]), (3, ["u"])):
        archive = write(tmp_path / f"{count}.tar", Lab(layers=layers[:count]).oci())
        unpack_image(archive, tmp_path / str(count))
        assert sorted(p.name for p in (tmp_path / str(count) / "d").iterdir()) == left
        assert (tmp_path / str(count) / "e").is_dir()
        model = TreeModel()
        for layer in layers[:count]:
            model.apply(TarReader([layer]))
        d = model.root.children[b"d"]
        assert sorted(d.children) == [name.encode() for name in left]  # type: ignore[union-attr]


def test_a_link_over_more_components_than_a_path_may_have_is_refused(tmp_path: Path) -> None:
    """C6-05, C7-19: verify and unpack by the same code; dots and doubled slashes are no components."""

    def layer(parts: bytes) -> list[bytes]:
        return [tar(pax(record(b"linkpath", parts)), symlink(b"l", b"x"))]

    bound = Bound(128, Lab(layers=layer(b"../" * 128 + b"x")), "limit.depth")
    archive = write(tmp_path / "a.tar", bound.lab.oci())
    assert [f.code for f in verify_archives([archive]).errors] == [bound.code]
    with pytest.raises(PolicyError) as error:
        unpack(archive)
    assert error.value.code == bound.code
    fine = write(tmp_path / "b.tar", Lab(layers=layer(b".///" * 500 + b"../" * 127 + b"x")).oci())
    verify(fine)
    assert [f.code for f in verify_archives([fine], VerifyOptions(limits=Limits(depth=100))).errors] == ["limit.depth"]


def test_diff_knows_the_tree_that_unpack_makes(tmp_path: Path) -> None:
    """B104, C4-12, C5-11, C6-13: however the layers are cut and through whatever links names lead."""
    cut = write(tmp_path / "cut.tar", Lab(layers=[
        tar(folder(b"usr/lib"), symlink(b"lib", b"usr/lib"), file(b"d/gone", b"1"), file(b"f", b"2")),
        tar(file(b"lib/x", b"3"), file(b"d", b"4"), file(b".wh.f"), hardlink(b"lib/y", b"lib/x")),
        tar(hardlink(b"lib/z", b"usr/lib/y")),
    ]).oci())  # fmt: skip
    flat = write(tmp_path / "flat.tar", Lab(layers=[tar(
        folder(b"usr/lib"), symlink(b"lib", b"usr/lib"), file(b"usr/lib/x", b"3"), hardlink(b"usr/lib/y", b"usr/lib/x"),
        hardlink(b"usr/lib/z", b"usr/lib/x"), file(b"d", b"4"))]).oci())  # fmt: skip
    assert not any(diff_archives(cut, flat).files.values())
