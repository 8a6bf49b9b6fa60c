"""Every limit can be set from the spec, and then binds, in every verb that reads an archive."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.inspection import inspect_archive
from oci_builder.model.errors import OciBuilderError
from oci_builder.model.limits import Limits
from oci_builder.model.spec import load_spec
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.verify import VerifyOptions, verify_archives
from tests.hostile.cases_documents import nested, second_image
from tests.lab.archives import Lab, files, write
from tests.lab.images import small_image
from tests.lab.registry import Registry, held_until, on
from tests.lab.tarlang import file, folder, hardlink, long_name, pax, record, symlink, tar


@dataclass(frozen=True)
class Bound:
    """What a limit refuses: the value, an image that is beyond it, and the code."""

    value: int
    lab: Lab
    code: str
    docker: bool = False


ZEROS = Lab(layers=[tar(file(b"zeros", bytes(3 << 20)))])
DEEP = Lab(layers=[tar(file(b"a/b/c/d/e", b"x"))])
LONG = Lab(layers=[tar(file(b"a-long-name", b"x" * 40))])
MANY = Lab(layers=[tar(*(file(b"f%d" % n) for n in range(5)))])
# Names that do not compress, so that the log of them has some size.
NAMES = tar(*(file(b"%032x" % random.Random(n).getrandbits(128)) for n in range(1500)), file(b"low"))
BOUNDS = {
    "document": Bound(200, Lab(), "limit.document"),
    "docker_manifest": Bound(40, Lab(), "limit.document", docker=True),
    "json_depth": Bound(2, Lab(), "json.depth"),
    "record": Bound(30, Lab(layers=[tar(pax(record(b"comment", b"x" * 50)), file(b"f"))]), "limit.record"),
    "pax_headers": Bound(1, Lab(layers=[tar(long_name(b"f\0"), pax(record(b"mtime", b"1")), file(b"x"))]), "limit.pax_headers"),
    "pax_records": Bound(
        2, Lab(layers=[tar(pax(*(record(b"k%d" % n, b"v") for n in range(3))), file(b"f"))]), "limit.record"),
    "pax_bytes": Bound(
        30, Lab(layers=[tar(*(pax(record(b"comment", b"v" * 5)) + file(b"f%d" % n) for n in range(2)))]), "limit.pax_bytes"),
    "name": Bound(8, LONG, "limit.name"),
    "component": Bound(8, LONG, "limit.name"),
    "depth": Bound(3, DEEP, "limit.depth"),
    "entries": Bound(4, MANY, "limit.entries"),
    "archive_entries": Bound(1, Lab(), "limit.entries"),
    "folders": Bound(3, DEEP, "limit.folders"),
    "entry_size": Bound(39, LONG, "limit.entry"),
    "layer_size": Bound(2000, Lab(), "limit.layer"),
    "image_size": Bound(3000, Lab(), "limit.image"),
    "ratio": Bound(2, ZEROS, "limit.ratio"),
    "ratio_floor": Bound(1 << 20, ZEROS, "limit.ratio"),
    "zstd_window": Bound(1024, Lab(layers=[files(a=bytes(range(256)) * 40)], pack="zstd"), "zstd.window"),
    "index_depth": Bound(1, Lab(edit_members=nested(1)), "limit.index_depth"),
    "manifests": Bound(1, Lab(edit_members=second_image({"os": "linux", "architecture": "arm64"})), "limit.manifests"),
    "layers": Bound(1, Lab(), "limit.layers"),
    "logged_names": Bound(20_000, Lab(layers=[NAMES, tar(hardlink(b"up", b"low"))]), "limit.entries"),
    "tree_memory": Bound(20_000, Lab(layers=[NAMES, tar(hardlink(b"up", b"low"))]), "limit.entries"),
    "late_links": Bound(1, Lab(layers=[tar(hardlink(b"a", b"t"), hardlink(b"b", b"t"), file(b"t"))]), "limit.entries"),
    "symlink_follows": Bound(1, Lab(layers=[tar(
        folder(b"d"), symlink(b"l", b"d"), symlink(b"m", b"l"), file(b"m/f"))]), "path.loop"),
    "archive_members": Bound(3, Lab(), "limit.members"),
    "xattr_size": Bound(3, Lab(layers=[tar(
        pax(record(b"SCHILY.xattr.user.a", b"four")), file(b"f"))]), "limit.xattr"),
}  # fmt: skip
# The ratio applies past its floor only: to see one, the other must let it.
HELPERS = {"ratio": {"ratio_floor": 1 << 20}, "ratio_floor": {}}


def spec_of(folder: Path, base: dict[str, str], limits: dict[str, int]) -> Path:
    (folder / "tier").mkdir(exist_ok=True)
    (folder / "tier" / "f").write_bytes(b"x")
    path = folder / "spec.json"
    path.write_text(json.dumps({
        "name": "l", "tag": "t", "base": base, "prefix": "/opt", "tiers": {"one": {"path": "tier"}}, "limits": limits,
    }))  # fmt: skip
    return path


def codes(verb: str, archive: Path, spec: Path, folder: Path) -> set[str]:
    """What the verb says under the spec's limits."""
    limits = load_spec(spec).effective_limits
    actions: dict[str, Callable[[], object]] = {
        "unpack": lambda: unpack_image(archive, folder / "dest", UnpackOptions(limits=limits)),
        "inspect": lambda: inspect_archive(archive, limits=limits),
        "build": lambda: build(spec, folder / "out", BuildOptions(folder / "cache", 1)),
    }
    if verb == "verify":
        return {finding.code for finding in verify_archives([archive], VerifyOptions(limits=limits)).errors}
    try:
        actions[verb]()
    except OciBuilderError as error:
        return {error.code}
    return set()


@pytest.mark.parametrize("verb", ["verify", "unpack", "inspect", "build"])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_limit_binds(name: str, verb: str, tmp_path: Path) -> None:
    bound = BOUNDS[name]
    lab, key = bound.lab, "docker" if bound.docker else "oci"
    archive = write(tmp_path / "a.tar", lab.docker() if bound.docker else lab.oci())
    spec = spec_of(tmp_path, {key: str(archive)}, HELPERS.get(name, {}) | {name: bound.value})
    assert bound.code in codes(verb, archive, spec, tmp_path)


@pytest.mark.parametrize("name", BOUNDS)
def test_without_the_limit_the_image_is_accepted(name: str, tmp_path: Path) -> None:
    """So that it is this limit and nothing else that refuses."""
    bound = BOUNDS[name]
    archive = write(tmp_path / "a.tar", bound.lab.docker() if bound.docker else bound.lab.oci())
    assert verify_archives([archive]).ok


def test_the_idle_time_binds(tmp_path: Path) -> None:
    """An answer that never comes is given up after a second and not after the default, and asked for again."""
    image, never = small_image(1), threading.Event()
    with Registry() as registry:
        digest = image.publish(registry, "lab/app")
        registry.faults = [on("GET", "blobs", held_until(never), times=1)]
        base = {"registry": f"{registry.host}/lab/app:v1", "digest": str(digest)}
        spec = spec_of(tmp_path, base, {"blob_idle_seconds": 1})
        start = time.monotonic()
        build(spec, tmp_path / "out", BuildOptions(tmp_path / "cache", 1))
        assert time.monotonic() - start < Limits().blob_idle_seconds
        never.set()
        assert len(registry.calls("GET", "blobs")) >= 3


def test_every_limit_has_its_test() -> None:
    assert {*BOUNDS, "blob_idle_seconds"} == set(Limits.names())
