"""Field reports of groups A, B and D that a whole build shows: what stands in the archives, whatever the base was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oci_builder.build import FILES, BuildOptions, BuildResult, build
from oci_builder.model import media
from oci_builder.model.errors import OciBuilderError
from oci_builder.model.events import Event
from oci_builder.model.limits import Limits
from oci_builder.verify import VerifyOptions, verify_archives
from tests.conftest import Built, small_tiers, write_spec
from tests.lab.archives import Lab, sha, with_, write
from tests.lab.images import SmallImage, small_image
from tests.lab.registry import Registry


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as running:
        yield running


def on(base: SmallImage, registry: Registry, folder: Path, **changes: Any) -> BuildResult:
    """The small tiers on a base that a registry has; both archives are proved."""
    digest = base.publish(registry, "team/base")
    pin = {"registry": f"{registry.host}/team/base", "digest": digest}
    return proved(write_spec(folder, small_tiers(folder), base=pin, **changes), folder)


def proved(spec: Path, folder: Path) -> BuildResult:
    made = build(spec, folder / "out", BuildOptions(folder / "cache"))
    archives = [folder / "out" / name for name in ("runtime.oci.tar", "runtime.docker.tar.gz")]
    assert verify_archives(archives, VerifyOptions("strict")).findings == ()
    return made


def documents(archive: Path) -> dict[str, Any]:
    """Every JSON document of an archive by its member's name, in the archive's order."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.size < 1 << 20 else None
            data = file.read() if file else b""
            if data.startswith((b"{", b"[")):
                found[member.name] = json.loads(data)
    return found


def manifest_of(archive: Path) -> dict[str, Any]:
    """The one image's manifest."""
    found = documents(archive)
    (entry,) = found["index.json"]["manifests"]
    manifest: dict[str, Any] = found["blobs/sha256/" + entry["digest"].partition(":")[2]]
    assert manifest["mediaType"] == entry["mediaType"]
    return manifest


@pytest.mark.parametrize("docker", [False, True])
def test_b047_b052_the_base_s_layers_keep_their_bytes_and_all_types_are_oci_s(
    registry: Registry, tmp_path: Path, docker: bool
) -> None:
    base = small_image(3, docker=docker)
    on(base, registry, tmp_path)
    manifest = manifest_of(tmp_path / "out/runtime.oci.tar")
    theirs = [layer["digest"] for layer in json.loads(base.manifest)["layers"]]
    assert [layer["digest"] for layer in manifest["layers"]][:3] == theirs
    assert {layer["mediaType"] for layer in manifest["layers"]} == {media.OCI_LAYER_GZIP}
    assert manifest["config"]["mediaType"] == media.OCI_CONFIG
    plain = manifest_of(tmp_path / "out/runtime.docker.tar.gz")
    assert {layer["mediaType"] for layer in plain["layers"]} == {media.OCI_LAYER}
    assert len(plain["layers"]) == len(manifest["layers"])


def test_b005_a_layer_that_a_base_has_twice_is_named_twice_and_stored_once(registry: Registry, tmp_path: Path) -> None:
    once = small_image(1)
    config = json.loads(once.config)
    config["rootfs"]["diff_ids"] *= 2
    body = json.dumps(config).encode()
    value = json.loads(once.manifest)
    value["config"] |= {"digest": registry.put_blob(body), "size": len(body)}
    value["layers"] *= 2
    made = on(SmallImage(json.dumps(value).encode(), body, once.layers), registry, tmp_path)
    assert made.container["base"]["layers"] == 2
    for name in ("runtime.oci.tar", "runtime.docker.tar.gz"):
        with tarfile.open(tmp_path / "out" / name) as tar:
            names = tar.getnames()
        assert len(names) == len(set(names))
        first, second = manifest_of(tmp_path / "out" / name)["layers"][:2]
        assert first == second


def test_b005_tiers_with_the_same_bytes_share_them(tmp_path: Path) -> None:
    tiers = {}
    for name in ("one", "two"):
        tiers[name] = tmp_path / "envs" / name
        tiers[name].mkdir(parents=True)
        (tiers[name] / "file").write_bytes(b"the same" * 100_000)
        os.utime(tiers[name] / "file", (1_000_000_000, 1_000_000_000))
    made = proved(write_spec(tmp_path, tiers), tmp_path)
    assert made.container["size"]["uncompressed"] < 1.2 * 800_000


def test_b022_the_record_says_how_layers_stand_in_each_archive(quick: Built, tmp_path: Path) -> None:
    says = {name: archive["layers"] for name, archive in quick.container["archives"].items()}
    assert says == {"runtime.oci.tar": ["gzip"], "runtime.docker.tar.gz": ["identity"]}
    spec = write_spec(tmp_path, small_tiers(tmp_path), compression={"codec": "zstd"})
    made = build(spec, tmp_path / "out", BuildOptions(tmp_path / "cache"))
    assert made.container["archives"]["runtime.oci.tar"]["layers"] == ["zstd"]


def test_b023_layers_are_compressed_whatever_a_daemon_would_do(tmp_path: Path) -> None:
    tiers = {}
    for name in ("one", "two"):
        tiers[name] = tmp_path / "envs" / name
        tiers[name].mkdir(parents=True)
        with (tiers[name] / name).open("wb") as file:
            file.truncate(100 << 20)
    proved(write_spec(tmp_path, tiers), tmp_path)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert max(sizes.values()) < 3 << 20, sizes


def test_b050_a_base_of_zstd_layers_is_kept_in_one_archive_and_inflated_in_the_other(tmp_path: Path) -> None:
    lab = Lab(pack="zstd")
    base = write(tmp_path / "base.tar", lab.oci())
    spec = write_spec(tmp_path, small_tiers(tmp_path), base={"oci": str(base)})
    made = build(spec, tmp_path / "out", BuildOptions(tmp_path / "cache"))
    archives = [tmp_path / "out" / name for name in ("runtime.oci.tar", "runtime.docker.tar.gz")]
    found = verify_archives(archives, VerifyOptions("strict"))
    assert found.ok and {f.code for f in found.findings} == {"media.compression"}, "a warning for old engines, no more"
    blobs = ["sha256:" + sha(blob) for _, blob in lab.blobs()[0]]
    layers = manifest_of(archives[0])["layers"]
    assert [layer["digest"] for layer in layers][:2] == blobs
    assert [layer["mediaType"] for layer in layers][:3] == [media.OCI_LAYER_ZSTD] * 2 + [media.OCI_LAYER_GZIP]
    plain = ["sha256:" + sha(tar) for tar in lab.layers]
    assert [layer["digest"] for layer in manifest_of(archives[1])["layers"]][:2] == plain == made.container["diff_ids"][:2]


@pytest.mark.parametrize(
    ("lab", "code"),
    [
        (Lab(edit_descriptor=with_(digest="sha512:" + "a" * 128)), "json.digest"),  # B034
        (Lab(edit_manifest=with_(layers__0__mediaType=media.OCI_LAYER)), "media.mismatch"),  # B048
        (Lab(edit_manifest=with_(layers__1__mediaType=media.OCI_LAYER_ZSTD)), "media.mismatch"),
        (Lab(pack="identity", edit_manifest=with_(layers__0__mediaType=media.OCI_LAYER_GZIP)), "media.mismatch"),
    ],
)
def test_b034_b048_a_base_that_lies_about_its_layers_is_none(tmp_path: Path, lab: Lab, code: str) -> None:
    base = write(tmp_path / "base.tar", lab.oci())
    spec = write_spec(tmp_path, small_tiers(tmp_path), base={"oci": str(base)})
    with pytest.raises(OciBuilderError) as caught:
        build(spec, tmp_path / "out", BuildOptions(tmp_path / "cache"))
    assert caught.value.code == code and list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["runtime.oci.tar", "runtime.docker.tar.gz"])
def test_b010_b011_b053_members_have_plain_names_and_no_owner(quick: Built, name: str) -> None:
    with tarfile.open(quick.out / name) as tar:
        members = tar.getmembers()
    names = [member.name for member in members]
    assert "manifest.json" in names and "oci-layout" in names and len(set(names)) == len(names)
    assert not [n for n in names if n.startswith(("/", "./")) or ".." in n.split("/")]
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", 0)}


@pytest.mark.parametrize("name", ["runtime.oci.tar", "runtime.docker.tar.gz"])
def test_b031_b038_b040_b042_one_image_by_one_name_in_every_document(quick: Built, name: str) -> None:
    found = documents(quick.out / name)
    (item,) = found["manifest.json"]
    assert item["RepoTags"] == ["lab/quick:t1"]
    (entry,) = found["index.json"]["manifests"]
    assert entry["mediaType"] == media.OCI_MANIFEST, "flat: no index in the index"
    assert set(entry["annotations"].values()) == {"docker.io/lab/quick:t1"}
    assert set(entry["annotations"]) == {"io.containerd.image.name", "org.opencontainers.image.ref.name"}
    assert item["Config"] in found and set(item["Layers"]) == {
        "blobs/sha256/" + layer["digest"].partition(":")[2] for layer in manifest_of(quick.out / name)["layers"]
    }


def test_b037_skopeo_finds_the_image_by_the_name_of_the_record(quick: Built) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    asked = f"oci-archive:{quick.oci}:{quick.container['full_reference']}"
    done = subprocess.run(["skopeo", "inspect", "--raw", asked], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    assert "sha256:" + sha(done.stdout) == quick.container["manifest"]["digest"]


def test_b208_times_of_access_and_parts_of_a_second_leave_no_trace(tmp_path: Path) -> None:
    tiers = small_tiers(tmp_path)
    spec = write_spec(tmp_path, tiers)
    seen = []
    for number, ns in enumerate((1, 999_999_999)):
        for path in [p for tier in tiers.values() for p in (tier, *tier.rglob("*"))]:
            os.utime(path, ns=(number * 10**18, 1_600_000_000 * 10**9 + ns), follow_symlinks=False)
        build(spec, tmp_path / "out", BuildOptions(tmp_path / f"cache{number}"))
        seen.append([sha((tmp_path / "out" / name).read_bytes()) for name in FILES])
    assert seen[0] == seen[1]
    with tarfile.open(tmp_path / "out/runtime.tar.gz") as tar:
        records = {key for member in tar for key in member.pax_headers}
    assert not records & {"atime", "ctime", "mtime"}


def test_a_layer_like_a_bomb_is_warned_about_and_named_for_what_it_is(tmp_path: Path) -> None:
    """A hole in a file is stored by its content: more than a careful reader takes, unless the spec says it is meant."""
    (tmp_path / "tier").mkdir()
    with (tmp_path / "tier/hole").open("wb") as file:
        file.truncate(8 << 20)
    said: list[Event] = []
    limits = {"ratio_floor": 1 << 20}
    spec = write_spec(tmp_path, {"one": tmp_path / "tier"}, limits=limits)
    build(spec, tmp_path / "out", BuildOptions(tmp_path / "cache"), said.append)
    assert [event.task for event in said if event.kind == "warning"] == ["layer one"]
    for name in FILES[:2]:
        found = verify_archives([tmp_path / "out" / name], VerifyOptions(limits=Limits(ratio_floor=1 << 20)))
        assert [f.code for f in found.findings] == ["limit.ratio"]
    spec = write_spec(tmp_path, {"one": tmp_path / "tier"}, limits={**limits, "ratio": 2000})
    said.clear()
    proved(spec, tmp_path)
    build(spec, tmp_path / "other", BuildOptions(tmp_path / "cache"), said.append)
    assert not [event for event in said if event.kind == "warning"]


@pytest.mark.parametrize(
    ("prefix", "below", "code"),
    [("/" + "/".join(["p" * 200] * 19), ["e" * 250, "f" * 100], "limit.name"), ("/opt/rt", ["e"] * 125, "limit.depth")],
)
def test_a_path_that_only_the_prefix_makes_too_long(tmp_path: Path, prefix: str, below: list[str], code: str) -> None:
    (tmp_path / "tier").joinpath(*below).mkdir(parents=True)
    with pytest.raises(OciBuilderError) as caught:
        build(write_spec(tmp_path, {"one": tmp_path / "tier"}, prefix=prefix), tmp_path / "out", BuildOptions(tmp_path))
    assert caught.value.code == code and "prefix" in caught.value.message
