"""The source that a runtime ships: a project's tree at one commit, with the overlay applied by its own script."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from oci_builder.model.errors import SpecError, TransportError
from oci_builder.model.jsontext import dump_json
from oci_builder.payload.checkout import git
from oci_builder.payload.python import settle_copy

RECORD = "SOURCE.json"


def overlay_identity(overlay: Path | None) -> str:
    """A digest of everything in an overlay's folder; empty for none."""
    if overlay is None:
        return ""
    found = hashlib.sha256()
    for path in sorted(p for p in overlay.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        found.update(str(path.relative_to(overlay)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def export_source(project: Path, commit: str, target: Path, overlay: Path | None = None) -> None:
    """Write a commit's tree to ``target`` and apply the overlay.

    ``SOURCE.json`` in the tree says which commit it is and what the overlay changed.

    Raises:
        SpecError: ``payload.commit`` (no such commit), ``payload.overlay`` (the overlay is for another commit or tree).
        TransportError: ``payload.source`` when the tree cannot be written.
    """
    commit = resolve_commit(project, commit)
    if overlay is not None:
        _check_made_for(overlay, commit)
    target.mkdir(parents=True)
    unpacked = subprocess.run(
        ["tar", "-x", "--no-same-owner", "-C", str(target)], input=git(project, "archive", "--format=tar", commit),
        capture_output=True, check=False,
    )  # fmt: skip
    if unpacked.returncode:
        raise TransportError("payload.source", f"{target}: {unpacked.stderr.decode(errors='replace').strip()}")
    changed = apply_overlay(target, overlay) if overlay is not None else []
    about = {"commit": commit, "overlay": overlay_identity(overlay) or None, "overlaid": changed}
    (target / RECORD).write_bytes(dump_json(about) + b"\n")
    settle_copy(target)


def resolve_commit(project: Path, name: str) -> str:
    """The whole id of a commit.

    Raises:
        SpecError: ``payload.commit``.
    """
    return git(project, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}").decode().strip()


def apply_overlay(tree: Path, overlay: Path) -> list[str]:
    """Run the overlay's script on a tree; the files that it changed. Idempotent.

    Raises:
        SpecError: ``payload.overlay``: a file is neither pristine nor patched; nothing was written.
    """
    return list(_apply(overlay, tree)["changed"])


def fix_packages(env: Path, overlay: Path) -> dict[str, Any]:
    """Put the overlay's fixes into an environment's packages, as upstream does when a worker starts. Idempotent.

    Returns:
        ``fixed``: for each fix ``package``, ``version``, ``path`` below the environment, the ``sha256`` of the pristine
        and of the ``patched`` file, and ``why``; ``other``: packages of versions that it has no fixes for.

    Raises:
        SpecError: ``payload.overlay``: a file is neither pristine nor patched; nothing was written.
    """
    said = _apply(overlay, env, "--packages")
    return {"fixed": said["fixed"], "other": said["other"]}


def _apply(overlay: Path, tree: Path, *options: str) -> dict[str, Any]:
    argv = [sys.executable, "-I", "-B", str(overlay / "apply.py"), str(tree), *options, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SpecError("payload.overlay", done.stderr.strip()[-1000:], where=str(tree))
    return dict(json.loads(done.stdout))


def _check_made_for(overlay: Path, commit: str) -> None:
    try:
        made_for = json.loads((overlay / "overlay.json").read_bytes())["commit"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError("payload.overlay", f"{overlay}/overlay.json: {error!r}", where=str(overlay)) from None
    if made_for != commit:
        raise SpecError(
            "payload.overlay",
            f"the overlay {overlay} is for commit {made_for}, and the source is {commit}: without it workers call uv; "
            "take that commit, or let the spec's files have no source_overlay",
            where=str(overlay), expected=str(made_for), actual=commit,
        )  # fmt: skip
