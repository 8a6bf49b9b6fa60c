"""Sources by URL and commit: what git fetches from real repositories, kept and proved (issue 5, item 1)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import OciBuilderError, SpecError
from oci_builder.model.events import silent
from oci_builder.model.spec import GitTier, LockTier, Spec
from oci_builder.payload import fetch
from oci_builder.payload.checkout import clone
from oci_builder.payload.fetch import fetch_project, fetch_sources
from tests.lab.githost import GitHost, git

pytestmark = pytest.mark.usefixtures("nobodys_settings")

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


def begin(place: Path, *words: str) -> Path:
    place.mkdir(parents=True)
    git(place, "init", "-q", "-b", "main", *words)
    return place


def commit(place: Path, text: str) -> str:
    (place / "code.py").write_text(f"V = {text!r}\n")
    git(place, "add", "-A")
    git(place, "commit", "-qm", text)
    return git(place, "rev-parse", "HEAD")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PAUSE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits ``one``, ``two`` and ``three``; a submodule of a submodule, the outer one beside and named relatively."""
    repos = tmp_path_factory.mktemp("fetch") / "repos"
    for name in ("inner", "outer"):
        commit(begin(repos / name), name)
    git(repos / "outer", "submodule", "add", "-q", "../inner", "deep/inner")
    git(repos / "outer", "commit", "-qm", "inner")
    top = begin(repos / "top")
    commit(top, "one")
    git(top, "submodule", "add", "-q", "../outer", "third/outer")
    commit(top, "two")
    commit(top, "three")
    return repos


@pytest.fixture
def project(repositories: Path, tmp_path: Path) -> Path:
    shutil.copytree(repositories, tmp_path / "repos", symlinks=True)
    return tmp_path / "repos/top"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitHost]:
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    found = GitHost(tmp_path / "repos", tmp_path).start()
    monkeypatch.setenv("GIT_SSL_CAINFO", found.ca)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield found
    found.close()


def fetched(url: str, commit: str, tmp_path: Path) -> Path:
    return fetch_project(url, commit, tmp_path / "work", "tiers.base", silent)


def refused(url: str, commit: str, tmp_path: Path) -> OciBuilderError:
    with pytest.raises(OciBuilderError) as caught:
        fetched(url, commit, tmp_path)
    work = tmp_path / "work" / fetch.FOLDER
    assert not [p for p in work.iterdir() if "partial" in p.name or (p.is_dir() and p.suffix != ".git")]
    return caught.value


def third(project: Path, how: str = "HEAD") -> str:
    return git(project, "rev-parse", how)


@pytest.mark.parametrize("how", ["HEAD", "HEAD~1"])
def test_a_commit_with_its_submodules_from_a_file_url(project: Path, tmp_path: Path, how: str) -> None:
    place = fetched(project.as_uri(), third(project, how), tmp_path)
    assert (place / "code.py").read_text() == {"HEAD": "V = 'three'\n", "HEAD~1": "V = 'two'\n"}[how]
    assert (place / "third/outer/deep/inner/code.py").read_text() == "V = 'inner'\n"


def test_no_more_than_the_commit_is_fetched(project: Path, tmp_path: Path) -> None:
    place = fetched(project.as_uri(), third(project), tmp_path)
    assert git(place, "rev-list", "--count", "HEAD") == "1"


@pytest.mark.parametrize("dumb", [False, True])
def test_a_commit_by_https(host: GitHost, project: Path, tmp_path: Path, dumb: bool) -> None:
    """Relative submodules are found beside the repository. A server of files alone gives all branches."""
    host.dumb = dumb
    if dumb:
        for name in ("top", "outer", "inner"):
            git(tmp_path / "repos" / name, "update-server-info")
            shutil.copytree(tmp_path / "repos" / name / ".git", tmp_path / "repos" / f"bare/{name}")
    url = host.url("bare/top" if dumb else "top")
    place = fetched(url, third(project, "HEAD~1"), tmp_path)
    assert (place / "third/outer/deep/inner/code.py").read_text() == "V = 'inner'\n"


def test_what_is_there_needs_no_network(host: GitHost, project: Path, tmp_path: Path) -> None:
    url, head = host.url("top"), third(project)
    place = fetched(url, head, tmp_path)
    host.requests.clear()
    host.password = "closed"
    before = place.stat().st_ino
    assert fetched(url, head, tmp_path).stat().st_ino == before
    shutil.rmtree(place)
    assert (fetched(url, head, tmp_path) / "third/outer/deep/inner/code.py").exists()
    assert host.requests == []


def test_a_checkout_that_somebody_worked_in_is_made_anew(project: Path, tmp_path: Path) -> None:
    place = fetched(project.as_uri(), third(project), tmp_path)
    (place / "code.py").write_text("V = 'edited'\n")
    assert (fetched(project.as_uri(), third(project), tmp_path) / "code.py").read_text() == "V = 'three'\n"


def test_damaged_objects_are_fetched_again(project: Path, tmp_path: Path) -> None:
    place = fetched(project.as_uri(), third(project), tmp_path)
    shutil.rmtree(place)
    packs = list((tmp_path / "work/sources").glob("top-*.git/objects/pack/*.pack"))
    loose = [p for p in (tmp_path / "work/sources").glob("top-*.git/objects/??/*") if p.is_file()]
    for path in packs or loose:
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    assert (fetched(project.as_uri(), third(project), tmp_path) / "code.py").read_text() == "V = 'three'\n"


def test_a_second_commit_of_the_same_repository(project: Path, tmp_path: Path) -> None:
    for how, text in (("HEAD", "three"), ("HEAD~2", "one"), ("HEAD~1", "two")):
        assert (fetched(project.as_uri(), third(project, how), tmp_path) / "code.py").read_text() == f"V = {text!r}\n"


def test_what_fails_now_and_then_is_asked_again(host: GitHost, project: Path, tmp_path: Path) -> None:
    host.fail = 2
    assert (fetched(host.url("top"), third(project), tmp_path) / "code.py").exists()


def test_a_commit_that_is_not_there(host: GitHost, project: Path, tmp_path: Path) -> None:
    error = refused(host.url("top"), "0123456789abcdef" * 2 + "01234567", tmp_path)
    assert (error.code, error.exit_status) == ("payload.commit", 2)


def test_a_name_of_something_else_is_no_commit(project: Path, tmp_path: Path) -> None:
    """A tree's id is an id too."""
    assert refused(project.as_uri(), third(project, "HEAD^{tree}"), tmp_path).exit_status in (2, 5)


@pytest.mark.parametrize("url", ["https://localhost:1/x", "file:///nonexistent/x"])
def test_nobody_there(project: Path, tmp_path: Path, url: str) -> None:
    error = refused(url, third(project), tmp_path)
    assert (error.code, error.exit_status) == ("payload.source", 5)


def test_who_has_no_password_is_told_so_and_who_has_is_let_in(
    host: GitHost, project: Path, tmp_path: Path, nobodys_settings: Path
) -> None:
    """From git's own credential helper; the password is in no message, and in no file of ours."""
    host.password = "s3cret-of-the-lab"
    assert refused(host.url("top"), third(project), tmp_path).code == "auth"
    helper = tmp_path / "helper"
    helper.write_text("#!/bin/sh\necho username=u\necho password=s3cret-of-the-lab\n")
    helper.chmod(0o755)
    nobodys_settings.write_text(f"[credential]\n\thelper = {helper}\n")
    told: list[Any] = []
    place = fetch_project(host.url("top"), third(project), tmp_path / "work", "tiers.base", told.append)
    assert (place / "code.py").exists() and "s3cret" not in str(told)
    files = [p for p in (tmp_path / "work").rglob("*") if p.is_file()]
    assert not [p for p in files if b"s3cret" in p.read_bytes()]


def test_a_password_that_settings_put_in_the_address_is_not_shown(
    project: Path, tmp_path: Path, nobodys_settings: Path
) -> None:
    nobodys_settings.write_text('[url "https://u:s3cret@localhost:1/"]\n\tinsteadOf = https://example.org/\n')
    assert "s3cret" not in str(refused("https://example.org/x", third(project), tmp_path))


@pytest.mark.parametrize("at", ["ssh://git@example.org/x", "git@example.org:x", "ext::sh -c false", "--upload-pack=x"])
def test_a_submodule_where_no_source_leads_is_refused(project: Path, tmp_path: Path, at: str) -> None:
    git(project, "config", "-f", ".gitmodules", "submodule.third/outer.url", at)
    error = refused(project.as_uri(), commit(project, "four"), tmp_path)
    assert error.code in ("payload.submodule", "payload.source"), error
    assert error.exit_status in (4, 5)


def test_a_submodule_of_a_remote_source_does_not_read_this_machines_files(
    host: GitHost, project: Path, tmp_path: Path
) -> None:
    """CVE-2022-39253's kind."""
    git(project, "config", "-f", ".gitmodules", "submodule.third/outer.url", (tmp_path / "repos/outer").as_uri())
    assert refused(host.url("top"), commit(project, "four"), tmp_path).code == "payload.submodule"


def test_a_submodule_that_no_gitmodules_names_is_refused(project: Path, tmp_path: Path) -> None:
    git(project, "rm", "-q", "--cached", ".gitmodules")
    (project / ".gitmodules").unlink()
    (project / "code.py").write_text("V = 'five'\n")
    git(project, "commit", "-qam", "five")
    assert refused(project.as_uri(), third(project), tmp_path).code == "payload.submodule"


def test_a_submodules_way_by_the_users_own_settings(project: Path, tmp_path: Path, nobodys_settings: Path) -> None:
    git(project, "config", "-f", ".gitmodules", "submodule.third/outer.url", "git@example.org:outer")
    head = commit(project, "four")
    nobodys_settings.write_text(f'[url "file://{tmp_path}/repos/"]\n\tinsteadOf = git@example.org:\n')
    assert (fetched(project.as_uri(), head, tmp_path) / "third/outer/code.py").exists()


def test_a_build_that_was_killed_leaves_what_came(project: Path, tmp_path: Path) -> None:
    """The outer repository is gone when it comes to it: the first one is not asked again."""
    (tmp_path / "repos/outer").rename(tmp_path / "repos/away")
    assert refused(project.as_uri(), third(project), tmp_path).code == "payload.source"
    (tmp_path / "repos/away").rename(tmp_path / "repos/outer")
    head = third(project)
    project.rename(tmp_path / "repos/gone")
    assert (fetched((tmp_path / "repos/top").as_uri(), head, tmp_path) / "third/outer/code.py").exists()


def test_ids_of_sha256(tmp_path: Path) -> None:
    head = commit(begin(tmp_path / "repos/top", "--object-format=sha256"), "one")
    assert (fetched((tmp_path / "repos/top").as_uri(), head, tmp_path) / "code.py").exists()


def test_the_users_git_variables_do_not_reach_the_fetch(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build from a hook."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"):
        monkeypatch.setenv(name, str(tmp_path / "other"))
    head = (project / ".git/refs/heads/main").read_text().strip()
    assert (fetched(project.as_uri(), head, tmp_path) / "code.py").exists()


def test_the_checkout_is_one_that_packages_are_built_from(project: Path, tmp_path: Path) -> None:
    place = fetched(project.as_uri(), third(project), tmp_path)
    copy = clone(place, third(project), tmp_path / "copy", "tiers.base")
    assert (copy / "third/outer/deep/inner/code.py").read_text() == "V = 'inner'\n"
    assert git(copy, "status", "--porcelain") == ""


def test_a_spec_with_a_repository_becomes_one_with_a_checkout(project: Path, tmp_path: Path) -> None:
    (project / "sub").mkdir()
    (project / "sub/uv.lock").touch()
    tier = {"git": project.as_uri(), "commit": commit(project, "four"), "folder": "sub", "extras": ["x"]}
    spec = Spec.model_validate(
        {"name": "n", "tag": "t", "base": {"scratch": True}, "prefix": "/opt/x", "tiers": {"a": tier, "b": {**tier, "extras": []}}}
    )
    here = fetch_sources(spec, tmp_path / "work", silent).tiers
    one, two = here["a"], here["b"]
    assert isinstance(one, LockTier) and isinstance(two, LockTier) and isinstance(spec.tiers["a"], GitTier)
    assert one.project == two.project and os.path.isfile(f"{one.project}/uv.lock") and one.extras == ("x",)


@pytest.mark.parametrize(
    "change",
    [
        {"git": "https://u:p@example.org/x"}, {"git": "https://token@example.org/x"}, {"git": "git@example.org:x"},
        {"git": "ssh://example.org/x"}, {"git": "http://example.org/x"}, {"git": "ext::sh"}, {"git": "/srv/x"},
        {"git": "--upload-pack=touch /tmp/x"}, {"git": "https://example.org/x?token=1"}, {"git": "https://example.org"},
        {"git": "file:///a/../b"}, {"commit": "v0.7.0"}, {"commit": "81aa43d"}, {"commit": "A" * 40}, {"folder": "../x"},
        {"folder": "/x"}, {"branch": "main"},
    ],
)  # fmt: skip
def test_a_source_that_a_spec_may_not_have(change: dict[str, str]) -> None:
    from oci_builder.model.spec import parse_spec

    tier = {"git": "https://example.org/x", "commit": "81" * 20, **change}
    whole = {"name": "n", "tag": "t", "base": {"scratch": True}, "prefix": "/opt/x", "tiers": {"a": tier}}
    with pytest.raises(SpecError) as caught:
        parse_spec(json.dumps(whole).encode())
    assert caught.value.code == "spec.field"
