"""Archives whose documents name the same things over and over: work is bounded by what is there, not by the naming."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.unpack import unpack_image
from oci_builder.verify import verify_archives
from tests.lab import tarlang as t
from tests.lab.archives import OCI, Lab, Members, descriptor, dump, sha, write
from tests.lab.oracle import within

# Seconds of CPU; the slowest takes a tenth of it on an idle machine, and minutes where the naming is followed.
MOST = 20


def codes(path: Path) -> set[str]:
    """The errors of ``verify``; ``unpack`` must come to one of them, or succeed as well."""
    with within(MOST):
        found = {finding.code for finding in verify_archives([path]).errors}
        try:
            unpack_image(path, path.with_name("out"))
        except OciBuilderError as error:
            assert error.code in found
        else:
            assert not found
    return found


def fan_out(width: int, *, same: bool) -> Callable[[Members], Members]:
    """Three indexes deep, each naming the one below ``width`` times; or as many indexes that differ."""

    def edit(members: Members) -> Members:
        out = dict(members)
        level = json.loads(members["index.json"])["manifests"]
        for depth in range(3):
            many = [one | {"annotations": {"n": f"{n}"}} for n in range(width) for one in level[:1]]
            made = []
            for number in range(1 if same or depth == 2 else width):
                index = dump({"schemaVersion": 2, "mediaType": OCI + "index.v1+json", "manifests": many if same else [
                    *level[: width - 1], *many[: 1 if len(level) > 1 else width - 1]], "annotations": {"n": f"{number}"}})
                out["blobs/sha256/" + sha(index)] = index
                made.append(descriptor(OCI + "index.v1+json", index))
            level = made
        out["index.json"] = out["blobs/" + level[0]["digest"].replace(":", "/")]
        return out

    return edit


def test_an_index_that_names_one_image_262144_times_is_walked_once(tmp_path: Path) -> None:
    lab = Lab(edit_members=fan_out(64, same=True))
    assert codes(write(tmp_path / "a.tar", lab.oci())) == set()


def test_as_many_indexes_that_differ_are_in_bounds(tmp_path: Path) -> None:
    lab = Lab(edit_members=fan_out(64, same=False))
    assert codes(write(tmp_path / "a.tar", lab.oci())) <= {"limit.manifests"}


@pytest.mark.parametrize("where", ["manifest.json", "diff_ids"])
def test_layers_beyond_the_limit_are_refused_in_docker_archives_too(where: str, tmp_path: Path) -> None:
    """SECURITY.md: ``layers``."""
    lab = Lab()
    if where == "manifest.json":
        lab.edit_docker = lambda items: [items[0] | {"Layers": items[0]["Layers"][:1] * 5000}]
    else:
        lab.edit_config = lambda c: c | {"rootfs": c["rootfs"] | {"diff_ids": c["rootfs"]["diff_ids"][:1] * 5000}}
    assert "limit.layers" in codes(write(tmp_path / "a.tar", lab.docker()))


def many_images(count: int, layers: int) -> Callable[[list[dict[str, object]]], list[dict[str, object]]]:
    return lambda items: [items[0] | {"RepoTags": [f"x:{n}"], "Layers": items[0]["Layers"] * layers} for n in range(count)]  # type: ignore[operator]


def test_many_images_of_many_layers_in_one_docker_archive_are_refused(tmp_path: Path) -> None:
    folders = t.tar(*(t.folder(b"d%d" % n) + t.file(b"d%d/f" % n) for n in range(2000)))
    lab = Lab(layers=[folders], edit_docker=many_images(600, 20))
    lab.edit_config = lambda c: c | {"rootfs": c["rootfs"] | {"diff_ids": c["rootfs"]["diff_ids"] * 20}, "history": None}
    assert "limit.manifests" in codes(write(tmp_path / "a.tar", lab.docker()))


def test_one_large_layer_as_often_as_the_limit_lets_is_judged_in_bounds(tmp_path: Path) -> None:
    """Each of the layers is held against all below it."""
    times = DEFAULT_LIMITS.layers
    most = DEFAULT_LIMITS.folders // times
    folders = t.tar(*(t.folder(b"d%d" % n) + t.file(b"d%d/f" % n) for n in range(most)))
    lab = Lab(layers=[folders], edit_docker=many_images(1, times))
    lab.edit_config = lambda c: c | {"rootfs": c["rootfs"] | {"diff_ids": c["rootfs"]["diff_ids"] * times}, "history": None}
    with within(MOST):
        assert verify_archives([write(tmp_path / "a.tar", lab.docker())]).ok


def test_a_docker_archive_of_sixty_tagged_images_passes(tmp_path: Path) -> None:
    lab = Lab(edit_docker=many_images(60, 1))
    assert verify_archives([write(tmp_path / "a.tar", lab.docker())]).ok
