"""A root file system, folder or tar, as a base."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError, PolicyError
from oci_builder.model.limits import Limits
from oci_builder.rootfs.layers import WriteOptions
from oci_builder.rootfs.layers_base import read_base
from oci_builder.store.blobs import DirStore
from oci_builder.store.cache import BuildCache
from oci_builder.transports.rootfs import RootfsOptions, load_rootfs
from oci_builder.wire.compress import Codec
from tests.lab import tarlang as t

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirStore]:
    with DirStore(tmp_path / "store") as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    base = tmp_path / "root"
    for name in ("etc", "usr/bin", "tmp", "home/u"):
        (base / name).mkdir(parents=True)
    (base / "bin").symlink_to("usr/bin")
    (base / "usr/bin/sh").write_bytes(b"shell")
    (base / "usr/bin/sh").chmod(0o755)
    (base / "tmp").chmod(0o1777)
    return base


def tar_of(root: Path, *options: str) -> bytes:
    return subprocess.run(["tar", "-c", "-C", root, *options, "."], check=True, capture_output=True).stdout


def layer_tar(store: DirStore, image: object) -> bytes:
    layer = image.layers[0]  # type: ignore[attr-defined]
    assert store.has(layer.descriptor.digest)
    data = store.path(layer.descriptor.digest).read_bytes()
    return gzip.decompress(data) if layer.compression == "gzip" else data


def test_a_folder_keeps_modes_owners_and_links(root: Path, store: DirStore) -> None:
    """B120, C8-05: sticky and set-user-ID survive in a base."""
    (root / "usr/bin/su").write_bytes(b"su")
    if os.geteuid() == 0:
        os.chown(root / "home/u", 1234, 4321)
    (root / "usr/bin/su").chmod(0o4755)
    image = load_rootfs(root, store)
    with tarfile.open(fileobj=io.BytesIO(layer_tar(store, image))) as tar:
        members = {member.name: member for member in tar}
    assert members["tmp"].mode == 0o1777
    assert members["usr/bin/su"].mode == 0o4755
    assert members["bin"].linkname == "usr/bin"
    if os.geteuid() == 0:
        assert (members["home/u"].uid, members["home/u"].gid) == (1234, 4321)
    assert image.base_layers == 1


def test_paths_can_be_left_out(root: Path, store: DirStore) -> None:
    image = load_rootfs(root, store, RootfsOptions(exclude=("home", "usr/bin/s*")))
    with tarfile.open(fileobj=io.BytesIO(layer_tar(store, image))) as tar:
        assert sorted(tar.getnames()) == ["bin", "etc", "tmp", "usr", "usr/bin"]


@needs_root
def test_standard_nodes_of_a_folder_are_left_out(root: Path, store: DirStore) -> None:
    (root / "dev").mkdir()
    os.mknod(root / "dev/null", 0o20666, os.makedev(1, 3))
    image = load_rootfs(root, store)
    with tarfile.open(fileobj=io.BytesIO(layer_tar(store, image))) as tar:
        assert not [member.name for member in tar if member.isdev()]


@pytest.mark.parametrize("codec", [Codec("gzip"), Codec("identity"), Codec("zstd")])
def test_a_plain_tar_keeps_its_bytes(root: Path, store: DirStore, tmp_path: Path, codec: Codec) -> None:
    data = tar_of(root)
    (tmp_path / "root.tar").write_bytes(data)
    image = load_rootfs(tmp_path / "root.tar", store, RootfsOptions(write=WriteOptions(codec=codec)))
    (layer,) = image.layers
    assert layer.tar_size == len(data)
    if codec.name != "zstd":
        assert layer_tar(store, image) == data


def test_a_compressed_tar_keeps_its_compressed_bytes(root: Path, store: DirStore, tmp_path: Path) -> None:
    blob = gzip.compress(tar_of(root))
    (tmp_path / "root.tar.gz").write_bytes(blob)
    (layer,) = load_rootfs(tmp_path / "root.tar.gz", store).layers
    assert store.path(layer.descriptor.digest).read_bytes() == blob
    assert layer.tar_size == len(gzip.decompress(blob))


def test_a_tar_that_did_not_change_is_not_read_again(root: Path, tmp_path: Path, store: DirStore) -> None:
    place = tmp_path / "root.tar"
    place.write_bytes(tar_of(root))
    time.sleep(0.05)
    with BuildCache(tmp_path / "cache.db") as cache:
        options = RootfsOptions(write=WriteOptions(cache=cache))
        first = load_rootfs(place, store, options)
        events: list[str] = []
        assert load_rootfs(place, store, options, lambda event: events.append(event.kind)) == first
        assert events == []
        time.sleep(0.05)
        place.write_bytes(tar_of(root, "--exclude=./home"))
        assert load_rootfs(place, store, options) != first


def refused(path: Path, store: DirStore, options: RootfsOptions | None = None) -> str:
    with pytest.raises(OciBuilderError) as caught:
        load_rootfs(path, store, options)
    assert store.digests() == []
    return caught.value.code


def test_what_is_wrong_with_a_tar_is_found_before_it_is_a_layer(root: Path, store: DirStore, tmp_path: Path) -> None:
    data = tar_of(root)
    place = tmp_path / "root.tar"
    for made, code in (
        (data[:700], "tar.truncated"),
        (b"\xfd7zXZ\0rest", "media.compression"),
        (data[:100] + b"\xff" + data[101:], "tar.checksum"),
        (gzip.compress(data)[:-9], "gzip.truncated"),
        (data + b"x" * 512, "tar.trailing"),
    ):
        place.write_bytes(made)
        assert refused(place, store) == code


def test_devices_other_than_the_standard_ones_are_refused(store: DirStore, tmp_path: Path) -> None:
    for minor, code in ((3, ""), (1, "entry.device")):
        with tarfile.open(tmp_path / "root.tar", "w") as tar:
            node = tarfile.TarInfo("dev/x")
            node.type, node.devmajor, node.devminor = tarfile.CHRTYPE, 1, minor
            tar.addfile(node)
        if code:
            store.gc([])
            assert refused(tmp_path / "root.tar", store) == code
        else:
            load_rootfs(tmp_path / "root.tar", store)


def test_inputs_that_are_no_root(root: Path, store: DirStore, tmp_path: Path) -> None:
    place = tmp_path / "root.tar"
    place.write_bytes(tar_of(root))
    assert refused(tmp_path / "absent", store) == "scan.root"
    assert refused(place, store, RootfsOptions(exclude=("x",))) == "spec.field"
    assert refused(place, store, RootfsOptions(limits=Limits(entries=2))) == "limit.entries"


def test_a_base_is_read_once(root: Path, store: DirStore) -> None:
    """B104: what planning must know of it, from its layers; the second time from the store's record."""
    image = load_rootfs(root, store)
    events: list[str] = []
    tree = read_base(image.layers, store, emit=lambda event: events.append(event.kind))
    assert dict(tree.symlinks) == {b"bin": b"usr/bin"}
    assert tree.folders[b"tmp"].mode == 0o1777
    assert events == ["start", "done"]
    assert read_base(image.layers, store, emit=lambda event: events.append(event.kind)) == tree
    assert events == ["start", "done"]


def test_c4_13_a_whiteouts_name_in_a_tar_is_refused(tmp_path: Path, store: DirStore) -> None:
    """It would vanish from the image, and what it hides with it; in a folder it is refused as well."""
    tar = tmp_path / "root.tar"
    tar.write_bytes(t.tar(t.file(b"x", b"1"), t.file(b"etc/.wh.x")))
    with pytest.raises(PolicyError) as error:
        load_rootfs(tar, store)
    assert error.value.code == "entry.whiteout"
