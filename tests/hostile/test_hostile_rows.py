"""The page of the catalogue and its data say the same; and the rows that no table of inputs can hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from oci_builder.model.errors import PolicyError
from oci_builder.model.limits import GIB, Limits
from oci_builder.rootfs.layers_plan import Normal
from oci_builder.rootfs.plan import PlanOptions, plan_layers
from oci_builder.rootfs.scan import scan_tree
from oci_builder.rootfs.scan_content import content_digests
from oci_builder.store.blobs import DirStore
from oci_builder.wire.tar import TarReader
from tests.hostile import rows
from tests.hostile.cases import CASES
from tests.lab.ours import our_image, write_pair
from tests.lab.tarlang import base256, file, header, pax, record, tar
from tests.rootfs.rootfs_trees import awkward, fill

ROOT = Path(__file__).parents[2]


def test_the_page_is_the_data() -> None:
    """Both ways: the page's tables are those of the data, and every id of the data is on the page once."""
    text = rows.PAGE.read_text()
    assert rows.tables() in text
    written = re.findall(r"^\| (C\d+-\d+) \|", text, re.M)
    assert written == list(rows.ROWS)


def test_every_case_has_its_row_and_every_row_a_proof() -> None:
    listed = re.findall(r"^\| ([\w+-]+) \|", rows.PAGE.read_text(), re.M)
    assert {case.row for case in CASES} <= set(listed)
    assert [row for row in rows.ROWS if not rows.cases_of(row) and not rows.places(row)] == []


@pytest.mark.parametrize("row", rows.ROWS)
def test_named_tests_exist(row: str) -> None:
    assert [name for name in rows.places(row) if not (ROOT / "tests" / name).is_file()] == []


def test_c4_14_parents_come_first_and_no_whiteouts(tmp_path: Path) -> None:
    trees = {"one": scan_tree(awkward(tmp_path / "one")), "two": scan_tree(fill(tmp_path / "two", {"a/b/c": b"x"}))}
    options = PlanOptions("/opt/rt", Normal(0, 0, 0))
    for plan in plan_layers(trees, options, content_digests(list(trees.values()))):
        seen: set[bytes] = set()
        for item in plan.items:
            assert not item.name.rpartition(b"/")[2].startswith(b".wh.")
            parent = item.name.rpartition(b"/")[0]
            assert not parent or parent in seen, item.name
            seen.add(item.name)


@pytest.mark.parametrize("spelling", ["base-256", "record"])
def test_c7_09_more_than_8_gib(spelling: str) -> None:
    size = 9 * GIB
    head = header(b"big", size=base256(size, 12)) if spelling == "base-256" else (
        pax(record(b"size", b"%d" % size)) + header(b"big"))  # fmt: skip
    assert next(iter(TarReader([head], where="lab"))).size == size
    with pytest.raises(PolicyError) as error:
        next(iter(TarReader([head], where="lab", limits=Limits(entry_size=8 * GIB))))
    assert error.value.code == "limit.entry"


@pytest.mark.parametrize(("count", "most", "code"), [(2001, 2000, "limit.entries"), (2000, 2000, "")])
def test_c7_19_the_number_of_entries(count: int, most: int, code: str) -> None:
    layer = tar(*(file(b"f%d" % n) for n in range(count)))
    found = 0
    try:
        for _ in TarReader([layer], where="lab", limits=Limits(entries=most)):
            found += 1
    except PolicyError as error:
        assert error.code == code
    else:
        assert not code and found == count


def test_c9_11_no_helper_program() -> None:
    """What reads and writes bytes starts no process; only a build's own trees are looked at by more of this Python."""
    ours = ROOT / "oci_builder"
    looking = {ours / "rootfs/scan_fingerprint.py", ours / "rootfs/scan_helpers.py"}
    for folder in ("model", "wire", "store", "rootfs", "judge", "verify"):
        for path in {*(ours / folder).rglob("*.py")} - looking:
            names = {
                alias.name for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in [*node.names, ast.alias(getattr(node, "module", None) or "")]
            }  # fmt: skip
            assert not names & {"subprocess", "multiprocessing"}, path


def test_c10_12_a_layer_used_twice_is_stored_once(tmp_path: Path) -> None:
    import tarfile

    with DirStore(tmp_path / "store") as store:
        image = our_image(store)
        assert len(image.layers) == 4 and len({layer.diff_id for layer in image.layers}) == 3
        for path in write_pair(tmp_path, image, store):
            with tarfile.open(path) as archive:
                names = archive.getnames()
            blobs = [name for name in names if re.fullmatch(r"blobs/sha256/[0-9a-f]{64}", name)]
            assert len(blobs) == len(set(blobs)) == 3 + 2, "three layers, a manifest and a config"
