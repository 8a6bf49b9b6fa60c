"""Checks, reports and the gates' judgement of them, for tests of exec."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chroot_exec.protocol import Check
from oci_builder.execution.gates import GateContext, verify_exec
from oci_builder.execution.run import ExecOptions
from oci_builder.execution.staging import Staged
from oci_builder.model.receipts import Statement
from oci_builder.model.report import Report

SUBJECTS = (
    {"kind": "oci-archive", "sha256": "11" * 32, "path": "runtime.oci.tar"},
    {"kind": "docker-archive", "sha256": "22" * 32, "path": "runtime.docker.tar.gz"},
)
GOOD = Report(SUBJECTS)


def shell(name: str, script: str, **more: Any) -> Check:
    return Check(name, ("/bin/sh", "-c", script), **more)


def judge(
    report: Report, root: Path, checks: Sequence[Check], options: ExecOptions, config: dict[str, Any] | None = None
) -> Statement:
    staged = Staged(root, config or {}, "11" * 32, "sha256:" + "33" * 32, "sha256:" + "44" * 32)
    return verify_exec(report, lambda: staged, lambda _: checks, options, GateContext(release="r1"))


def outcomes(statement: Statement) -> dict[str, str]:
    return {c.name: c.outcome for c in statement.predicate.checks}
