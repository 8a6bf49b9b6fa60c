"""The inputs of a stage arrive on Modal as they are here; what cannot is refused before anything is paid for."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.engines.modal_inputs import unpack
from oci_builder.engines.modal_project import pack
from oci_builder.model.errors import SpecError
from tests.engines.test_modal_project import request, round_trip, write_spec
from tests.lab.githost import git

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")  # cap_net_raw+p, as setcap writes it


def made(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def portable(spec: Path, place: Path) -> dict[str, Any]:
    build(spec, place / "out", BuildOptions(place / "cache", 1))
    found: dict[str, Any] = json.loads((place / "out/container.json").read_text())
    return found


@pytest.mark.root
def test_what_becomes_an_image_is_the_same_image_there(tmp_path: Path) -> None:
    """Owners, capabilities and compiled modules of a base; and folders that tools call caches elsewhere."""
    here = tmp_path / "here"
    for name in ("root/bin/ping", "root/var/mail/x", "root/usr/lib/__pycache__/m.pyc", "root/.venv/f", "one/.ruff_cache/f",
                 "one/lib/__pycache__/m.pyc"):  # fmt: skip
        made(here, **{name: name})
    os.chown(here / "root/var/mail", 0, 8)
    (here / "root/var/mail").chmod(0o2775)
    try:
        os.setxattr(here / "root/bin/ping", "security.capability", CAPABILITY)
    except OSError:
        pytest.skip("no capabilities on this file system")
    spec = write_spec(here, base={"rootfs": "root"})
    there = Path(round_trip(request(spec), tmp_path)["spec"])
    assert os.getxattr(there.parent / "root/bin/ping", "security.capability") == CAPABILITY
    assert portable(there, tmp_path / "far") == portable(spec, tmp_path / "near")


def test_a_tier_may_be_called_like_a_cache(tmp_path: Path) -> None:
    made(tmp_path / "here", **{".venv/bin/x": "x"})
    spec = write_spec(tmp_path / "here", tiers={"one": {"path": ".venv"}})
    assert (Path(round_trip(request(spec), tmp_path)["spec"]).parent / ".venv/bin/x").read_text() == "x"


def test_what_is_named_through_a_link_arrives(tmp_path: Path) -> None:
    """A spec, a tier, the packaging files, a trust policy."""
    here = tmp_path / "here"
    write_spec(tmp_path / "away", files="layers")
    made(tmp_path / "away", **{"tier/x": "tier", "layers/files/x": "file", "trust.json": "{}"})
    (tmp_path / "away/layers/files/link").symlink_to("x")
    here.mkdir()
    for name, target in (("one", "tier"), ("layers", "layers"), ("spec.json", "spec.json"), ("trust", "trust.json")):
        (here / name).symlink_to(f"../away/{target}")
    got = round_trip(request(here / "spec.json", options={"trust": str(here / "trust")}), tmp_path)
    there = Path(got["spec"]).parent
    assert (there / "one/x").read_text() == "tier"
    assert (there / "layers/files/x").read_text() == "file"
    assert os.readlink(there / "layers/files/link") == "x"
    assert Path(got["options"]["trust"]).read_text() == "{}"
    assert json.loads(Path(got["spec"]).read_text())["files"] == "layers"


@pytest.mark.parametrize(("source", "code"), [("files/none", "layers.missing"), ("../away", "layers.definition")])
def test_packaging_files_that_the_build_would_refuse_cost_no_machine(source: str, code: str, tmp_path: Path) -> None:
    definition = f'name = "x"\n[[file]]\nfrom = "{source}"\nto = "x"\n'
    made(tmp_path / "here", **{"one/x": "x", "layers/a.toml": definition})
    with pytest.raises(SpecError) as error:
        pack(request(write_spec(tmp_path / "here", files="layers")), tmp_path / "inputs.tar")
    assert error.value.code == code


def test_an_absolute_link_in_packaging_files_costs_no_machine(tmp_path: Path) -> None:
    """It leads to the file here, and nowhere in the container."""
    layers = made(tmp_path / "here", **{"one/x": "x", "layers/files/x": "x"}) / "layers"
    (layers / "a.toml").write_text('name = "x"\n[[file]]\nfrom = "link"\nto = "x"\n')
    (layers / "link").symlink_to(layers / "files/x")
    asked = request(write_spec(tmp_path / "here", files="layers"))
    with pytest.raises(SpecError) as error:
        pack(asked, tmp_path / "inputs.tar")
    assert error.value.code == "layers.definition" and "ln -sr" in error.value.message
    assert not (tmp_path / "inputs.tar").exists()
    (layers / "link").unlink()
    (layers / "link").symlink_to("files/x")
    assert round_trip(asked, tmp_path)["spec"]


def repository(place: Path) -> Path:
    made(place, **{"pyproject.toml": '[project]\nname = "x"\nversion = "1"\n', "uv.lock": "version = 1\n"})
    git(place, "init", "--quiet")
    git(place, "add", ".")
    git(place, "commit", "--quiet", "-m", "one")
    return place


def project_spec(folder: Path, **tier: str) -> Path:
    return write_spec(folder, tiers={"one": {"project": "RL", **tier}})


def test_a_clone_is_the_same_checkout_there(tmp_path: Path) -> None:
    head = git(repository(tmp_path / "here/RL"), "rev-parse", "HEAD")
    pack(request(project_spec(tmp_path / "here", commit=head)), tmp_path / "inputs.tar")
    unpack(tmp_path / "inputs.tar", tmp_path / "there")
    assert git(tmp_path / "there/spec/RL", "rev-parse", "HEAD") == head
    assert git(tmp_path / "there/spec/RL", "status", "--porcelain") == ""


def test_one_project_of_three_tiers_travels_once_without_its_environment(tmp_path: Path) -> None:
    tier = {"project": "RL", "lock": "RL/uv.lock"}
    spec = write_spec(tmp_path / "here", tiers={"a": tier, "b": tier, "c": tier})
    made(repository(tmp_path / "here/RL"), **{".venv/bin/python": "python"})
    pack(request(spec), tmp_path / "inputs.tar")
    with tarfile.open(tmp_path / "inputs.tar") as tar:
        names = tar.getnames()
    assert names.count("spec/RL/uv.lock") == 1
    assert "spec/RL/.git/HEAD" in names
    assert not [n for n in names if ".venv" in n]


@pytest.mark.parametrize("how", ["commit", "dirty", "no-git"])
def test_a_checkout_that_the_build_would_refuse_costs_no_machine(how: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    repository(here / "RL")
    if how == "dirty":
        (here / "RL/uv.lock").write_text("version = 2\n")
    if how == "no-git":
        (here / "RL/.git").rename(tmp_path / "git")
    asked = request(project_spec(here, **({"commit": "0" * 40} if how == "commit" else {})))
    with pytest.raises(SpecError) as error:
        pack(asked, tmp_path / "inputs.tar")
    assert error.value.code == "payload.commit"
    pack(asked, tmp_path / "inputs.tar", whole=False)
