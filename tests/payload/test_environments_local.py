"""A tier from a project with a package of its own folder: what ships is the commit's, whatever uv keeps (E, reviews)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oci_builder.model.errors import SpecError
from oci_builder.model.events import Event, silent
from oci_builder.model.spec import LockTier, Spec
from oci_builder.payload import uv as tools
from oci_builder.payload.checkout import clone
from oci_builder.payload.environments import realize
from oci_builder.payload.fetch import fetch_sources
from oci_builder.payload.runtime import assemble_runtime
from oci_builder.payload.tiers import realize_tiers
from tests.lab.githost import git
from tests.lab.uv import require_uv

require_uv()

# A build backend that needs nothing: every module beside it goes into the wheel, untracked ones too.
BACKEND = """
import pathlib, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    info, name = "depx-1.dist-info", "depx-1-py3-none-any.whl"
    files = {p.as_posix(): p.read_text() for p in sorted(pathlib.Path("depx").rglob("*.py"))}
    files[f"{info}/METADATA"] = "Metadata-Version: 2.1\\nName: depx\\nVersion: 1\\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,\\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as out:
        for path, text in files.items():
            out.writestr(zipfile.ZipInfo(path), text)
    return name
"""
SYSTEM = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def commit(project: Path, text: str) -> str:
    """Let the package say the text, and commit; no file that uv looks at changes."""
    (project / "dep/depx/__init__.py").write_text(f"V = {text!r}\n")
    git(project, "add", "-A")
    git(project, "commit", "-qm", text)
    return git(project, "rev-parse", "HEAD")


def package(folder: Path) -> None:
    (folder / "depx").mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "depx"\nversion = "1"\n' + SYSTEM)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "depx/__init__.py").write_text("V = 'none'\n")


def lock(project: Path, path: str) -> None:
    project.mkdir(exist_ok=True)
    (project / "pyproject.toml").write_text(
        '[project]\nname = "whole"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["depx"]\n'
        f'[tool.uv.sources]\ndepx = {{ path = "{path}" }}\n'
    )
    tools.find_uv(project.parent).run("lock", "--quiet", "--project", project, "--python", sys.executable)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not shutil.which("git"):
        pytest.skip("needs git")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    return tmp_path


@pytest.fixture
def project(place: Path) -> Path:
    package(place / "project/dep")
    lock(place / "project", "dep")
    git(place / "project", "init", "-q")
    commit(place / "project", "one")
    return place / "project"


def said(env: Path) -> str:
    return next(env.glob("lib/python*/site-packages/depx/__init__.py")).read_text()


def made(place: Path, work: str = "work", tier: LockTier | None = None) -> Path:
    return realize("base", tier or LockTier(project="project"), place, place / work, silent)


def test_another_commit_ships_its_own_code_with_the_same_cache(place: Path, project: Path) -> None:
    first = git(project, "rev-parse", "HEAD")
    assert said(made(place, tier=LockTier(project="project", commit=first))) == "V = 'one'\n"
    second = commit(project, "two")
    assert said(made(place, tier=LockTier(project="project", commit=second))) == "V = 'two'\n"
    assert said(made(place)) == "V = 'two'\n"


def test_source_and_environments_of_a_runtime_are_one_commit(place: Path, project: Path) -> None:
    spec = Spec.model_validate(
        {"name": "n", "tag": "t", "base": {"host": True}, "prefix": "/opt/x", "tiers": {"base": {"project": "project"}}}
    )
    for text in ("two", "three"):
        head = commit(project, text)
        tiers = realize_tiers(spec, place, place / "work", silent)
        runtime = assemble_runtime(spec, place, place / "work", tiers, 2)
        source = runtime.trees["source"]
        assert said(runtime.tiers["base"]) == (source / "dep/depx/__init__.py").read_text() == f"V = {text!r}\n"
        assert json.loads((source / "SOURCE.json").read_bytes())["commit"] == head


def test_a_tier_of_a_repository_is_built_and_shipped_at_its_commit(place: Path, project: Path) -> None:
    """Fetched, built, and exported as the source: one commit, though the repository has gone on since."""
    pinned = git(project, "rev-parse", "HEAD")
    commit(project, "two")
    tier = {"git": project.as_uri(), "commit": pinned}
    spec = Spec.model_validate(
        {"name": "n", "tag": "t", "base": {"host": True}, "prefix": "/opt/x", "tiers": {"base": tier}}
    )
    here = fetch_sources(spec, place / "work", silent)
    runtime = assemble_runtime(here, place, place / "work", realize_tiers(here, place, place / "work", silent), 2)
    source = runtime.trees["source"]
    assert said(runtime.tiers["base"]) == (source / "dep/depx/__init__.py").read_text() == "V = 'one'\n"
    assert json.loads((source / "SOURCE.json").read_bytes())["commit"] == pinned


def test_a_changed_package_without_a_pinned_commit_is_refused_and_not_shipped_old(place: Path, project: Path) -> None:
    made(place)
    (project / "dep/depx/__init__.py").write_text("V = 'edited'\n")
    with pytest.raises(SpecError, match="commit them") as caught:
        made(place)
    assert (caught.value.code, caught.value.fields["where"]) == ("payload.commit", "tiers.base.project")


def test_files_that_no_commit_has_are_left_out_and_named(place: Path, project: Path) -> None:
    (project / ".git/info/exclude").write_text("ignored.py\n")
    for name in ("ignored.py", "new.py"):
        (project / "dep/depx" / name).touch()
    told: list[Event] = []
    env = realize("base", LockTier(project="project"), place, place / "work", told.append)
    assert sorted(p.name for p in next(env.glob("lib/python*/site-packages/depx")).iterdir()) == ["__init__.py"]
    warnings = [event.message for event in told if event.kind == "warning"]
    assert len(warnings) == 1 and "new.py" in warnings[0] and "ignored.py" not in warnings[0]


def test_a_hidden_change_of_the_lock_or_the_package_does_not_count(place: Path, project: Path) -> None:
    """``assume-unchanged`` hides a change from ``git status``; the commit is what counts."""
    git(project, "update-index", "--assume-unchanged", "dep/depx/__init__.py")
    (project / "dep/depx/__init__.py").write_text("V = 'hidden'\n")
    head = git(project, "rev-parse", "HEAD")
    assert said(made(place, tier=LockTier(project="project", commit=head))) == "V = 'one'\n"


def test_the_same_bytes_from_two_places_and_two_caches(
    place: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(place)
    shutil.copytree(project, place / "elsewhere/project")
    monkeypatch.setenv("UV_CACHE_DIR", str(place / "cold"))
    two = realize("base", LockTier(project="project"), place / "elsewhere", place / "work2", silent)
    texts = [
        {p.relative_to(made_in): p.read_bytes() for p in made_in.rglob("*") if p.is_file() and not p.is_symlink()}
        for made_in in (one.parent, two.parent)
    ]  # fmt: skip
    assert texts[0] == texts[1]


def test_nothing_names_the_checkout_and_nothing_of_it_stays(place: Path, project: Path) -> None:
    env = made(place)
    assert sorted(p.name for p in env.parent.iterdir()) == ["base", "inventory.json"]
    assert not [p for p in env.rglob("*") if p.is_file() and os.fsencode(place / "work") in p.read_bytes()]
    found = json.loads((env.parent / "inventory.json").read_bytes())["packages"]
    assert [(p["name"], p["source"]) for p in found] == [("depx", "local")]


def test_the_working_tree_is_left_alone(place: Path, project: Path) -> None:
    before = sorted(p for p in project.rglob("*") if ".git/" not in str(p))
    made(place)
    assert sorted(p for p in project.rglob("*") if ".git/" not in str(p)) == before


def test_a_package_in_a_submodule_and_a_project_below_the_top(place: Path) -> None:
    package(place / "part")
    git(place / "part", "init", "-q")
    git(place / "part", "add", "-A")
    git(place / "part", "commit", "-qm", "x")
    top = place / "top"
    top.mkdir()
    git(top, "init", "-q")
    git(top, "submodule", "add", "-q", str(place / "part"), "third/part")
    lock(top / "project", "../third/part")
    git(top, "add", "-A")
    git(top, "commit", "-qm", "x")
    (top / "third/part/depx/untold.py").touch()
    (place / "top/.git/modules/third/part/info/exclude").write_text("untold.py\n")
    env = realize("base", LockTier(project="top/project"), place, place / "work", silent)
    assert said(env) == "V = 'none'\n"
    assert not list(env.rglob("untold.py"))


def test_a_shallow_checkout_at_a_commit(place: Path, project: Path) -> None:
    commit(project, "two")
    git(place, "clone", "-q", "--depth", "1", project.as_uri(), "shallow")
    head = git(place / "shallow", "rev-parse", "HEAD")
    assert said(made(place, tier=LockTier(project="shallow", commit=head))) == "V = 'two'\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a checkout to somebody else")
def test_a_checkout_of_another_owner_that_the_user_trusts(
    place: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's root and a mounted checkout."""
    (place / "settings").write_text(f"[safe]\n\tdirectory = {project}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(place / "settings"))
    subprocess.run(["chown", "-R", "1000:1000", project], check=True)
    assert said(made(place)) == "V = 'one'\n"


def test_a_version_that_git_tells_is_the_tags(place: Path, project: Path) -> None:
    """Build backends ask ``git describe``: the second checkout has the tags, and is clean."""
    git(project, "tag", "-m", "x", "v7.1")
    head = git(project, "rev-parse", "HEAD")
    copy = clone(project, head, place / "copy", "tiers.base")
    assert git(copy, "describe", "--dirty") == "v7.1"
    assert git(copy, "rev-parse", "HEAD") == head


@pytest.mark.parametrize("absolute", [True, False])
def test_a_package_outside_of_the_checkout_is_refused_unless_omitted(place: Path, absolute: bool) -> None:
    package(place / "outside")
    lock(place / "project", str(place / "outside") if absolute else "../outside")
    git(place / "project", "init", "-q")
    git(place / "project", "add", "-A")
    git(place / "project", "commit", "-qm", "x")
    with pytest.raises(SpecError, match="outside") as caught:
        made(place)
    assert caught.value.code == "payload.project"
    env = made(place, tier=LockTier(project="project", omit={"depx": "elsewhere"}))
    assert not list(env.rglob("depx"))


def test_a_lock_that_is_not_in_the_commit_is_refused(place: Path, project: Path) -> None:
    git(project, "rm", "-q", "--cached", "uv.lock")
    git(project, "commit", "-qm", "no lock")
    with pytest.raises(SpecError, match=r"uv\.lock") as caught:
        made(place)
    assert caught.value.code == "payload.commit"
