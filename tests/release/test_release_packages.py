"""What an image is made of, from its own files; bills of materials of archives, layouts and folders."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import FormatError, IntegrityError, OciBuilderError, PolicyError, SpecError
from oci_builder.release.packages import Contents, read_packages
from oci_builder.sbom import BillOptions, choose, make_bills, write_bills
from tests.lab.archives import Lab, entry, tar, write, write_layout

pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")
SITE = "opt/rt/envs/vllm/lib/python3.13/site-packages"
ONE = "ab" * 32
STATUS = b"""Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.35-0ubuntu3
Description: GNU C Library
 with: a colon in its continuation
Depends: x

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: zlib1g
Status: install ok installed
Architecture: amd64
Version: 1:1.2.11
"""


def metadata(name: str, version: str = "1.0", more: str = "") -> bytes:
    return f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{more}\n".encode()


def dist(name: str, version: str = "1.0", place: str = SITE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(f"{place}/{name}-{version}.dist-info/METADATA", metadata(name, version))


def hard(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.LNKTYPE, linkname=target)


def read(tmp_path: Path, *layers: bytes) -> Contents:
    return read_packages(write(tmp_path / "image.tar", Lab(list(layers)).oci()))


def names(contents: Contents, tier: str = "vllm") -> list[str]:
    return [f"{p['name']} {p['version']}" for p in contents.tiers.get(tier, {"packages": []})["packages"]]


def test_packages_of_tiers_and_elsewhere(tmp_path: Path) -> None:
    found = read(tmp_path, tar(dist("Flash_Attn"), dist("six", place="usr/lib/python3/dist-packages")))
    assert names(found) == ["flash-attn 1.0"]
    assert [(p["name"], p["place"]) for p in found.elsewhere] == [("six", "usr/lib/python3/dist-packages")]


def test_metadata_is_utf_8(tmp_path: Path) -> None:
    """Core metadata is UTF-8, whatever e-mail is."""
    odd = entry(f"{SITE}/x-1.0.dist-info/METADATA", metadata("x", more="License: Éclair – © 2024"))
    assert read(tmp_path, tar(odd)).tiers["vllm"]["packages"][0]["licence"] == "Éclair – © 2024"


@pytest.mark.parametrize("name", [" ", "/", "a/b", "%", "é", "a" * 3000])
def test_a_name_that_no_package_url_holds_is_still_listed(tmp_path: Path, name: str) -> None:
    status = f"Package: {name}\nVersion: 1\nArchitecture: amd64\n".encode()
    read(tmp_path, tar(entry("var/lib/dpkg/status", status), dist("x")))
    bill = json.loads(make_bills(tmp_path / "image.tar")["image"])
    assert len(bill["components"]) == (1 if name == " " else 2)


def test_egg_info_counts(tmp_path: Path) -> None:
    egg = entry("usr/lib/python3/dist-packages/old-2.egg-info/PKG-INFO", metadata("old", "2"))
    assert [p["name"] for p in read(tmp_path, tar(egg)).elsewhere] == ["old"]


@pytest.mark.parametrize(
    "whiteout",
    [
        f"{SITE}/.wh.gone-1.0.dist-info", "opt/rt/envs/.wh.vllm", f"{SITE}/gone-1.0.dist-info/.wh..wh..opq",
        f"{SITE}/gone-1.0.dist-info/.wh.METADATA",
    ],
)  # fmt: skip
def test_what_an_upper_layer_removes_is_not_in_the_image(tmp_path: Path, whiteout: str) -> None:
    found = read(tmp_path, tar(dist("gone"), dist("there", place="a/site-packages")), tar(entry(whiteout)))
    assert (names(found), [p["name"] for p in found.elsewhere]) == ([], ["there"])


def test_an_upper_layer_s_version_wins(tmp_path: Path) -> None:
    same = entry(f"{SITE}/x-1.0.dist-info/METADATA", metadata("x", "1.0.post1"))
    assert names(read(tmp_path, tar(dist("x")), tar(same))) == ["x 1.0.post1"]


def test_a_hard_link_is_its_target(tmp_path: Path) -> None:
    """Tiers share files as hard links, across tiers in one layer."""
    other = f"{SITE.replace('vllm', 'base')}/x-1.0.dist-info/METADATA"
    assert names(read(tmp_path, tar(dist("x"), hard(other, f"{SITE}/x-1.0.dist-info/METADATA"))), "base") == ["x 1.0"]


def test_a_hard_link_to_a_file_of_another_name_is_read(tmp_path: Path) -> None:
    """Equal files are one, whatever they are called."""
    copy = entry("a/COPY", metadata("x"))
    assert names(read(tmp_path, tar(copy, hard(f"{SITE}/x-1.0.dist-info/METADATA", "a/COPY")))) == ["x 1.0"]


def test_an_inventory_adds_what_files_do_not_say_and_is_not_believed_beyond(tmp_path: Path) -> None:
    said = {
        "tier": "vllm", "omitted": {"deep-ep": "needs nvcc"},
        "packages": [
            {"name": "x", "version": "1.0", "hashes": [ONE], "source": "https://x.org/x.whl", "licence": "Lie"},
            {"name": "ghost", "version": "9"},
        ],
    }  # fmt: skip
    inventory = entry("opt/rt/inventory-vllm.json", json.dumps(said).encode())
    tier = read(tmp_path, tar(dist("x"), dist("extra"), inventory)).tiers["vllm"]
    x = next(p for p in tier["packages"] if p["name"] == "x")
    assert (x["hashes"], x["source"], x["licence"]) == ([ONE], "https://x.org/x.whl", "")
    assert (tier["absent"], tier["unlisted"], tier["omitted"]) == (["ghost 9"], ["extra 1.0"], said["omitted"])


def test_an_inventory_elsewhere_is_none(tmp_path: Path) -> None:
    """Only one that lies beside ``envs`` is the tier's."""
    fake = entry("tmp/inventory-vllm.json", b'{"packages": [], "omitted": {"x": "y"}}')
    assert read(tmp_path, tar(dist("x"), fake)).tiers["vllm"]["omitted"] == {}


def test_a_package_s_source_has_no_credentials(tmp_path: Path) -> None:
    url = {"url": "https://user:hunter2@x.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}
    direct = entry(f"{SITE}/x-1.0.dist-info/direct_url.json", json.dumps(url).encode())
    source = read(tmp_path, tar(dist("x"), direct)).tiers["vllm"]["packages"][0]["source"]
    assert source.startswith("git+https://") and source.endswith("@c0ffee") and "hunter2" not in source


def test_debian_packages_and_their_states(tmp_path: Path) -> None:
    release = entry("etc/os-release", b'ID=ubuntu\nVERSION_ID="22.04"\n')
    found = read(tmp_path, tar(entry("var/lib/dpkg/status", STATUS), release)).system
    assert [(p["name"], p["version"], p["distro"]) for p in found] == [
        ("libc6", "2.35-0ubuntu3", "ubuntu-22.04"), ("zlib1g", "1:1.2.11", "ubuntu-22.04"),
    ]  # fmt: skip


def test_distroless_and_alpine_databases(tmp_path: Path) -> None:
    one = entry("var/lib/dpkg/status.d/base", b"Package: base-files\nVersion: 12\nArchitecture: amd64\n")
    sums = entry("var/lib/dpkg/status.d/base.md5sums", b"Package: no\nVersion: 1\n")
    apk = entry("lib/apk/db/installed", b"P:musl\nV:1.2.5-r0\nA:x86_64\nL:MIT\n\nP:busybox\nV:1.36\nA:x86_64\n")
    found = [(p["type"], p["name"], p["licence"]) for p in read(tmp_path, tar(one, sums, apk)).system]
    assert found == [("apk", "busybox", ""), ("apk", "musl", "MIT"), ("deb", "base-files", "")]


def test_a_database_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    found = read(tmp_path, tar(entry("var/lib/rpm/rpmdb.sqlite", b"SQLite format 3\0")))
    assert found.unread == ["var/lib/rpm/rpmdb.sqlite"]
    bill = json.loads(make_bills(tmp_path / "image.tar")["image"])
    assert bill["metadata"]["properties"] == [{"name": "oci-builder:unread", "value": "var/lib/rpm/rpmdb.sqlite"}]


def test_the_interpreter_is_a_component(tmp_path: Path) -> None:
    header = entry("opt/rt/python/include/python3.13/patchlevel.h", b'#define PY_VERSION  "3.13.13"\n')
    library = entry("opt/rt/python/lib/python3.13/os.py", b"")
    system = entry("usr/lib/python3.10/os.py", b"")
    assert read(tmp_path, tar(header, library, system)).interpreters == {"opt/rt/python": "3.13.13", "usr": "3.10"}


def test_the_same_packages_whatever_the_form(tmp_path: Path) -> None:
    lab = Lab([tar(dist("x"), dist("y"))])
    forms = [
        write(tmp_path / "o", lab.oci()),
        write(tmp_path / "d", lab.docker()),
        write_layout(tmp_path / "l", lab.oci()),
    ]
    forms += [write(tmp_path / "z", lab.docker(), compress=True), tmp_path / "tree.tar.gz", tmp_path / "folder"]
    (tmp_path / "tree.tar.gz").write_bytes(gzip.compress(lab.layers[0]))
    with tarfile.open(tmp_path / "tree.tar.gz") as tree:
        tree.extractall(tmp_path / "folder", filter="fully_trusted")
    assert {str(f): names(read_packages(f)) for f in forms} == {str(f): ["x 1.0", "y 1.0"] for f in forms}


def test_the_image_s_document_is_bound_to_the_manifest(tmp_path: Path) -> None:
    archive = write(tmp_path / "i", Lab([tar(dist("x"))]).oci())
    made = make_bills(archive)
    about = json.loads(made["image"])["metadata"]["component"]
    with tarfile.open(archive) as members:
        index = json.load(members.extractfile("index.json"))  # type: ignore[arg-type]
    assert "sha256:" + about["hashes"][0]["content"] == index["manifests"][0]["digest"]
    assert make_bills(archive) == made


def test_layers_that_are_not_what_the_manifest_says_make_no_bill(tmp_path: Path) -> None:
    other = gzip.compress(tar(dist("evil")), mtime=0)
    lab = Lab([tar(dist("x"))], edit_members=lambda m: {n: other if d[:2] == b"\x1f\x8b" else d for n, d in m.items()})
    with pytest.raises(IntegrityError) as caught:
        make_bills(write(tmp_path / "i", lab.oci()))
    assert caught.value.code in ("blob.size", "blob.digest")


@pytest.mark.parametrize("text", [b"[]", b'{"packages": 1}', b"{", b'{"packages": [], "packages": []}'])
def test_an_inventory_that_is_none_is_an_error_of_ours(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(FormatError):
        read(tmp_path, tar(dist("x"), entry("opt/rt/inventory-vllm.json", text)))


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe\x00", b"Name: x\n", b"Version: 1\n", b"Name: \nVersion: \n", b"Name: a/b c\nVersion: \x01\n",
     "Name: é\nVersion: ü\n".encode(), b"Name: x\nVersion: 1\nLicense-Expression: (((\n", b"N" * 100_000],
)  # fmt: skip
def test_odd_metadata_never_breaks_it(tmp_path: Path, text: bytes) -> None:
    odd = entry(f"{SITE}/odd-1.dist-info/METADATA", text)
    try:
        bills = make_bills(write(tmp_path / "i", Lab([tar(dist("x"), odd)]).oci()))
    except OciBuilderError:
        return
    assert "pkg:pypi/x@1.0" in bills["vllm"].decode()


def test_a_file_over_the_bound_is_refused_not_read(tmp_path: Path) -> None:
    huge = entry(f"{SITE}/x-1.dist-info/METADATA", bytes(33 << 20))
    with pytest.raises(PolicyError) as caught:
        read(tmp_path, tar(huge))
    assert caught.value.code == "limit.document"


def test_names_come_from_labels_unless_given(tmp_path: Path) -> None:
    def label(config: dict[str, Any]) -> dict[str, Any]:
        labels = {"org.opencontainers.image.title": "rt", "org.opencontainers.image.version": "r7"}
        return {**config, "created": "2025-12-01T00:00:00Z", "config": {"Labels": labels}}

    archive = write(tmp_path / "i", Lab([tar(dist("x"))], edit_config=label).oci())
    metadata_ = json.loads(make_bills(archive)["vllm"])["metadata"]
    assert (metadata_["component"]["name"], metadata_["component"]["version"]) == ("rt/vllm", "r7")
    assert metadata_["timestamp"] == "2025-12-01T00:00:00+00:00"
    given = json.loads(make_bills(archive, BillOptions("n", "v", 0))["image"])["metadata"]
    assert (given["component"]["name"], given["timestamp"]) == ("n", "1970-01-01T00:00:00+00:00")


def test_a_tier_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    made = make_bills(write(tmp_path / "i", Lab([tar(dist("x"))]).oci()))
    with pytest.raises(SpecError) as caught:
        choose(made, "base")
    assert "image, vllm" in caught.value.message
    assert [p.name for p in write_bills(made, tmp_path)] == ["image.cdx.json", "vllm.cdx.json"]


def test_without_the_library_it_says_what_to_install(tmp_path: Path) -> None:
    write(tmp_path / "i", Lab([tar(dist("x"))]).oci())
    program = "import sys; sys.modules['cyclonedx'] = None; from oci_builder.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "sbom", str(tmp_path / "i")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "oci-builder[payload]" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


@pytest.mark.parametrize("key", ["name", "version", "hashes", "source", "licence_files", "licence", "record"])
@pytest.mark.parametrize("value", [None, 1, [], {}, [1], ["x"], "x y", True, "\ud800"])
def test_an_inventory_s_odd_values_add_nothing_and_break_nothing(tmp_path: Path, key: str, value: object) -> None:
    said = {"tier": "vllm", "omitted": {"a": 1}, "packages": [{"name": "x", "version": "1.0", key: value}, 5]}
    inventory = entry("opt/rt/inventory-vllm.json", json.dumps(said).encode())
    archive = write(tmp_path / "i", Lab([tar(dist("x"), inventory)]).oci())
    try:
        assert b"pkg:pypi/x@1.0" in make_bills(archive)["vllm"]
    except FormatError as error:
        assert value == "\ud800" and error.code.startswith("json.")
