"""The verb on archives: one pass, members in any order, the final tree only, and the same answer for every form."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import FormatError, OciBuilderError, SpecError
from oci_builder.model.events import Event
from oci_builder.payload.readiness.report import ReadinessReport
from oci_builder.readiness import ReadinessOptions, readiness
from tests.readiness.lab import cubin

Files = dict[str, bytes | str]  # a text is the target of a symbolic link
GOOD, BAD = cubin(100), cubin(90)


def tar(files: Files, *, prefix: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(prefix + name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def descriptor(media: str, data: bytes, **more: Any) -> dict[str, Any]:
    return {
        "mediaType": f"application/vnd.oci.image.{media}", "digest": "sha256:" + sha(data), "size": len(data), **more
    }  # fmt: skip


def oci(layers: list[Files], *, env: tuple[str, ...] = (), pack: str = "gzip") -> Files:
    """The members of an OCI layout."""
    tars = [tar(layer) for layer in layers]
    blobs = [gzip.compress(t, mtime=0) if pack == "gzip" else t for t in tars]
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": list(env)},
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + sha(t) for t in tars]},
        }
    ).encode()
    kind = "layer.v1.tar" + ("+gzip" if pack == "gzip" else "")
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "config": descriptor("config.v1+json", config),
            "layers": [descriptor(kind, b) for b in blobs],
        }
    ).encode()
    platform = {"architecture": "amd64", "os": "linux"}
    index = {"schemaVersion": 2, "manifests": [descriptor("manifest.v1+json", manifest, platform=platform)]}
    files: Files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode()}
    files.update({"blobs/sha256/" + sha(b): b for b in (config, manifest, *blobs)})
    return files


def docker(layers: list[Files]) -> Files:
    """The members of a classic Docker archive."""
    tars = [tar(layer) for layer in layers]
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + sha(t) for t in tars]},
        }
    ).encode()
    names = [f"{sha(t)}/layer.tar" for t in tars]
    item = {"Config": sha(config) + ".json", "RepoTags": ["a:b"], "Layers": names}
    return {
        **dict(zip(names, tars, strict=True)), sha(config) + ".json": config,
        "manifest.json": json.dumps([item]).encode(),
    }  # fmt: skip


def judge(path: Path, data: bytes, **options: Any) -> ReadinessReport:
    path.write_bytes(data)
    return readiness(path, ReadinessOptions(**options))


def verdicts(report: ReadinessReport) -> dict[str, str]:
    return {f.where: f.verdict for f in report.gpu}


LAYERS: list[Files] = [
    {"opt/a/k.cubin": BAD, "opt/b/k.cubin": BAD, "opt/c/k.cubin": GOOD, "opt/d/k.cubin": BAD},
    {"opt/a/k.cubin": GOOD, "opt/b/.wh.k.cubin": b"", "opt/d/.wh..wh..opq": b"", "opt/d/other": b"x"},
]
FINAL = {"opt/a": "native", "opt/c": "native"}


@pytest.mark.parametrize("pack", ["gzip", "plain"])
@pytest.mark.parametrize("order", ["documents first", "documents last"])
@pytest.mark.parametrize("outside", ["plain", "gzip"])
def test_an_oci_archive_is_judged_by_its_final_tree(tmp_path: Path, pack: str, order: str, outside: str) -> None:
    files = oci(LAYERS, pack=pack)
    if order == "documents last":
        files = dict(reversed(files.items()))
    data = tar(files)
    data = gzip.compress(data) if outside == "gzip" else data
    assert verdicts(judge(tmp_path / "a.tar", data)) == FINAL


@pytest.mark.parametrize("prefix", ["", "./"])
def test_a_docker_archive_gives_the_same_answer(tmp_path: Path, prefix: str) -> None:
    assert verdicts(judge(tmp_path / "a.tar", tar(docker(LAYERS), prefix=prefix))) == FINAL


def test_a_docker_archive_that_shares_a_layer_by_a_link(tmp_path: Path) -> None:
    files = docker(LAYERS[:1])
    (name,) = (n for n in files if n.endswith("layer.tar"))
    files["f" * 64 + "/layer.tar"] = files.pop(name)
    files[name] = "../" + "f" * 64 + "/layer.tar"
    assert verdicts(judge(tmp_path / "a.tar", tar(files)))["opt/b"] == "none"


def test_an_oci_layout_folder_gives_the_same_answer(tmp_path: Path) -> None:
    for name, content in oci(LAYERS).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        assert isinstance(content, bytes)
        (tmp_path / name).write_bytes(content)
    assert verdicts(readiness(tmp_path)) == FINAL


@pytest.mark.parametrize("pack", ["plain", "gzip"])
def test_a_portable_archive_is_a_tree(tmp_path: Path, pack: str) -> None:
    data = tar({"opt/rt/k.cubin": BAD})
    report = judge(tmp_path / "a.tar", gzip.compress(data) if pack == "gzip" else data)
    assert verdicts(report) == {"opt/rt": "none"}


def test_a_tree_and_its_tar_give_the_same_rows(tmp_path: Path) -> None:
    root = tmp_path / "root/opt"
    root.mkdir(parents=True)
    (root / "k.cubin").write_bytes(BAD)
    (root / "libcuda.so.1").write_bytes(b"x")
    subprocess.run(["tar", "cf", tmp_path / "a.tar", "-C", tmp_path / "root", "."], check=True)
    a, b = readiness(tmp_path / "root").to_json(), readiness(tmp_path / "a.tar").to_json()
    assert a["rows"] == b["rows"] and a["gpu"] == b["gpu"]


def test_a_hard_link_shares_the_facts_of_its_target_also_across_layers(tmp_path: Path) -> None:
    """B096."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        link = tarfile.TarInfo("opt/z/k.cubin")
        link.type, link.linkname = tarfile.LNKTYPE, "opt/a/k.cubin"
        archive.addfile(link)
    files = docker([{"opt/a/k.cubin": BAD}])
    (first,) = (n for n in files if n.endswith("layer.tar"))
    upper = sha(out.getvalue()) + "/layer.tar"
    item = json.loads(bytes(files["manifest.json"]))  # type: ignore[arg-type]
    config = json.loads(bytes(files.pop(item[0]["Config"])))  # type: ignore[arg-type]
    config["rootfs"]["diff_ids"].append("sha256:" + sha(out.getvalue()))
    data = json.dumps(config).encode()
    item[0] |= {"Layers": [first, upper], "Config": sha(data) + ".json"}
    files |= {upper: out.getvalue(), sha(data) + ".json": data, "manifest.json": json.dumps(item).encode()}
    assert verdicts(judge(tmp_path / "a.tar", tar(files))) == {"opt/a": "none", "opt/z": "none"}


def test_a_file_that_lands_through_a_link_of_a_lower_layer_is_found_there(tmp_path: Path) -> None:
    lower: Files = {"usr/lib/x": b"x", "lib": "usr/lib"}
    report = judge(tmp_path / "a.tar", tar(docker([lower, {"lib/k.cubin": BAD}])))
    assert verdicts(report) == {"usr/lib": "none"}


def test_the_environment_of_the_config_is_used(tmp_path: Path) -> None:
    """B167, B194."""
    report = judge(tmp_path / "a.tar", tar(oci([{"a": b"x"}], env=("LD_LIBRARY_PATH=/usr/local/cuda/compat",))))
    assert {r.code for r in report.rows if r.severity == "error"} == {"driver.compat_path"}
    with pytest.raises(OciBuilderError) as caught:
        judge(tmp_path / "b.tar", tar(oci([{"a": b"x"}], env=("CUDA_HOME=:/usr/local/cuda",))))
    assert caught.value.code == "config.env"


def test_a_blob_that_no_image_names_need_not_be_a_layer(tmp_path: Path) -> None:
    files = oci(LAYERS)
    other = b"\x1f\x8bnot really gzip" * 10
    files["blobs/sha256/" + sha(other)] = other
    assert verdicts(judge(tmp_path / "a.tar", tar(files))) == FINAL


def test_a_named_layer_that_cannot_be_read_is_the_error(tmp_path: Path) -> None:
    files = oci(LAYERS)
    name = max(files, key=lambda n: len(files[n]) if files[n][:2] == b"\x1f\x8b" else 0)
    files[name] = bytes(files[name])[:-9]  # type: ignore[arg-type]
    with pytest.raises(OciBuilderError) as caught:
        judge(tmp_path / "a.tar", tar(files))
    assert caught.value.code in ("blob.size", "blob.digest", "gzip.truncated")


@pytest.mark.parametrize("left", [("oci-layout",), ("index.json", "blobs"), ("manifest.json", "version")])
def test_half_a_layout_is_no_tree_that_is_ready(tmp_path: Path, left: tuple[str, ...]) -> None:
    """C3-17: what a copy that failed left, and the folders that skopeo calls dir:, hold no program to judge."""
    for name in left:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(OciBuilderError) as caught:
        readiness(tmp_path)
    assert caught.value.code in ("archive.missing", "json.field")


@pytest.mark.parametrize("drop", ["index", "config", "layer"])
def test_a_document_or_layer_that_is_not_there_is_named(tmp_path: Path, drop: str) -> None:
    files = oci(LAYERS)
    index = json.loads(bytes(files["index.json"]))  # type: ignore[arg-type]
    manifest_name = "blobs/sha256/" + index["manifests"][0]["digest"][7:]
    manifest = json.loads(bytes(files[manifest_name]))  # type: ignore[arg-type]
    name = {
        "index": "index.json",
        "config": "blobs/sha256/" + manifest["config"]["digest"][7:],
        "layer": "blobs/sha256/" + manifest["layers"][0]["digest"][7:],
    }[drop]
    del files[name]
    with pytest.raises(FormatError) as caught:
        judge(tmp_path / "a.tar", tar(files))
    assert caught.value.code == "archive.missing"


def test_another_platform_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        judge(tmp_path / "a.tar", tar(oci(LAYERS)), platform="linux/arm64")
    assert caught.value.code == "platform.missing"


def test_a_big_file_goes_through_the_scratch_file_with_the_same_answer(tmp_path: Path) -> None:
    big = BAD + bytes(9 << 20)
    assert verdicts(judge(tmp_path / "a.tar", tar({"opt/k.cubin": big}))) == {"opt": "none"}


def test_a_cut_archive_never_gives_a_report(tmp_path: Path) -> None:
    data = tar(oci(LAYERS))
    for cut in range(512, len(data) - 1024, 1777):
        with pytest.raises(OciBuilderError):
            judge(tmp_path / "a.tar", data[:cut])


def test_a_subject_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        readiness(tmp_path / "none")
    assert caught.value.code == "spec.path"


def test_a_fifo_or_device_in_a_folder_is_never_opened(tmp_path: Path) -> None:
    """B124."""
    subprocess.run(["mkfifo", tmp_path / "x.so"], check=True)
    assert readiness(tmp_path).ok


def test_progress_covers_every_byte_of_the_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar(oci(LAYERS)))
    events: list[Event] = []
    readiness(tmp_path / "a.tar", emit=events.append)
    assert sum(e.amount for e in events if e.kind == "advance") == (tmp_path / "a.tar").stat().st_size
    assert [e.kind for e in events if e.kind != "advance"] == ["start", "done"]


def test_two_images_for_one_platform_are_no_answer(tmp_path: Path) -> None:
    """As with every other verb: nothing says which is meant."""
    one, two = oci(LAYERS), oci(LAYERS[:1])
    indexes = [json.loads(bytes(files["index.json"])) for files in (one, two)]  # type: ignore[arg-type]
    indexes[0]["manifests"] += indexes[1]["manifests"]
    files = {**two, **one, "index.json": json.dumps(indexes[0]).encode()}
    with pytest.raises(FormatError) as caught:
        judge(tmp_path / "a.tar", tar(files))
    assert caught.value.code == "platform.ambiguous"


def test_the_report_in_all_its_forms(tmp_path: Path) -> None:
    report = judge(tmp_path / "a.tar", tar({"opt/<b>.cubin": BAD}))
    data = report.to_json()
    assert data["ok"] is False and report.exit_status == 1
    assert json.loads(json.dumps(data)) == data
    assert "NOT READY for sm_100" in report.to_text().splitlines()[-1]
    assert "1 file with GPU code, 1 errors" in report.to_text().splitlines()[-1]
    assert [(f.code, f.severity, f.exit_status) for f in report.findings()] == [("gpu.none", "error", 1)]


def test_random_damage_never_does_more_than_say_no(tmp_path: Path) -> None:
    dice = random.Random(9)
    good = tar(oci(LAYERS, pack="plain"))
    for _ in range(300):
        data = bytearray(good)
        for _ in range(dice.randint(1, 3)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        try:
            judge(tmp_path / "a.tar", bytes(data))
        except OciBuilderError:
            pass


def test_verify_judges_readiness_when_a_target_is_named(tmp_path: Path) -> None:
    """Issue 9: part of ``verify``: a kernel for another GPU only makes a good archive not ok."""
    tier = tmp_path / "tier"
    tier.mkdir()
    (tier / "kernel.cubin").write_bytes(BAD)
    spec = {"name": "x", "tag": "t", "base": {"scratch": True}, "prefix": "/opt/rt", "tiers": {"a": {"path": str(tier)}}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    main = [sys.executable, "-c", "from oci_builder.cli import main; main()"]
    cache = ["--cache", str(tmp_path / "cache")]
    subprocess.run([*main, "build", str(tmp_path / "spec.json"), "--out", str(tmp_path / "out"), *cache], check=True)
    archive = str(tmp_path / "out/runtime.oci.tar")
    for target, status in (("sm_90", 0), ("sm_100", 1)):
        done = subprocess.run([*main, "verify", archive, "--target", target, "--json", str(tmp_path / "r.json")], check=False)
        report = json.loads((tmp_path / "r.json").read_text())
        assert (done.returncode, report["ok"]) == (status, status == 0), report["findings"]


def test_a_verdict_on_what_has_no_gpu_code_says_so(tmp_path: Path) -> None:
    report = judge(tmp_path / "a.tar", tar({"etc/motd": b"hello"}))
    last = report.to_text().splitlines()[-1]
    assert last.startswith("ready for sm_100") and "no files with GPU code" in last
