"""A project whose history lies outside of its folder is the same checkout on Modal: a submodule, a worktree, a folder of
a larger repository, a clone that borrows objects. What the build there asks of git is what it asks of it here."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from oci_builder.engines.modal_project import pack
from oci_builder.model.errors import SpecError
from oci_builder.payload.checkout import check_commit, clone, untracked
from tests.engines.test_modal_inputs import made, project_spec, repository
from tests.engines.test_modal_project import request, round_trip, write_spec
from tests.lab.githost import git
from tests.lab.modal_plane_client import why_not

HERE = "deep/spec"


def submodule(here: Path) -> Path:
    git(here, "init", "--quiet")
    git(here, "submodule", "add", "--quiet", str(tagged(here.parents[1] / "up")), "RL")
    return here / "RL"


def worktree(here: Path) -> Path:
    git(tagged(here.parents[1] / "up"), "worktree", "add", "--quiet", "--detach", str(here / "RL"))
    return here / "RL"


def borrowing(here: Path) -> Path:
    git(here, "clone", "--quiet", "--shared", str(tagged(here.parents[1] / "up")), "RL")
    return here / "RL"


def folder_below_the_spec(here: Path) -> Path:
    made(here / "mono", **{"RL/pyproject.toml": "", "RL/uv.lock": "", "shared/x": "x"})
    tagged(here / "mono")
    (here / "RL").mkdir(exist_ok=True)
    return here / "mono/RL"


def folder_around_the_spec(here: Path) -> Path:
    """The spec lies in the repository, too, two folders down; the project has a submodule, and so has the rest."""
    made(here, **{"RL/pyproject.toml": "", "RL/uv.lock": ""})
    project_spec(here)
    top, up = made(here.parents[1], **{"shared/x": "x"}), tagged(here.parents[2] / "up")
    git(top, "init", "--quiet")
    for path in (f"{HERE}/RL/third", "other"):
        git(top, "submodule", "add", "--quiet", str(up), path)
    tagged(top)
    return here / "RL"


def shallow_folder(here: Path) -> Path:
    folder_around_the_spec(here)
    up = here.parents[1].rename(here.parents[2] / "mono")
    git(here.parents[2], "clone", "--quiet", "--depth=1", "--recurse-submodules", up.as_uri(), here.parents[1].name)
    return here / "RL"


def tagged(place: Path) -> Path:
    git(repository(place), "tag", "v1.2")
    git(place, "commit", "--quiet", "--allow-empty", "-m", "two")
    return place


def seen(project: Path, scratch: Path) -> dict[str, object]:
    """All that a build asks of a project: its commit, that nothing has changed, what no commit has, and a clone."""
    commit = check_commit(project, None, "tiers.one")
    copy = clone(project, commit, scratch, "tiers.one")
    tree = {str(p.relative_to(scratch)) for p in scratch.rglob("*") if not {".git"} & set(p.parts)}
    names = untracked(project, "tiers.one")
    return {
        "commit": commit, "place": copy.relative_to(scratch), "tree": tree, "untracked": names,
        "version": git(copy, "describe", "--tags", "--always"), "files": git(copy, "ls-files", "--full-name", ":/"),
    }  # fmt: skip


MAKERS = [submodule, worktree, borrowing, folder_below_the_spec, folder_around_the_spec, shallow_folder]


@pytest.mark.parametrize("make", MAKERS)
def test_a_checkout_whose_history_lies_elsewhere_is_the_same_there(make: Callable[[Path], Path], tmp_path: Path) -> None:
    here = tmp_path / "here" / HERE
    here.mkdir(parents=True)
    project = make(here)
    made(project, new="no commit has this")
    spec = write_spec(here, tiers={"one": {"project": str(project.relative_to(here))}})
    near = seen(project, tmp_path / "near")
    got = round_trip(request(spec), tmp_path)
    (tmp_path / "here").rename(tmp_path / "gone")  # nothing there may lead here
    if (tmp_path / "up").exists():
        (tmp_path / "up").rename(tmp_path / "away")
    there = Path(got["spec"]).parent / project.relative_to(here)
    assert seen(there, tmp_path / "far") == near
    assert (there / "new").exists(), "the working tree is the sender's"


def test_only_the_project_s_files_travel_beside_the_repository(tmp_path: Path) -> None:
    here = tmp_path / "here" / HERE
    here.mkdir(parents=True)
    folder_around_the_spec(here)
    pack(request(here / "spec.json"), tmp_path / "inputs.tar")
    with tarfile.open(tmp_path / "inputs.tar") as tar:
        names = [name for name in tar.getnames() if "/.git/" not in name and not name.endswith("/.git")]
    assert {n for n in names if not n.startswith(f"spec/{HERE}/RL")} == {f"spec/{HERE}/spec.json"}


def test_the_same_checkout_is_the_same_bytes(tmp_path: Path) -> None:
    """Else Modal would be sent the history of a large repository with every stage."""
    here = tmp_path / "here" / HERE
    here.mkdir(parents=True)
    folder_around_the_spec(here)
    for name in ("first", "second"):
        pack(request(here / "spec.json"), tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert list(tmp_path.glob("histories-*")) == []


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can")
def test_a_build_on_the_stand_in_takes_a_folder_of_a_larger_repository(tmp_path: Path) -> None:
    """By the real client and container runtime; uv makes the environment from a clone of the commit."""
    pytest.importorskip("modal", reason="needs the extra 'modal'")
    from tests.engines.modal_lab import running_lab

    with running_lab(tmp_path) as lab:
        home = lab.project.spec.parent
        uv = Path(sys.executable).with_name("uv")
        made(home / "RL", **{"pyproject.toml": '[project]\nname = "x"\nversion = "1"\nrequires-python = ">=3.11"\n'})
        subprocess.run([uv, "lock", "--quiet", "--project", home / "RL", "--python", sys.executable], check=True)
        git(home.parent, "init", "--quiet")
        git(home.parent, "add", "project")
        git(home.parent, "commit", "--quiet", "-m", "one")
        value = json.loads(lab.project.spec.read_text())
        tier = {"project": "RL", "commit": git(home.parent, "rev-parse", "HEAD")}
        lab.project.spec.write_text(json.dumps({**value, "tiers": {"one": tier}}))
        git(home.parent, "update-index", "--assume-unchanged", str(lab.project.spec))
        ran = lab.stage("build")
        assert (ran.status, "build: pass (fake)" in ran.out) == (0, True), ran.text


def test_two_tiers_of_one_repository(tmp_path: Path) -> None:
    here = tmp_path / "here"
    for name in ("a", "b"):
        made(here / name, **{"pyproject.toml": name, "uv.lock": ""})
    tagged(here)
    spec = write_spec(here, tiers={name: {"project": name} for name in ("a", "b")})
    there = Path(round_trip(request(spec), tmp_path)["spec"]).parent
    for name in ("a", "b"):
        assert check_commit(there / name, None, "t") == git(here, "rev-parse", "HEAD")


def test_a_folder_of_a_larger_repository_behind_a_link_is_refused(tmp_path: Path) -> None:
    """Its place in the repository is not its place beside the spec."""
    here = tmp_path / "here"
    here.mkdir()
    made(tmp_path / "mono", **{"sub/pyproject.toml": "", "sub/uv.lock": ""})
    tagged(tmp_path / "mono")
    (here / "RL").symlink_to("../mono/sub")
    with pytest.raises(SpecError) as error:
        pack(request(project_spec(here)), tmp_path / "inputs.tar")
    assert error.value.code == "payload.history"


def test_objects_that_a_clone_left_out_cost_no_machine(tmp_path: Path) -> None:
    """A partial clone asks its origin for them, which is out of reach there."""
    up = tagged(made(tmp_path / "up", **{"RL/pyproject.toml": "old", "RL/uv.lock": ""}))
    made(up, **{"RL/pyproject.toml": "new"})
    git(up, "commit", "--quiet", "-am", "three")
    git(up, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "--quiet", "--filter=blob:none", up.as_uri(), "here")
    up.rename(tmp_path / "away")
    with pytest.raises(SpecError) as error:
        pack(request(project_spec(tmp_path / "here")), tmp_path / "inputs.tar")
    assert error.value.code == "payload.commit"
    assert list(tmp_path.glob("histories-*")) == []
