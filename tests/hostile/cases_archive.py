"""C10: archives that are not what they seem, and unusual ones that are."""


from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab.archives import Lab, Members, dump, entry, files, sha, tar, write, write_layout

Case = tuple[str, str, Callable[[Path], Path], str | None]


def oci(edit: Callable[[Members], Members] = lambda m: m, **fields: Any) -> Callable[[Path], Path]:
    return lambda folder: write(folder / "a.tar", edit(Lab(**fields).oci()))


def docker(edit: Callable[[Members], Members] = lambda m: m, **fields: Any) -> Callable[[Path], Path]:
    return lambda folder: write(folder / "d.tar", edit(Lab(**fields).docker()))


def items(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Members], Members]:
    return lambda m: m | {"manifest.json": dump(change(json.loads(m["manifest.json"])))}


def raw(data: Callable[[], bytes]) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        (folder / "raw.tar").write_bytes(data())
        return folder / "raw.tar"

    return build


def plus(*more: Any) -> Callable[[], bytes]:
    """An archive with further entries behind."""
    return lambda: tar(*(entry(n, d) for n, d in Lab().docker().items()), *more)


def without(name: str) -> Callable[[Members], Members]:
    return lambda m: {key: value for key, value in m.items() if not key.endswith(name)}


def first_layer_gone(members: Members) -> Members:
    name = next(key for key in members if key.endswith(".tar"))
    return {key: value for key, value in members.items() if key != name}


def two_images() -> bytes:
    one, two = Lab().docker(), Lab(layers=[files(z=b"z")], name="other:2").docker()
    both = json.loads(one["manifest.json"]) + json.loads(two["manifest.json"])
    return tar(*(entry(n, d) for n, d in (one | two | {"manifest.json": dump(both)}).items()))


def links(*targets: tuple[str, str], kind: bytes = b"2") -> Callable[[], bytes]:
    """The first layer's member replaced by a link, and further links."""

    def build() -> bytes:
        members = Lab().docker()
        first = next(key for key in members if key.endswith(".tar"))
        kept = [entry(n, d) for n, d in members.items() if n != first]
        chain = [entry(first if name == "FIRST" else name, type=kind, linkname=to) for name, to in targets]
        return tar(*kept, *chain)

    return build


def symlinked_layout(folder: Path) -> Path:
    members = Lab().oci()
    root = write_layout(folder / "layout", members)
    blob = next(name for name in members if name.startswith("blobs/") and b"layers" not in members[name])
    (folder / "outside").write_bytes(members[blob])
    (root / blob).unlink()
    (root / blob).symlink_to(folder / "outside")
    return root


def through_symlink(target: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        (folder / "link").symlink_to(target(folder))
        return folder / "link"

    return build


def legacy(**fields: Any) -> Callable[[], bytes]:
    return lambda: tar(*Lab(pack="identity", **fields).legacy())


TWICE = [files(a=b"x"), files(b=b"y"), files(a=b"x")]
CASES: list[Case] = [
    ("ok-oci", "combined OCI archive", oci(), None),
    ("ok-docker", "docker archive as skopeo writes", docker(), None),
    ("B020", "docker archive with gzip layers", docker(pack="gzip"), None),
    ("ok-plain", "docker archive with plain layers", docker(pack="identity"), None),
    ("ok-legacy", "docker save of old, a layer twice", raw(legacy(layers=TWICE)), None),
    ("ok-legacy-gz", "the same, gzip-compressed", raw(lambda: gzip.compress(legacy(layers=TWICE)())), None),
    ("ok-layout", "layout folder", lambda f: write_layout(f / "l", Lab().oci()), None),
    ("B011", "names with ./", lambda f: write(f / "p.tar", Lab().oci(), "./"), None),
    ("B019a", "gzip outside", lambda f: write(f / "a.tar.gz", Lab().oci(), compress=True), None),
    ("B019b", "through a symlink", through_symlink(oci()), None),
    ("B019c", "gzip through a symlink", through_symlink(lambda f: write(f / "g", Lab().oci(), compress=True)), None),
    ("C10-01a", "no manifest.json", docker(without("manifest.json")), "archive.missing"),
    ("C10-01b", "manifest.json null", docker(lambda m: m | {"manifest.json": b"null"}), "json.field"),
    ("C10-01c", "manifest.json empty", docker(lambda m: m | {"manifest.json": b"[]"}), "archive.images"),
    ("C10-01d", "two images", raw(two_images), None),
    ("C10-02a", "link to itself", raw(links(("FIRST", "FIRST"))), "archive.missing"),
    ("C10-02b", "a cycle", raw(links(("FIRST", "x"), ("x", "y"), ("y", "x"))), "archive.missing"),
    ("C10-02c", "link out", raw(links(("FIRST", "../../etc/passwd"))), "archive.missing"),
    ("C10-02d", "absolute link", raw(links(("FIRST", "/etc/passwd"))), "archive.missing"),
    ("C10-02e", "hard link", raw(links(("FIRST", "manifest.json"), kind=b"1")), "archive.member"),
    ("C10-02f", "device", raw(plus(entry("dev", type=b"3", devmajor=1, devminor=3))), "archive.member"),
    ("C10-02g", "fifo", raw(plus(entry("pipe", type=b"6"))), "archive.member"),
    ("C2-10", "blob is a symlink out of the layout", symlinked_layout, "archive.member"),
    ("C10-04a", "manifest.json twice", raw(plus(entry("manifest.json", b"[]"))), "archive.duplicate"),
    ("C10-04b", "manifest.json twice, once with ./", raw(plus(entry("./manifest.json", b"[]"))), "archive.duplicate"),
    ("C10-05", "an extra member", raw(plus(entry("extra", b"x"))), None),
    ("C10-06", "config name is not its digest", docker(lambda m: {
        ("f" * 64 + ".json" if k.endswith(".json") and k != "manifest.json" else k): v for k, v in items(
            lambda i: [i[0] | {"Config": "f" * 64 + ".json"}])(m).items()}), "archive.config_name"),
    ("B007", "a layer is missing", docker(first_layer_gone), "archive.missing"),
    ("B009", "empty layer name", docker(items(lambda i: [i[0] | {"Layers": ["", i[0]["Layers"][1]]}])), "archive.missing"),
    ("B013", "the two views name other bytes", oci(items(lambda i: [i[0] | {"Layers": i[0]["Layers"][::-1]}])), "archive.views"),
    ("B032", "the two views differ in the name", oci(items(lambda i: [i[0] | {"RepoTags": ["other:1"]}])), "archive.views"),
    ("B031a", "no tags", docker(items(lambda i: [i[0] | {"RepoTags": None}])), None),
    ("B031b", "upper-case tag", docker(items(lambda i: [i[0] | {"RepoTags": ["Lab/Image:1"]}])), "archive.tag"),
    ("B031c", "tag without tag", docker(items(lambda i: [i[0] | {"RepoTags": ["lab/image"]}])), "archive.tag"),
    ("B044", "a tar of one text file", raw(lambda: tar(entry("x.txt", b"hello"))), "archive.missing"),
    ("B044b", "no tar at all", raw(lambda: b"hello world" * 100), "tar.checksum"),
    ("B044c", "empty file", raw(lambda: b""), "tar.truncated"),
    ("B131", "cut at a member boundary", raw(lambda: plus()()[:-1024 - 512]), "tar.truncated"),
    ("C2-01", "a blob of another content", oci(lambda m: m | {
        next(k for k in m if k.startswith("blobs")): b"{}"}), "blob.digest"),
    ("C2-01b", "an unreferenced blob with a false name", oci(lambda m: m | {"blobs/sha256/" + "0" * 64: b"x"}), "blob.digest"),
    ("C10-09", "outer gzip cut", raw(lambda: gzip.compress(plus()())[:-9]), "gzip.truncated"),
    ("C9-05", "junk after the outer gzip", raw(lambda: gzip.compress(plus()()) + b"junk"), "gzip.trailing"),
    ("C7-03", "bytes after the end marker", raw(lambda: plus()() + b"x" * 512), "tar.trailing"),
    ("C7-21", "padding that is not zeros", raw(lambda: _padded(plus()())), "tar.padding"),
    ("ok-config-name", "a config under another name is still its digest", docker(lambda m: m | {sha(b"x") + ".json": b"x"}), None),
]  # fmt: skip


def _padded(data: bytes) -> bytes:
    """The byte before the second header is padding of the first member."""
    size = int(data[124:135], 8)
    end = 512 + size + (-size % 512)
    return data[: end - 1] + b"\1" + data[end:]
