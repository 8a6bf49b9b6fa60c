"""``relocate``: make a tree of interpreters and environments work from any prefix, or say what that would take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oci_builder.model.errors import SpecError, show
from oci_builder.model.report import Finding
from oci_builder.payload.relocate import Change, apply_relocation, plan_relocation, prefixes_of
from oci_builder.payload.relocate_audit import AuditOptions, audit


@dataclass(frozen=True, slots=True)
class RelocateOptions:
    """How to relocate.

    Attributes:
        prefix: where the tree will live; empty: where it is.
        was: absolute path that the tree or a part had before -> what it is below the tree, ``""`` for all of it.
        external: patterns of absolute link targets that whoever runs the tree has.
        apply: do it; False only says what would be done.
        jobs: files read at once by the audit.
    """

    prefix: str = ""
    was: Mapping[str, str] = field(default_factory=dict)
    external: tuple[str, ...] = ()
    apply: bool = False
    jobs: int = 2


@dataclass(frozen=True, slots=True)
class Relocation:
    """What was done or would be, and what the audit found: of the tree afterwards, or as it is.

    Attributes:
        applied: the changes were made.
    """

    tree: Path
    prefix: str
    changes: tuple[Change, ...]
    findings: tuple[Finding, ...]
    applied: bool

    @property
    def ok(self) -> bool:
        """The tree works from any prefix as it is now."""
        return not self.findings and (self.applied or not self.changes)

    def lines(self) -> list[str]:
        """For people: one line a change, one a finding; bytecode, which may be of every module, is a count."""
        done = [f"{c.rule:<14} {show(c.path)}{_becomes(c)}" for c in self.changes if c.rule != "bytecode"]
        stale = [change for change in self.changes if change.rule == "bytecode"]
        if stale:
            below = os.path.commonpath([os.path.dirname(change.path) for change in stale])
            done.append(f"{'bytecode':<14} {len(stale)} files below {show(below or b'.')} -> removed")
        return done + [f"{finding.code}: {finding.message}" for finding in self.findings]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "tree": str(self.tree), "prefix": self.prefix, "applied": self.applied, "ok": self.ok,
            "changes": [
                {"path": change.path.decode("utf-8", "backslashreplace"), "rule": change.rule,
                 "becomes": _becomes(change).removeprefix(" -> ")}
                for change in self.changes
            ],
            "findings": [finding.to_json() for finding in self.findings],
        }  # fmt: skip


def relocate(tree: Path, options: RelocateOptions) -> Relocation:
    """Plan, apply where that is wanted, audit. Idempotent: of a relocated tree there is nothing left to do.

    Args:
        tree: an environment, or a folder with ``envs/<tier>`` and perhaps ``python``.

    Raises:
        SpecError: ``spec.path`` (no folder, or no environment in it), ``payload.patchelf``.
        TransportError: ``payload.patchelf``, ``io.*``.
    """
    if not any(tree.glob("pyvenv.cfg")) and not any(tree.glob("envs/*/pyvenv.cfg")):
        raise SpecError(
            "spec.path", f"{show(str(tree))} holds no environment (pyvenv.cfg, or envs/<tier>/pyvenv.cfg): nothing "
            "there is changed", where=str(tree),
        )  # fmt: skip
    final = options.prefix or str(tree.absolute())
    prefixes = prefixes_of(tree, final, options.was)
    changes = plan_relocation(tree, prefixes)
    if options.apply:
        apply_relocation(tree, changes)
    # Configuration names the place where the tree will live; that is no trace of where it was.
    needles = tuple(name for name in (os.fsdecode(path) for path, _ in prefixes.built) if name != final)
    findings = audit(tree, AuditOptions(needles, options.external, threads=options.jobs))
    return Relocation(tree, final, changes, findings, options.apply)


def _becomes(change: Change) -> str:
    if change.link is not None:
        return f" -> {show(change.link)}"
    if change.runpath is not None:
        return f" -> {change.runpath or 'no search path'}"
    return " -> removed" if change.content is None else ""
