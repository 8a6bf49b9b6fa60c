"""A project's source: the pinned commit and nothing else, with the overlay that was made for it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import SpecError, TransportError
from oci_builder.payload.checkout import check_commit
from oci_builder.payload.overlay import RECORD, apply_overlay, export_source, overlay_identity, resolve_commit
from tests.lab.githost import git
from tests.lab.trees import listing

pytestmark = pytest.mark.usefixtures("nobodys_settings")

SCRIPT = Path(__file__).parents[2] / "layers/files/source_overlay/apply.py"
# A checkout of upstream that has the overlay's commit; CI without one tests projects of its own only.
UPSTREAM = os.environ.get("NEMO_RL_UPSTREAM") or "/nonexistent"
pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Two commits; ``code.py`` says ``one``, then ``two``."""
    place = tmp_path / "project"
    (place / "package").mkdir(parents=True)
    git(place, "init", "-q")
    for text in ("one", "two"):
        (place / "package/code.py").write_text(f"value = {text!r}\n")
        (place / "run.sh").write_text("#!/bin/sh\n")
        (place / "run.sh").chmod(0o755)
        if not (place / "link").is_symlink():
            (place / "link").symlink_to("package/code.py")
        git(place, "add", "-A")
        git(place, "commit", "-qm", text)
    return place


def overlay_for(project: Path, commit: str, place: Path) -> Path:
    """An overlay with the real script that adds a line to ``code.py`` and a file."""
    place.mkdir()
    shutil.copy(SCRIPT, place)
    (place / "new.py").write_text("new = 1\n")
    data = git(project, "show", f"{commit}:package/code.py").encode() + b"\n"
    patched = data + b"added = True\n"
    target = {
        "path": "package/code.py", "sha256": hashlib.sha256(data).hexdigest(),
        "patched": hashlib.sha256(patched).hexdigest(), "insert": [{"after": 1, "lines": ["added = True"]}],
    }  # fmt: skip
    new = [{"path": "package/new.py", "from": "new.py"}]
    about: dict[str, Any] = {"name": "test", "commit": commit, "files": [target], "new": new}
    (place / "overlay.json").write_text(json.dumps(about))
    return place


def test_the_commit_is_exported_whatever_is_checked_out(project: Path, tmp_path: Path) -> None:
    (project / "package/code.py").write_text("value = 'dirty'\n")
    (project / "untracked").touch()
    export_source(project, "HEAD~1", tmp_path / "out")
    assert (tmp_path / "out/package/code.py").read_text() == "value = 'one'\n"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [RECORD, "link", "package", "run.sh"]
    about = json.loads((tmp_path / "out" / RECORD).read_bytes())
    assert about == {"commit": git(project, "rev-parse", "HEAD~1"), "overlay": None, "overlaid": []}


def test_the_same_tree_anywhere_under_any_umask_and_settings(
    project: Path, tmp_path: Path, nobodys_settings: Path
) -> None:
    export_source(project, "HEAD", tmp_path / "one")
    (tmp_path / "attributes").write_text("*.sh export-ignore\n*.py text\n")
    nobodys_settings.write_text(
        f"[core]\n\teol = crlf\n\tautocrlf = true\n\tattributesFile = {tmp_path}/attributes\n[tar]\n\tumask = 0077\n"
    )
    old = os.umask(0o077)
    try:
        export_source(project, "HEAD", tmp_path / "two")
    finally:
        os.umask(old)
    assert listing(tmp_path / "one") == listing(tmp_path / "two")


def test_the_overlay_of_this_commit_is_applied_and_recorded(project: Path, tmp_path: Path) -> None:
    commit = git(project, "rev-parse", "HEAD")
    overlay = overlay_for(project, commit, tmp_path / "overlay")
    export_source(project, commit, tmp_path / "out", overlay)
    assert (tmp_path / "out/package/code.py").read_text() == "value = 'two'\nadded = True\n"
    about = json.loads((tmp_path / "out" / RECORD).read_bytes())
    assert about["overlay"] == overlay_identity(overlay)
    assert about["overlaid"] == ["package/code.py", "package/new.py"]
    assert apply_overlay(tmp_path / "out", overlay) == []


def test_the_overlay_of_another_commit_is_refused(project: Path, tmp_path: Path) -> None:
    """Without it the variables of the runtime mean nothing, and nobody would be told."""
    former = git(project, "rev-parse", "HEAD~1")
    overlay = overlay_for(project, former, tmp_path / "overlay")
    with pytest.raises(SpecError, match=former) as caught:
        export_source(project, "HEAD", tmp_path / "out", overlay)
    assert caught.value.code == "payload.overlay" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"commit": 1}'])
def test_an_overlay_that_does_not_say_its_commit_is_refused(project: Path, tmp_path: Path, text: str) -> None:
    overlay = overlay_for(project, git(project, "rev-parse", "HEAD"), tmp_path / "overlay")
    (overlay / "overlay.json").write_text(text)
    with pytest.raises(SpecError) as caught:
        export_source(project, "HEAD", tmp_path / "out", overlay)
    assert caught.value.code == "payload.overlay"


def test_an_overlay_that_does_not_fit_its_commit_is_refused(project: Path, tmp_path: Path) -> None:
    overlay = overlay_for(project, git(project, "rev-parse", "HEAD~1"), tmp_path / "overlay")
    about = json.loads((overlay / "overlay.json").read_text())
    about["commit"] = git(project, "rev-parse", "HEAD")
    (overlay / "overlay.json").write_text(json.dumps(about))
    with pytest.raises(SpecError) as caught:
        export_source(project, "HEAD", tmp_path / "out", overlay)
    assert caught.value.code == "payload.overlay" and "package/code.py" in caught.value.message


def test_an_overlay_is_known_by_every_byte_and_name_of_it(project: Path, tmp_path: Path) -> None:
    overlay = overlay_for(project, "HEAD", tmp_path / "overlay")
    known = overlay_identity(overlay)
    (overlay / "__pycache__").mkdir()
    (overlay / "__pycache__/apply.pyc").touch()
    assert overlay_identity(overlay) == known != ""
    (overlay / "new.py").write_text("new = 2\n")
    changed = overlay_identity(overlay)
    (overlay / "new.py").rename(overlay / "other.py")
    assert len({known, changed, overlay_identity(overlay), overlay_identity(None)}) == 4


@pytest.mark.parametrize("name", ["0" * 40, "no-such", "--help", "HEAD:package", ""])
def test_what_is_no_commit_is_named(project: Path, name: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_commit(project, name)
    assert caught.value.code == "payload.commit" and str(project) in caught.value.message


def test_what_is_no_checkout_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError) as caught:
        resolve_commit(tmp_path / "empty", "HEAD")
    assert caught.value.code == "payload.commit"


def test_without_git_the_remedy_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git(project, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", "/nonexistent")
    for ask in (lambda: resolve_commit(project, "HEAD"), lambda: check_commit(project, commit, "tiers.base")):
        with pytest.raises(SpecError, match="git") as caught:
            ask()
        assert caught.value.code == "payload.commit"


def test_a_tree_that_cannot_be_written_is_the_disks_fault(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = project.parent / "tools"
    tools.mkdir()
    (tools / "tar").write_text("#!/bin/sh\ncat > /dev/null\necho 'No space left on device' >&2\nexit 2\n")
    (tools / "tar").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    with pytest.raises(TransportError) as caught:
        export_source(project, "HEAD", project.parent / "out")
    assert caught.value.code == "payload.source" and "No space" in caught.value.message


def test_a_clean_checkout_at_the_commit_passes(project: Path) -> None:
    (project / "untracked").touch()
    check_commit(project, git(project, "rev-parse", "HEAD"), "tiers.base")


def test_a_checkout_at_another_commit_says_both(project: Path) -> None:
    wanted, head = git(project, "rev-parse", "HEAD~1"), git(project, "rev-parse", "HEAD")
    with pytest.raises(SpecError) as caught:
        check_commit(project, wanted, "tiers.base")
    fields = caught.value.fields
    assert (caught.value.code, fields["expected"], fields["actual"]) == ("payload.commit", wanted, head)


@pytest.mark.parametrize("change", ["edited", "staged", "removed", "mode"])
def test_a_changed_checkout_is_refused(project: Path, change: str) -> None:
    code = project / "package/code.py"
    if change == "removed":
        code.unlink()
    elif change == "mode":
        code.chmod(0o755)
    else:
        code.write_text("changed\n")
        if change == "staged":
            git(project, "add", "-A")
    with pytest.raises(SpecError) as caught:
        check_commit(project, git(project, "rev-parse", "HEAD"), "tiers.base")
    assert "package/code.py" in caught.value.message and caught.value.fields["where"] == "tiers.base.commit"


def test_a_change_in_a_submodule_is_a_change(project: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.mkdir()
    git(part, "init", "-q")
    (part / "file").write_text("x")
    git(part, "add", "-A")
    git(part, "commit", "-qm", "x")
    git(project, "submodule", "add", "-q", str(part), "third/part")
    git(project, "commit", "-qm", "submodule")
    commit = git(project, "rev-parse", "HEAD")
    check_commit(project, commit, "tiers.base")
    (project / "third/part/file").write_text("y")
    with pytest.raises(SpecError, match="third/part"):
        check_commit(project, commit, "tiers.base")


@pytest.mark.skipif(
    not Path(UPSTREAM, ".git").exists(), reason="NEMO_RL_UPSTREAM names no git checkout of NeMo RL v0.7.0"
)
def test_upstreams_source_with_the_shipped_overlay(tmp_path: Path) -> None:
    overlay = SCRIPT.parent
    about = json.loads((overlay / "overlay.json").read_text())
    export_source(Path(UPSTREAM), about["commit"], tmp_path / "out", overlay)
    record = json.loads((tmp_path / "out" / RECORD).read_bytes())
    assert record["commit"] == "81aa43dda4765b0429cf31dab44441e4e4383911"
    assert record["overlaid"] == sorted(one["path"] for one in [*about["files"], *about["new"]])
    for path in record["overlaid"]:
        compile((tmp_path / "out" / path).read_text(), path, "exec")
    assert apply_overlay(tmp_path / "out", overlay) == []
