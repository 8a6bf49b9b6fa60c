"""A project's checkout: is it at a commit with nothing changed, and a second checkout of that commit alone.

What is built from a project comes from the commit, never from the working tree: files that no commit holds (a new
module, leftovers of an earlier build) would get into packages unseen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from oci_builder.model.errors import SpecError, show

# The user's and the system's settings must decide neither what counts as a change nor what is written.
_SETTINGS = (
    "core.fsmonitor=false", "core.autocrlf=false", "core.eol=lf", "core.attributesFile=/dev/null",
    "core.hooksPath=/dev/null", "submodule.recurse=false",
)  # fmt: skip
# A hook's variables name another repository.
FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX")
SETTINGS_WORDS = tuple(word for setting in _SETTINGS for word in ("-c", setting))
_SUBMODULE = b"160000 "


def git(place: Path, *words: str, where: str = "", told: bytes = b"") -> bytes:
    """What git prints about a checkout.

    Args:
        place: a folder of the checkout.
        where: the spec's field to blame.
        told: its standard input.

    Raises:
        SpecError: ``payload.commit`` with git's own words.
    """
    blamed, field = where or str(place), f"{where}: " if where else ""
    argv = ["git", *SETTINGS_WORDS, "-C", str(place), *words]
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    try:
        done = subprocess.run(argv, input=told, capture_output=True, check=False, env=env)
    except OSError as error:
        raise SpecError("payload.commit", f"{field}cannot run git: {error.strerror}", where=blamed) from None
    if done.returncode:
        words_of_git = done.stderr.decode(errors="replace").strip()
        raise SpecError("payload.commit", f"{field}{show(str(place))}: {words_of_git}", where=blamed)
    return done.stdout


def check_commit(project: Path, commit: str | None, where: str) -> str:
    """Prove that a git checkout is at a commit and holds no change, submodules included; the commit's id.

    Args:
        commit: the pinned id; ``None`` for whatever is checked out.

    Raises:
        SpecError: ``payload.commit``.
    """
    field = f"{where}.commit" if commit else f"{where}.project"
    head = _line(project, field, "rev-parse", "HEAD")
    if commit is not None and head != commit:
        raise SpecError(
            "payload.commit", f"{where}: {show(str(project))} is at {head}, wanted {commit}: git checkout {commit}",
            where=field, expected=commit, actual=head,
        )  # fmt: skip
    changed = _line(project, field, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=none")
    if changed:
        raise SpecError(
            "payload.commit",
            f"{where}: {show(str(project))} has changes: {changed.splitlines()[0]}; commit them: what is built and "
            "shipped of a project is a commit of it",
            where=field,
        )
    return head


def untracked(project: Path, where: str) -> tuple[str, ...]:
    """Files and folders below a project that no commit holds and git does not ignore.

    Raises:
        SpecError: ``payload.commit``.
    """
    out = git(project, "ls-files", "-z", "--others", "--exclude-standard", "--directory", where=where)
    return tuple(show(path) for path in out.split(b"\0") if path)


def file_at(project: Path, commit: str, name: str, where: str) -> str:
    """A text file of the project as the commit has it.

    Raises:
        SpecError: ``payload.commit`` when the commit has no such file.
    """
    try:
        return git(project, "show", f"{commit}:./{name}", where=where).decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise SpecError("payload.commit", f"{where}: {name}: {error}", where=where) from None


def clone(project: Path, commit: str, target: Path, where: str) -> Path:
    """Check a commit out beside, submodules that the checkout has included; the project's folder in it.

    It has a ``.git`` of its own, for build backends that ask git for the version.

    Raises:
        SpecError: ``payload.commit``.
    """
    _clone(top_of(project, where), commit, target, where)
    return target / prefix_of(project, where)


def top_of(project: Path, where: str) -> Path:
    """The top folder of the checkout that a project lies in.

    Raises:
        SpecError: ``payload.commit``.
    """
    return Path(_line(project, where, "rev-parse", "--show-toplevel"))


def prefix_of(project: Path, where: str) -> str:
    """The project's folder below the top of its checkout; empty where it is that.

    Raises:
        SpecError: ``payload.commit``: it is no checkout.
    """
    return _line(project, where, "rev-parse", "--show-prefix").rstrip("/")


def has_own_history(project: Path, where: str) -> bool:
    """Whether a copy of the project's folder is the same checkout: its history lies in that folder, and all of it.

    Raises:
        SpecError: ``payload.commit``: it is no checkout.
    """
    common = Path(os.path.realpath(_git_path(project, ".", where)))
    borrowed = _git_path(project, "objects/info/alternates", where).exists()
    return not borrowed and common.is_relative_to(os.path.realpath(project))


def carry(source: Path, kept: Sequence[str], target: Path, where: str) -> Path:
    """A repository of its own for a checkout, at the same commit: all that the commit and its tags reach.

    The same checkout gives the same bytes (with the same git).

    Args:
        source: top folder of the checkout, which is clean.
        kept: folders that will be there beside the repository, ``""`` for all; what else the commit has is marked as
            left out (skip-worktree), and no change.
        target: a new folder.

    Returns: the repository, ``target/.git``.

    Raises:
        SpecError: ``payload.commit``.
    """
    _borrow_objects(source, target, where)
    git(target, "config", "core.logAllRefUpdates", "false", where=where)  # such a log says when
    git(target, "update-ref", "--no-deref", "HEAD", _line(source, where, "rev-parse", "HEAD"), where=where)
    git(target, "read-tree", "HEAD", where=where)
    names = git(target, "ls-files", "-z", where=where).split(b"\0")
    below = tuple(os.fsencode(f"{folder}/" if folder else "") for folder in kept)
    left = b"".join(name + b"\0" for name in names if name and not name.startswith(below))
    git(target, "update-index", "-z", "--skip-worktree", "--stdin", where=where, told=left)
    git(target, "-c", "pack.threads=1", "repack", "-a", "-d", "-q", where=where)
    (target / ".git/objects/info/alternates").unlink()
    return target / ".git"


def _clone(source: Path, commit: str, target: Path, where: str) -> None:
    borrow(source, commit, target, where)
    for path, inner in submodules(target, commit, where):
        if (source / path / ".git").exists():
            _clone(source / path, inner, target / path, where)


def borrow(source: Path, commit: str, target: Path, where: str) -> None:
    """Check a commit out that lies in another repository, with its objects; submodules are left empty.

    git's own clone refuses a checkout of another owner more often.

    Args:
        source: a checkout's folder, or a bare repository.

    Raises:
        SpecError: ``payload.commit``.
    """
    _borrow_objects(source, target, where)
    git(target, "checkout", "--quiet", "--detach", commit, where=where)


def _borrow_objects(source: Path, target: Path, where: str) -> None:
    """An empty repository with another's objects and tags."""
    kind = _line(source, where, "rev-parse", "--show-object-format")
    target.mkdir(parents=True, exist_ok=True)
    git(target, "init", "--quiet", "--template=", f"--object-format={kind}", where=where)
    for setting in _SETTINGS:
        git(target, "config", *setting.split("=", 1), where=where)
    inside = target / ".git"
    (inside / "objects/info").mkdir(parents=True, exist_ok=True)
    (inside / "objects/info/alternates").write_text(f"{_git_path(source, 'objects', where)}\n")
    shallow = _git_path(source, "shallow", where)
    if shallow.exists():
        shutil.copyfile(shallow, inside / "shallow")
    tags = git(source, "for-each-ref", "--format=create %(refname) %(objectname)", "refs/tags", where=where)
    git(target, "update-ref", "--stdin", where=where, told=tags)


def _git_path(source: Path, name: str, where: str) -> Path:
    return source.absolute() / _line(source, where, "rev-parse", "--git-path", name)


def submodules(place: Path, commit: str, where: str) -> Iterator[tuple[str, str]]:
    """Path and recorded commit of each submodule of a commit.

    Raises:
        SpecError: ``payload.commit``.
    """
    for entry in git(place, "ls-tree", "-r", "-z", "--full-tree", commit, where=where).split(b"\0"):
        if entry.startswith(_SUBMODULE):
            about, path = entry.split(b"\t", 1)
            yield os.fsdecode(path), about.split()[2].decode()


def _line(project: Path, where: str, *words: str) -> str:
    return git(project, *words, where=where).decode(errors="surrogateescape").strip()
