"""Small image archives, valid unless told otherwise, built with nothing of ours: the other side of every check.

A ``Lab`` derives all documents from its layers; the ``edit_*`` hooks change a document before the digests above it are
taken, ``edit_members`` changes the finished archive.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

OCI = "application/vnd.oci.image."
LAYER = OCI + "layer.v1.tar"
Members = dict[str, bytes]
Edit = Callable[[Any], Any]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def dump(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def entry(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    """A tar entry; ``fields`` are TarInfo's attributes."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def tar(*entries: tuple[tarfile.TarInfo, bytes], fmt: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar of these entries, ending in two zero blocks and no more."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=fmt, encoding="utf-8", errors="surrogateescape") as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
        end = out.tell()
    return out.getvalue()[:end] + bytes(1024)


def files(**contents: bytes) -> bytes:
    """A layer of plain files."""
    return tar(*(entry(name, data) for name, data in contents.items()))


PACK: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "identity": (LAYER, lambda data: data),
    "gzip": (LAYER + "+gzip", lambda data: gzip.compress(data, 6, mtime=0)),
    "zstd": (LAYER + "+zstd", lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data)),
}


def unchanged(value: Any) -> Any:
    return value


@dataclass
class Lab:
    """One image; see the module."""

    layers: list[bytes] = field(default_factory=lambda: [files(a=b"alpha" * 300), files(b=b"beta")])
    pack: str = "gzip"
    name: str = "lab/image:1"
    platform: tuple[str, str] = ("linux", "amd64")
    edit_layer: Callable[[int, bytes], bytes] = lambda _n, blob: blob
    edit_config: Edit = unchanged
    edit_manifest: Edit = unchanged
    edit_descriptor: Edit = unchanged
    edit_index: Edit = unchanged
    edit_docker: Edit = unchanged
    edit_members: Edit = unchanged

    def config(self) -> dict[str, Any]:
        return {
            "architecture": self.platform[1], "os": self.platform[0], "config": {"Env": ["PATH=/usr/bin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + sha(layer) for layer in self.layers]},
            "history": [{"created_by": f"step {n}"} for n in range(len(self.layers))],
        }  # fmt: skip

    def blobs(self) -> tuple[list[tuple[str, bytes]], bytes]:
        media, pack = PACK[self.pack]
        layers = [(media, self.edit_layer(n, pack(layer))) for n, layer in enumerate(self.layers)]
        return layers, _bytes(self.edit_config(self.config()))

    def oci(self) -> Members:
        """The members of an OCI archive that is a Docker archive too."""
        layers, config = self.blobs()
        manifest = _bytes(self.edit_manifest({
            "schemaVersion": 2, "mediaType": OCI + "manifest.v1+json",
            "config": descriptor(OCI + "config.v1+json", config),
            "layers": [descriptor(media, blob) for media, blob in layers],
        }))  # fmt: skip
        top = descriptor(OCI + "manifest.v1+json", manifest) | {
            "annotations": {"io.containerd.image.name": f"docker.io/{self.name}"},
            "platform": {"os": self.platform[0], "architecture": self.platform[1]},
        }
        index = {"schemaVersion": 2, "mediaType": OCI + "index.v1+json", "manifests": [self.edit_descriptor(top)]}
        members = {
            "oci-layout": dump({"imageLayoutVersion": "1.0.0"}),
            "index.json": _bytes(self.edit_index(index)),
            "manifest.json": _bytes(self.edit_docker(self.item(config, ["blobs/sha256/" + sha(b) for _, b in layers]))),
            **{"blobs/sha256/" + sha(data): data for data in (manifest, config, *(b for _, b in layers))},
        }
        edited: Members = self.edit_members(members)
        return edited

    def item(self, config: bytes, layers: list[str], config_name: str = "") -> list[dict[str, Any]]:
        return [{"Config": config_name or "blobs/sha256/" + sha(config), "RepoTags": [self.name], "Layers": layers}]

    def docker(self) -> Members:
        """The members of an archive as skopeo and podman write them: no layout."""
        layers, config = self.blobs()
        names = [sha(blob) + ".tar" for _, blob in layers]
        members = dict(zip(names, (blob for _, blob in layers), strict=True))
        members[sha(config) + ".json"] = config
        members["manifest.json"] = _bytes(self.edit_docker(self.item(config, names, sha(config) + ".json")))
        edited: Members = self.edit_members(members)
        return edited

    def legacy(self) -> list[tuple[tarfile.TarInfo, bytes]]:
        """The entries of docker save before version 25: folders, VERSION, json, and a link for a repeated layer."""
        layers, config = self.blobs()
        out: list[tuple[tarfile.TarInfo, bytes]] = []
        first: dict[str, str] = {}
        names: list[str] = []
        for n, (_, blob) in enumerate(layers):
            folder = sha(b"%d" % n + blob)
            names.append(f"{folder}/layer.tar")
            out += [entry(folder, type=tarfile.DIRTYPE, mode=0o755), entry(f"{folder}/VERSION", b"1.0")]
            out.append(entry(f"{folder}/json", dump({"id": folder})))
            if sha(blob) in first:
                out.append(entry(names[-1], type=tarfile.SYMTYPE, linkname="../" + first[sha(blob)]))
            else:
                out.append(entry(names[-1], blob, mtime=1700000000))
                first[sha(blob)] = names[-1]
        out.append(entry(sha(config) + ".json", config))
        out.append(entry("manifest.json", dump(self.item(config, names, sha(config) + ".json"))))
        out.append(entry("repositories", dump({"lab/image": {"1": names[-1].split("/")[0]}})))
        return out


def descriptor(media: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media, "digest": "sha256:" + sha(data), "size": len(data)}


def with_(**changes: object) -> Edit:
    """An edit that sets keys; dots in a key go deeper (written ``__``), None deletes."""

    def edit(value: dict[str, Any]) -> dict[str, Any]:
        value = copy.deepcopy(value)
        for key, change in changes.items():
            at: Any = value
            *path, last = key.split("__")
            for part in path:
                at = at[int(part) if part.isdigit() else part]
            if change is None:
                del at[last]
            else:
                at[int(last) if last.isdigit() else last] = change
        return value

    return edit


def write(path: Path, members: Members, prefix: str = "", compress: bool = False) -> Path:
    """Members as an archive file."""
    data = tar(*(entry(prefix + name, data) for name, data in members.items()))
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


def write_layout(path: Path, members: Members) -> Path:
    """Members as a folder."""
    for name, data in members.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return path


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else dump(value)


def together(*images: Members) -> Members:
    """Several images in one archive, as docker save writes them: both lists name all of them."""
    out: Members = {}
    for members in images:
        out |= members
    for name, key in (("index.json", "manifests"), ("manifest.json", None)):
        values = [json.loads(members[name]) for members in images if name in members]
        if values:
            joined = [item for value in values for item in (value[key] if key else value)]
            out[name] = dump({**values[0], key: joined} if key else joined)
    return out
