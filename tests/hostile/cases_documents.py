"""C2-12, C3, C4: documents that lie. A case: id, what, the archive, the code that verify must find (None: accepted)."""


from __future__ import annotations

import base64
import gzip
from typing import Any

from tests.lab.archives import OCI, Lab, Members, descriptor, dump, entry, files, sha, tar, with_

Case = tuple[str, str, Lab, str | None]


def upper(value: dict[str, Any]) -> dict[str, Any]:
    return value | {"digest": value["digest"].upper().replace("SHA256", "sha256")}


def platform_twice(value: dict[str, Any]) -> dict[str, Any]:
    other = dict(value["manifests"][0])
    return value | {"manifests": [other, value["manifests"][0]]}


def second_image(platform: dict[str, str], **more: Any) -> Any:
    """Add a whole second image to an archive and to its index."""

    def edit(members: Members) -> Members:
        import json

        other = Lab(layers=[files(other=b"o")], platform=(platform["os"], platform["architecture"])).oci()
        index = json.loads(members["index.json"])
        extra = json.loads(other["index.json"])["manifests"][0]
        index["manifests"].insert(0, extra | {"platform": platform} | more)
        blobs = {name: data for name, data in other.items() if name.startswith("blobs/")}
        return members | blobs | {"index.json": dump(index)}

    return edit


def nested(depth: int) -> Any:
    def edit(members: Members) -> Members:
        out = dict(members)
        for _ in range(depth):
            inner = out["index.json"]
            out["blobs/sha256/" + sha(inner)] = inner
            top = descriptor(OCI + "index.v1+json", inner)
            out["index.json"] = dump({"schemaVersion": 2, "mediaType": OCI + "index.v1+json", "manifests": [top]})
        return out

    return edit


def raw_index(data: bytes) -> Any:
    return lambda members: members | {"index.json": data}


def replaced(old: bytes, new: bytes) -> Any:
    def edit(members: Members) -> Members:
        assert old in members["index.json"]
        return members | {"index.json": members["index.json"].replace(old, new, 1)}

    return edit


def embedded(data: str) -> Any:
    return with_(config__data=data)


def config_data(data: dict[str, Any]) -> dict[str, Any]:
    return data


ONE = [files(a=b"a")]
CASES: list[Case] = [
    ("C2-08a", "sha512", Lab(edit_descriptor=with_(digest="sha512:" + "a" * 128)), "json.digest"),
    ("C2-08b", "short digest", Lab(edit_descriptor=with_(digest="sha256:abc")), "json.digest"),
    ("C2-08c", "upper case (B035)", Lab(edit_descriptor=upper), "json.digest"),
    ("C2-08d", "two colons", Lab(edit_descriptor=with_(digest="sha256:" + "a" * 60 + ":abc")), "json.digest"),
    ("C2-08e", "empty digest", Lab(edit_descriptor=with_(digest="")), "json.digest"),
    ("C2-09", "digest as path", Lab(edit_descriptor=with_(digest="sha256:../../../etc/passwd")), "json.digest"),
    ("C2-04", "negative size", Lab(edit_descriptor=with_(size=-1)), "json.field"),
    ("C2-02", "size too small", Lab(edit_manifest=with_(layers__0__size=3)), "blob.size"),
    ("C2-12a", "wrong embedded digest", Lab(edit_manifest=lambda m: embedded(
        base64.b64encode(b"x" * m["config"]["size"]).decode())(m)), "blob.digest"),
    ("C2-12b", "wrong embedded size", Lab(edit_manifest=embedded(base64.b64encode(b"x").decode())), "blob.size"),
    ("C2-12c", "bad base64", Lab(edit_manifest=embedded("%%%")), "json.data"),
    ("C2-12d", "empty JSON with other bytes", Lab(edit_manifest=with_(
        config__data=base64.b64encode(b"[]").decode(), config__size=2)), "blob.digest"),
    ("C3-01a", "index as manifest", Lab(edit_manifest=lambda _: dump(
        {"schemaVersion": 2, "manifests": []})), "media.mismatch"),
    ("C3-01b", "manifest as index", Lab(edit_descriptor=with_(mediaType=OCI + "index.v1+json")), "media.mismatch"),
    ("C3-02", "two schemas", Lab(edit_manifest=with_(manifests=[])), "json.ambiguous"),
    ("C3-04a", "5 MiB index", Lab(edit_members=lambda m: m | {"index.json": m["index.json"] + b" " * (5 << 20)}), "limit.document"),
    ("C3-04b", "5 MiB config", Lab(edit_config=with_(pad="x" * (5 << 20))), "limit.document"),
    ("C3-04c", "5 MiB manifest", Lab(edit_manifest=with_(annotations={"x": "x" * (5 << 20)})), "limit.document"),
    ("C10-10", "2 MiB manifest.json", Lab(edit_docker=lambda d: [d[0] | {"x": "x" * (2 << 20)}]), "limit.document"),
    ("C3-05a", "deep JSON", Lab(edit_members=raw_index(b"[" * 5000 + b"]" * 5000)), "json.depth"),
    ("C3-05b", "huge integer", Lab(edit_members=replaced(b'"size":', b'"size":1' + b"0" * 400)), "json.number"),
    ("C3-05c", "NaN", Lab(edit_members=replaced(b'"size":', b'"x":NaN,"size":')), "json.number"),
    ("C3-05n", "a number beyond all bounds", Lab(edit_members=replaced(b'"size":', b'"x":1e999,"size":')), "json.number"),
    ("C3-05o", "a key twice, once escaped", Lab(edit_members=replaced(b'"size":', b'"s\\u0069ze":1,"size":')), "json.duplicate"),
    ("C3-05d", "a key twice (B221)", Lab(edit_members=replaced(b'"size":', b'"size":1,"size":')), "json.duplicate"),
    ("C3-05e", "not JSON", Lab(edit_members=raw_index(b'{"schemaVersion": 2,')), "json.syntax"),
    ("C3-06a", "size as text", Lab(edit_descriptor=with_(size="12")), "json.field"),
    ("C3-06b", "no config", Lab(edit_manifest=with_(config=None)), "json.field"),
    ("C3-06c", "bad media type", Lab(edit_manifest=with_(layers__0__mediaType="layer")), "json.field"),
    ("C3-06d", "manifests null", Lab(edit_index=lambda i: i | {"manifests": None}), "json.field"),
    ("C3-06e", "key in other case", Lab(edit_manifest=with_(Layers=[])), "json.ambiguous"),
    ("C3-06l", "a variable list in other case", Lab(edit_config=lambda c: c | {"config": {"Env": ["A=1"], "env": ["A=2"]}}),
        "json.ambiguous"),
    ("C3-06m", "diff_ids in other case", Lab(edit_config=lambda c: c | {"rootfs": c["rootfs"] | {"Diff_IDs": []}}),
        "json.ambiguous"),
    ("C3-06n", "a key with a long s", Lab(edit_manifest=lambda m: m | {"layer\u017f": []}), "json.ambiguous"),
    ("C3-06o", "a digest in other case", Lab(edit_manifest=lambda m: m | {"layers": [
        m["layers"][0] | {"Digest": m["layers"][1]["digest"]}, *m["layers"][1:]]}), "json.ambiguous"),
    ("C3-06k", "labels that differ in case", Lab(edit_config=lambda c: c | {"config": {"Labels": {"a": "", "A": ""}}}), None),
    *((f"C3-06p-{name}", "a config that no Go program decodes", Lab(edit_config=lambda c, more=more: c | more), "json.field")
      for name, more in (
        ("created", {"created": 5}), ("day", {"created": "2024-01-01"}), ("author", {"author": []}),
        ("ports", {"config": {"ExposedPorts": {"80": 1}}}), ("volumes", {"config": {"Volumes": ["/a"]}}),
        ("signal", {"config": {"StopSignal": 9}}), ("version", {"os.version": 10}), ("features", {"os.features": "a"}),
        ("step", {"history": [{"created": ""}] * 2}), ("empty", {"history": [{"empty_layer": "no"}] * 2}),
        ("no-day", {"created": "2023-02-29T00:00:00Z"}), ("leap", {"created": "2016-12-31T23:59:60Z"}),
        ("month", {"created": "2024-13-01T00:00:00Z"}), ("digits", {"created": "\u0662024-01-01T00:00:00Z"}),
        ("health", {"config": {"Healthcheck": {"Interval": "30s"}}}), ("host", {"config": {"Hostname": 5}}),
        ("shell", {"config": {"Shell": {}}}), ("built", {"config": {"OnBuild": "RUN x"}}), ("tty", {"config": {"Tty": "no"}}),
        ("kept", {"container_config": "x"}), ("parent", {"parent": 5}))),
    ("C3-06q", "a config with all that it may have", Lab(edit_config=lambda c: c | {
        "created": "2024-02-29T00:00:00Z", "author": "a", "os.version": "1", "os.features": ["x"], "container_config": None,
        "config": {"ExposedPorts": {"80/tcp": {}}, "Volumes": {"/a": {}}, "StopSignal": "9", "ArgsEscaped": True,
                   "Healthcheck": {"Test": ["NONE"], "Interval": 30_000_000_000, "Retries": 3}, "OnBuild": [], "Tty": False,
                   "Shell": ["/bin/sh", "-c"], "StopTimeout": 10, "Hostname": "", "Memory": 0},
        "docker_version": "20.10.5", "container": "x", "parent": "", "comment": "", "id": "x",
        "history": [{"created": "0001-01-01T00:00:00Z"}, {"created": "2026-11-30T12:00:00.123456789+01:00", "author": "a", "empty_layer": False}]}), None),
    ("C3-06f", "schema 1", Lab(edit_manifest=with_(schemaVersion=1)), "media.schema1"),
    ("C3-08", "more diff_ids than layers", Lab(edit_config=lambda c: with_(
        rootfs__diff_ids=[*c["rootfs"]["diff_ids"], "sha256:" + "1" * 64])(c)), "config.layers"),
    ("B001", "manifest without layers", Lab(edit_manifest=with_(layers=[])), "config.layers"),
    ("C3-09a", "no rootfs", Lab(edit_config=with_(rootfs=None)), "json.field"),
    ("C3-09c", "no diff_ids and no layers", Lab(layers=[], edit_config=with_(rootfs__diff_ids=None)), None),
    ("C3-09d", "no diff_ids for layers", Lab(edit_config=with_(rootfs__diff_ids=None)), "config.layers"),
    ("C3-09b", "rootfs.type", Lab(edit_config=with_(rootfs__type="tarball")), "config.rootfs"),
    ("C3-10", "wrong diff_id (B003)", Lab(edit_config=with_(rootfs__diff_ids__1="sha256:" + "2" * 64)), "layer.diff_id"),
    ("C3-12a", "history of more layers", Lab(edit_config=lambda c: with_(history=[*c["history"], {}])(c)), "config.history"),
    ("C3-12d", "a history of fewer layers", Lab(edit_config=lambda c: with_(history=c["history"][:1])(c)), None),
    ("C3-12e", "a history of nothing", Lab(edit_config=with_(history=[])), None),
    ("C3-12b", "no history", Lab(edit_config=with_(history=None)), None),
    ("C3-12c", "an empty layer in the history", Lab(edit_config=lambda c: with_(
        history=[{"empty_layer": True}, *c["history"]])(c)), None),
    ("C3-13a", "unknown suffix", Lab(edit_manifest=with_(layers__0__mediaType=OCI + "layer.v1.tar+lz4")), "media.mismatch"),
    ("C3-13b", "config type as layer", Lab(edit_manifest=with_(layers__0__mediaType=OCI + "config.v1+json")), "media.mismatch"),
    *((f"C3-14-{real}-{said or 'tar'}", "declared compression", Lab(pack=real, edit_manifest=with_(
        layers__0__mediaType=OCI + "layer.v1.tar" + said)), "media.mismatch")
      for real, said in (("gzip", ""), ("gzip", "+zstd"), ("zstd", ""), ("zstd", "+gzip"), ("identity", "+gzip"),
                         ("identity", "+zstd"))),
    ("C3-16a", "no such platform (B091)", Lab(platform=("linux", "arm64")), "platform.missing"),
    ("C3-16b", "two linux/amd64", Lab(edit_members=second_image({"os": "linux", "architecture": "amd64"})), "platform.ambiguous"),
    ("C3-16c", "two platforms", Lab(edit_members=second_image({"os": "linux", "architecture": "arm64"})), None),
    ("B040", "one image twice", Lab(edit_index=platform_twice), None),
    ("B042", "nested index", Lab(edit_members=nested(1)), None),
    ("C3-16d", "index five deep", Lab(edit_members=nested(5)), "limit.index_depth"),
    ("B086", "attestation by platform", Lab(edit_members=second_image({"os": "unknown", "architecture": "unknown"})), None),
    ("B087", "attestation by annotation", Lab(edit_members=second_image({"os": "linux", "architecture": "amd64"},
        annotations={"vnd.docker.reference.type": "attestation-manifest"})), None),
    ("B063", "config without platform", Lab(edit_config=with_(architecture=None)), "config.platform"),
    ("B063b", "platforms contradict", Lab(edit_descriptor=with_(platform__architecture="s390x")), "config.platform"),
    ("C3-17a", "no oci-layout", Lab(edit_members=lambda m: {k: v for k, v in m.items() if k != "oci-layout"}), "archive.missing"),
    ("C3-17b", "layout 2.0", Lab(edit_members=lambda m: m | {"oci-layout": dump({"imageLayoutVersion": "2.0.0"})}), "layout.version"),
    ("C3-17c", "layout is text", Lab(edit_members=lambda m: m | {"oci-layout": b"1.0.0\n"}), "json.syntax"),
    ("C3-18", "manifest missing", Lab(edit_members=lambda m: {
        k: v for k, v in m.items() if b'"layers":[{' not in v or k == "manifest.json"}), "archive.missing"),
    ("C3-20", "foreign layer", Lab(edit_manifest=with_(
        layers__0__mediaType=OCI + "layer.nondistributable.v1.tar+gzip",
        layers__0__urls=["http://169.254.169.254/x"])), "media.foreign"),
    ("B024", "gzip-compressed config", Lab(edit_config=lambda c: gzip.compress(dump(c))), "json.syntax"),
    ("B046a", "index without mediaType", Lab(edit_index=with_(mediaType=None)), None),
    ("B046b", "index says manifest", Lab(edit_index=with_(mediaType=OCI + "manifest.v1+json")), "media.mismatch"),
    ("B194a", "CUDA_HOME with a colon", Lab(edit_config=with_(config__Env=["CUDA_HOME=:/usr/local/cuda"])), "config.env"),
    ("B194b", "no equals sign", Lab(edit_config=with_(config__Env=["PATH"])), None),
    ("B194d", "no name", Lab(edit_config=with_(config__Env=["=x"])), "config.env"),
    ("B194e", "a NUL", Lab(edit_config=with_(config__Env=["A=\0"])), "config.env"),
    ("B194c", "LD_LIBRARY_PATH with an empty end", Lab(edit_config=with_(config__Env=["LD_LIBRARY_PATH=/a:"])), None),
    ("B096a", "hard link into a lower layer", Lab(layers=[files(a=b"a"), tar(
        entry("b", type=b"1", linkname="a"))]), None),
    ("B096b", "hard link into no layer", Lab(layers=[files(a=b"a"), tar(
        entry("b", type=b"1", linkname="nowhere"))]), "entry.link_target"),
    ("B005", "one layer twice", Lab(layers=[*ONE, files(b=b"b"), *ONE]), None),
    ("B027", "one folder twice", Lab(layers=[tar(
        entry("d", type=b"5", mode=0o755), entry("d", type=b"5", mode=0o755))]), "entry.duplicate"),
    *((f"C4-{name}", "whiteout", Lab(layers=[tar(entry(path, data, **more))]), code) for name, path, data, more, code in (
        ("01a", ".wh.", b"", {}, "entry.whiteout"), ("01b", "d/.wh.", b"", {}, "entry.whiteout"),
        ("02a", ".wh..", b"", {}, "entry.whiteout"), ("02b", "d/.wh...", b"", {}, "entry.whiteout"),
        ("04", "d/.wh..wh..opq", b"", {}, None), ("05a", ".wh..wh.plnk", b"", {}, "entry.whiteout"),
        ("05b", "d/.wh..wh.aufs", b"", {}, "entry.whiteout"), ("09", ".wh.x/child", b"", {}, "entry.whiteout"),
        ("10a", ".wh.x", b"", {"type": b"5", "mode": 0o755}, "entry.whiteout"),
        ("10b", ".wh.x", b"", {"type": b"2", "linkname": "y"}, "entry.whiteout"),
        ("10c", ".wh.x", b"data", {}, "entry.whiteout"), ("08", "d/.wh.link", b"", {}, None))),
]  # fmt: skip
