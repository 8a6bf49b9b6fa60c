"""A project's checkout: is it at the pinned commit, with nothing changed?"""

from __future__ import annotations

import subprocess
from pathlib import Path

from oci_builder.model.errors import SpecError, show


def check_commit(project: Path, commit: str, where: str) -> None:
    """Prove that a git checkout is at a commit and holds no change, submodules included.

    Raises:
        SpecError: ``payload.commit``.
    """
    head = _git(project, where, "rev-parse", "HEAD")
    if head != commit:
        raise SpecError(
            "payload.commit", f"{where}: {show(str(project))} is at {head}, wanted {commit}: git checkout {commit}",
            where=f"{where}.commit", expected=commit, actual=head,
        )  # fmt: skip
    changed = _git(project, where, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=none")
    if changed:
        first = changed.splitlines()[0]
        raise SpecError(
            "payload.commit", f"{where}: {show(str(project))} has changes: {first}", where=f"{where}.commit"
        )


def _git(project: Path, where: str, *words: str) -> str:
    # The user's and the system's settings must not decide what counts as a change.
    argv = ["git", "-c", "core.fsmonitor=false", "-C", str(project), *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SpecError(
            "payload.commit", f"{where}: cannot run git: {error.strerror}", where=f"{where}.commit"
        ) from None
    if done.returncode:
        raise SpecError(
            "payload.commit", f"{where}: {show(str(project))}: {done.stderr.strip()}", where=f"{where}.commit"
        )
    return done.stdout.strip()
