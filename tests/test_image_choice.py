"""Archives that hold several images: verify judges all of them, the other verbs let the user say which is meant."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from oci_builder.difference import diff_archives
from oci_builder.inspection import inspect_archive
from oci_builder.model.errors import FormatError, OciBuilderError, SpecError
from oci_builder.model.spec import parse_spec
from oci_builder.push import PushOptions
from oci_builder.transports.registry_source import PushSource
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.verify import VerifyOptions, verify_archives
from tests.lab.archives import OCI, Lab, Members, descriptor, dump, sha, together, with_, write, write_layout
from tests.lab.archives import files as layer
from tests.test_cli import call

ONE = Lab([layer(one=b"1")], name="lab/one:1")
TWO = Lab([layer(two=b"2")], name="lab/two:1")
BOTH = together(ONE.oci(), TWO.oci())


def manifest_of(lab: Lab) -> str:
    found: str = json.loads(lab.oci()["index.json"])["manifests"][0]["digest"]
    return found


def config_of(lab: Lab) -> str:
    return "sha256:" + sha(lab.blobs()[1])


def forms(folder: Path) -> dict[str, Path]:
    """The same two images in each outer form."""
    docker = together(ONE.docker(), TWO.docker())
    return {
        "oci": write(folder / "oci.tar", BOTH),
        "gz": write(folder / "oci.tar.gz", BOTH, compress=True),
        "late": write(folder / "late.tar.gz", dict(sorted(BOTH.items(), reverse=True)), compress=True),
        "docker": write(folder / "docker.tar", docker),
        "docker-gz": write(folder / "docker.tar.gz", docker, compress=True),
        "layout": write_layout(folder / "layout", BOTH),
    }


@pytest.mark.parametrize("form", ["oci", "gz", "late", "docker", "docker-gz", "layout"])
@pytest.mark.parametrize("asked", ["lab/two:1", "docker.io/lab/two:1", "config"])
def test_unpack_takes_the_image_that_is_asked_for(tmp_path: Path, form: str, asked: str) -> None:
    archive = forms(tmp_path)[form]
    image = config_of(TWO) if asked == "config" else asked
    unpack_image(archive, tmp_path / "out", UnpackOptions(image=image))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["two"]


@pytest.mark.parametrize("form", ["oci", "gz", "late", "docker", "docker-gz", "layout"])
def test_without_a_choice_the_error_says_what_there_is(tmp_path: Path, form: str) -> None:
    with pytest.raises(FormatError) as error:
        unpack_image(forms(tmp_path)[form], tmp_path / "out")
    assert error.value.code == "platform.ambiguous"
    assert "'lab/one:1'" in error.value.message and "'lab/two:1'" in error.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["oci", "gz", "late", "docker", "docker-gz", "layout"])
@pytest.mark.parametrize(("asked", "code"), [("lab/three:1", "spec.image"), ("sha256:" + "0" * 64, "spec.digest")])
def test_an_image_that_is_not_there(tmp_path: Path, form: str, asked: str, code: str) -> None:
    with pytest.raises(SpecError) as error:
        unpack_image(forms(tmp_path)[form], tmp_path / "out", UnpackOptions(image=asked))
    assert error.value.code == code
    assert "'lab/one:1'" in error.value.message and "'lab/two:1'" in error.value.message


@pytest.mark.parametrize("form", ["oci", "gz", "late", "docker", "docker-gz", "layout"])
def test_verify_judges_every_image(tmp_path: Path, form: str) -> None:
    """Docker 28's ``docker save a:1 b:1`` is good, and a fault of the one that is not asked for is a fault."""
    archive = forms(tmp_path)[form]
    report = verify_archives([archive], VerifyOptions(threads=1))
    assert report.ok and {f.code for f in report.findings} == {"platform.ambiguous", "archive.images"} - (
        set() if "manifest.json" in BOTH else {"archive.images"})  # fmt: skip
    chosen = verify_archives([archive], VerifyOptions(threads=1, image="lab/two:1"))
    assert chosen.ok and chosen.subjects[0]["config"] == config_of(TWO)
    assert "platform.ambiguous" not in {f.code for f in chosen.findings}


def test_a_fault_of_the_other_image_is_found(tmp_path: Path) -> None:
    bad = Lab([layer(one=b"1")], name="lab/one:1", edit_config=with_(rootfs__diff_ids__0="sha256:" + "0" * 64))
    archive = write(tmp_path / "a.tar", together(bad.oci(), TWO.oci()))
    report = verify_archives([archive], VerifyOptions(threads=1, image="lab/two:1"))
    assert {f.code for f in report.errors} == {"layer.diff_id"}


def test_images_without_names_that_both_lists_have_are_no_error(tmp_path: Path) -> None:
    """``docker save ID ID``: nothing is called anything, and both loaders take both."""
    nameless: dict[str, Any] = {"edit_docker": with_(**{"0__RepoTags": None}), "edit_descriptor": with_(annotations=None)}
    one, two = (Lab(lab.layers, **nameless) for lab in (ONE, TWO))
    archive = write(tmp_path / "a.tar", together(one.oci(), two.oci()))
    assert verify_archives([archive], VerifyOptions(threads=1)).ok
    unpack_image(archive, tmp_path / "out", UnpackOptions(image=manifest_of(two)))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["two"]


def nested(labs: list[Lab]) -> tuple[Members, str]:
    """An archive whose index.json leads to an index of these; and that index's digest."""
    members = together(*(lab.oci() for lab in labs))
    del members["manifest.json"]
    inner = members["index.json"]
    members["blobs/sha256/" + sha(inner)] = inner
    top = descriptor(OCI + "index.v1+json", inner) | {"annotations": {"io.containerd.image.name": "docker.io/lab/many:1"}}
    members["index.json"] = dump({**json.loads(inner), "manifests": [top]})
    return members, top["digest"]


@pytest.mark.parametrize("compress", [False, True])
def test_an_index_is_a_choice_too_and_the_platform_the_next(tmp_path: Path, compress: bool) -> None:
    arm = Lab([layer(arm=b"a")], name="lab/two:1", platform=("linux", "arm64"))
    members, digest = nested([TWO, arm])
    one = ONE.oci()
    del one["manifest.json"]
    archive = write(tmp_path / "a.tar", together(one, members), compress=compress)
    for number, asked in enumerate(("lab/many:1", digest, f"lab/many:1@{digest}")):
        unpack_image(archive, tmp_path / f"{number}", UnpackOptions("linux/arm64", image=asked))
        assert [p.name for p in (tmp_path / f"{number}").iterdir()] == ["arm"]


def test_a_bare_tag_and_latest(tmp_path: Path) -> None:
    bare = {"annotations": {"org.opencontainers.image.ref.name": "r1"}}
    one = Lab([layer(one=b"1")], edit_descriptor=lambda d: {**d, **bare}).oci()
    two = Lab([layer(two=b"2")], name="lab/two:latest").oci()
    del one["manifest.json"], two["manifest.json"]
    archive = write(tmp_path / "a.tar", together(one, two))
    for asked, name in (("r1", "one"), ("lab/two", "two")):
        unpack_image(archive, tmp_path / name, UnpackOptions(image=asked))
        assert (tmp_path / name / name).is_file()


def test_two_images_of_one_name_stay_ambiguous(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", together(ONE.oci(), Lab(TWO.layers, name="lab/one:1").oci()))
    with pytest.raises(OciBuilderError) as error:
        unpack_image(archive, tmp_path / "out", UnpackOptions(image="lab/one:1"))
    assert error.value.code == "platform.ambiguous"
    assert not verify_archives([archive], VerifyOptions(threads=1, image="lab/one:1")).ok


def test_inspect_diff_and_push_take_it(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", BOTH)
    assert inspect_archive(archive, image="lab/two:1").image["config"] == config_of(TWO)
    found = diff_archives(archive, archive, images=("lab/one:1", "lab/two:1"))
    assert (found.files["removed"], found.files["added"]) == (["'one'"], ["'two'"])
    assert PushOptions().image == ""
    with PushSource(archive, image="lab/two:1") as source:
        assert source.resolved.descriptor.digest == manifest_of(TWO)


def test_the_command_line(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", BOTH)
    done = call("unpack", archive, tmp_path / "out", "--image", "lab/two:1")
    assert done.returncode == 0 and (tmp_path / "out" / "two").is_file(), done.stderr
    assert call("unpack", archive, tmp_path / "no").returncode == 3
    assert call("unpack", archive, tmp_path / "no", "--image", "nobody:1").returncode == 2
    assert call("unpack", archive, tmp_path / "no", "--image", "").returncode == 2
    done = call("diff", archive, archive, "--image", "lab/one:1", "--image", "lab/two:1")
    assert done.returncode == 1 and b"'two'" in done.stdout
    assert call("diff", archive, archive, "--image", "lab/one:1").returncode == 0
    assert call("inspect", archive, "--image", "lab/one:1").stdout.startswith(b"lab/one:1 ")
    assert call("readiness", archive).returncode == 3
    assert call("readiness", archive, "--image", "lab/one:1").returncode in (0, 1)


def test_readiness_of_a_docker_archive_asks_which(tmp_path: Path) -> None:
    archive = write(tmp_path / "d.tar", together(ONE.docker(), TWO.docker()))
    done = call("readiness", archive)
    assert done.returncode == 3 and b"'lab/one:1', 'lab/two:1'" in done.stderr
    assert call("readiness", archive, "--image", config_of(ONE)).returncode in (0, 1)


@pytest.mark.parametrize("kind", ["oci", "docker"])
def test_a_base_is_chosen_in_the_spec(tmp_path: Path, kind: str) -> None:
    """The choice is part of the key: another one of the same archive is another base."""
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "file").write_bytes(b"x")
    archive = write(tmp_path / "a.tar", BOTH)
    for name in ("one", "two"):
        base = {kind: str(archive), "image": f"lab/{name}:1"}
        spec = {"name": "n", "tag": "t", "epoch": 0, "base": base, "prefix": "/opt/rt",
                "tiers": {"base": {"path": str(tmp_path / "tier")}}}  # fmt: skip
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        done = call("build", tmp_path / "spec.json", "--out", tmp_path / "out", "--cache", tmp_path / "cache")
        assert done.returncode == 0, done.stderr
        unpack_image(tmp_path / "out" / "runtime.oci.tar", tmp_path / name)
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == sorted([name, "opt"])


def test_an_empty_choice_in_a_spec_is_refused() -> None:
    with pytest.raises(SpecError):
        parse_spec(b'{"name": "n", "tag": "t", "epoch": 0, "base": {"oci": "x", "image": ""}, "prefix": "/o", "tiers": {}}')


def test_names_in_the_message_are_escaped(tmp_path: Path) -> None:
    """B-rows on terminals: what an archive calls its images reaches no terminal raw."""
    evil = {"annotations": {"org.opencontainers.image.ref.name": "x\x1b[31m"}}
    one = Lab(ONE.layers, edit_descriptor=lambda d: {**d, **evil}).oci()
    del one["manifest.json"]
    two = TWO.oci()
    del two["manifest.json"]
    with pytest.raises(OciBuilderError) as error:
        unpack_image(write(tmp_path / "a.tar", together(one, two)), tmp_path / "out")
    assert not re.search(r"[\x00-\x1f]", error.value.message)


