"""Where builds write: not into their inputs, and whole when two write to one place."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.model.errors import SpecError
from oci_builder.model.spec import Spec, parse_spec
from oci_builder.store.cache import BuildCache
from oci_builder.transports.places import check_places
from oci_builder.transports.unchanged import Outputs, input_key
from tests.conftest import write_spec

NAMES = ("one.tar", "two.tar", "record.json")


def spec_of(**changes: Any) -> Spec:
    text = {"name": "x", "tag": "t", "base": {"scratch": True}, "prefix": "/opt/rt", "tiers": {"a": {"path": "tier"}}}
    return parse_spec(json.dumps({**text, **changes}).encode())


@pytest.mark.parametrize(("changes", "out", "refused"), [
    ({}, "tier/out", "tiers.a.path"), ({}, "tier", "tiers.a.path"), ({}, "out", None), ({}, "tier-out", None),
    ({}, "link/out", "tiers.a.path"), ({"base": {"rootfs": "root"}}, "root/var/out", "base.rootfs"),
    ({"base": {"rootfs": "root", "exclude": ["var/out"]}}, "root/var/out", None),
    ({"base": {"rootfs": "root", "exclude": ["var/*"]}}, "root/var/out/deep", None),
    ({"base": {"oci": "root"}}, "root/out", "base.oci"), ({"files": "root"}, "root/out", "files"),
])  # fmt: skip
@pytest.mark.parametrize("which", ["out", "cache"])
def test_no_output_inside_an_input(
    tmp_path: Path, changes: dict[str, Any], out: str, refused: str | None, which: str
) -> None:
    """The next build would hold the last one's archives. Links are followed; nothing is made by asking."""
    (tmp_path / "tier").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("tier")
    places = [tmp_path / out, tmp_path / "elsewhere"]
    places = places if which == "out" else places[::-1]
    if refused is None:
        check_places(spec_of(**changes), tmp_path, *places)
    else:
        with pytest.raises(SpecError) as error:
            check_places(spec_of(**changes), tmp_path, *places)
        assert (error.value.code, error.value.fields["where"]) == ("spec.path", refused)
    assert not (tmp_path / "elsewhere").exists()


def test_a_missing_folder_of_files_is_the_specs_fault(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    with pytest.raises(SpecError) as error:
        input_key(spec_of(files="nowhere"), tmp_path, {"a": tmp_path / "tier"}, {}, "1")
    assert error.value.code == "spec.path"


def publish_often(folder: Path, who: str) -> None:
    with BuildCache(folder / "cache.sqlite") as cache:
        outputs = Outputs(folder / "out", NAMES, cache)
        for number in range(60):
            staging = folder / f"staging-{who}-{number}"
            staging.mkdir()
            for name in NAMES:
                (staging / name).write_text(json.dumps(f"{who} {number}"))
            outputs.publish(staging, who.encode())


def test_two_builds_into_one_folder_leave_the_files_of_one(tmp_path: Path) -> None:
    """And what is remembered of either is what it wrote."""
    (tmp_path / "out").mkdir()
    workers = [multiprocessing.Process(target=publish_often, args=(tmp_path, who)) for who in ("a", "b")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    left = {(tmp_path / "out" / name).read_text() for name in NAMES}
    assert len(left) == 1
    with BuildCache(tmp_path / "cache.sqlite") as cache:
        known = {who: Outputs(tmp_path / "out", NAMES, cache).known(who.encode()) for who in ("a", "b")}
    last = json.loads(left.pop())
    assert known == {who: {"record.json": last} if last.startswith(who) else None for who in ("a", "b")}


@pytest.mark.parametrize("path", ["loop", "/".join(["d" * 200] * 19)], ids=["loop", "too long below its folder"])
def test_inputs_that_cannot_be_looked_for(tmp_path: Path, path: str) -> None:
    folder = tmp_path / ("f" * 250)
    folder.mkdir()
    (folder / "loop").symlink_to("loop")
    with pytest.raises(SpecError) as error:
        check_places(spec_of(tiers={"a": {"path": path}}), folder, tmp_path / "out", tmp_path / "cache")
    assert error.value.code == "spec.path"


@pytest.mark.parametrize("which", ["out", "cache"])
def test_a_file_in_the_place_of_a_folder_is_our_input_being_wrong(tmp_path: Path, which: str) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / which).symlink_to("nowhere/at/all")
    with pytest.raises(SpecError) as caught:
        build(write_spec(tmp_path, {"one": tmp_path / "tier"}), tmp_path / "out", BuildOptions(tmp_path / "cache"))
    assert caught.value.code == "spec.path" and f"--{which} " in caught.value.message


def test_a_folder_in_the_place_of_an_output_is_named(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "out/runtime.oci.tar").mkdir(parents=True)
    with pytest.raises(SpecError) as caught:
        build(write_spec(tmp_path, {"one": tmp_path / "tier"}), tmp_path / "out", BuildOptions(tmp_path / "cache"))
    assert caught.value.code == "spec.path" and str(tmp_path / "out/runtime.oci.tar") in caught.value.message
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["runtime.oci.tar"]
