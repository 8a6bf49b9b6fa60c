"""Archives that other people's programs make: accepted, and twins of what they were made from (B020, B046, B060)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from oci_builder.store.blobs import DirStore
from oci_builder.verify import verify_archives
from tests.lab.archives import Lab, files, write
from tests.lab.ours import our_image, write_pair

pytestmark = pytest.mark.interop


def need(program: str) -> str:
    found = shutil.which(program)
    if not found:
        pytest.skip(f"{program} is not installed")
    return found


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=300)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with DirStore(tmp_path / "store") as store:
        return write_pair(tmp_path, our_image(store), store)[0]


@pytest.mark.parametrize("form", ["docker-archive:{}:lab/image:r1", "oci-archive:{}:r1", "oci:{}:r1"])
def test_what_skopeo_writes_is_good_and_the_same_image(form: str, source: Path, tmp_path: Path) -> None:
    skopeo, target = need("skopeo"), tmp_path / "copy"
    run(skopeo, "copy", "--insecure-policy", f"oci-archive:{source}", form.format(target))
    assert verify_archives([target]).errors == ()
    assert verify_archives([source, target]).errors == ()


def test_what_skopeo_recompresses_with_zstd_is_good(source: Path, tmp_path: Path) -> None:
    skopeo, target = need("skopeo"), tmp_path / "copy"
    options = ("--dest-compress-format", "zstd", "--dest-compress")
    run(skopeo, "copy", "--insecure-policy", *options, f"oci-archive:{source}", f"oci:{target}:r1")
    assert verify_archives([target]).errors == ()


@pytest.fixture
def umoci_layout(tmp_path: Path) -> Path:
    umoci, layout = need("umoci"), tmp_path / "layout"
    run(umoci, "init", "--layout", str(layout))
    run(umoci, "new", "--image", f"{layout}:r1")
    return layout


@pytest.mark.root
def test_a_layer_that_umoci_repacked_is_good(umoci_layout: Path, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("umoci unpack needs root")
    bundle = tmp_path / "bundle"
    run("umoci", "unpack", "--image", f"{umoci_layout}:r1", str(bundle))
    (bundle / "rootfs" / "file").write_text("content")
    run("umoci", "repack", "--image", f"{umoci_layout}:r1", str(bundle))
    assert verify_archives([umoci_layout]).errors == ()


def test_umoci_insert_leaves_its_tar_without_an_end(umoci_layout: Path, tmp_path: Path) -> None:
    """umoci 0.4.7's fault, seen by GNU tar too ("Unexpected EOF in archive"): C7-02 says that this is refused."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("content")
    run("umoci", "insert", "--image", f"{umoci_layout}:r1", str(tmp_path / "tree"), "/opt/tree")
    report = verify_archives([umoci_layout])
    assert {f.code for f in report.errors} <= {"tar.truncated"}


def test_layers_that_skopeo_accepts_with_a_wrong_diff_id_are_refused(tmp_path: Path) -> None:
    """A clean skopeo copy proves little: 1.9.3 copies a wrong diff_id without a word (C3-10)."""
    lab = Lab(layers=[files(a=b"a"), files(b=b"b")], edit_config=lambda c: c | {
        "rootfs": {"type": "layers", "diff_ids": c["rootfs"]["diff_ids"][::-1]}})  # fmt: skip
    assert {f.code for f in verify_archives([write(tmp_path / "a", lab.oci())]).errors} == {"layer.diff_id"}
