"""``verify --exec``: three gates with separate outcomes, as a receipt's statement; signing is release's work.

``container-archive``: the bytes are what they claim. ``container-assembly``: they are one whole image, the same in all
archives. ``container-exec``: it runs. A gate that could not be tried is ``skipped`` with the reason, never ``pass``.

Without GPUs some checks put their question off. Each is kept as ``deferred`` by its own name, and stays a debt that a
GPU stage must pay (``release.gates``); ``container-exec`` passes all the same, with the debts listed in its details,
when at least one check passed and none failed. With GPUs there is no reason to put anything off: then it is no pass.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chroot_exec.protocol import Check
from chroot_exec.resolve import Root
from oci_builder.execution.companions import Portable
from oci_builder.execution.run import GATES, ExecOptions, require_receivable, run_checks
from oci_builder.execution.staging import Staged
from oci_builder.model.errors import OciBuilderError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.receipts import DOCKER, OCI, PORTABLE, Gpu, Host, Receipt, Statement, Subject, parse_statement
from oci_builder.model.receipts import Check as Result
from oci_builder.model.redact import redact, redact_value, secret_values
from oci_builder.model.report import Finding, Report
from oci_builder.release.host import new_attempt, stamp, this_host, tool_versions

ARCHIVE, ASSEMBLY, EXEC = GATES
# Findings about how the image is put together; every other one is about bytes.
_ASSEMBLY = (
    "archive.twin", "archive.views", "archive.tag", "archive.config_name", "archive.extra", "config.", "platform.",
    "layer.order", "entry.link_target", "entry.duplicate", "policy.", "spec.",
)  # fmt: skip
# Of a spec's kind, but about a file that could not be read at all.
_UNREAD = ("spec.path",)
_SUBJECT_NAMES = {"oci-archive": OCI, "docker-archive": DOCKER}
_REASON = 4000
# Bytes of all checks' entries together, beyond which their details are left out: a receipt is a small document.
_MOST_ENTRIES = 2 << 20
_SHORT_REASON = 200


@dataclass(frozen=True, slots=True)
class GateContext:
    """What a receipt says besides the outcomes.

    Attributes:
        release, stage, engine: which release and stage, and where it ran.
        spec: sha256 of the canonical spec, hex, or empty.
        portable: the portable archive that was built together with the image, which the receipt then names too.
        emit: told of the checks while they run; no part of the receipt.
    """

    release: str = "none"
    stage: str = "container-check"
    engine: str = "local"
    spec: str = ""
    portable: Portable | None = None
    emit: Emit = silent


Stage = Callable[[], Staged]


def verify_exec(
    report: Report, stage: Stage, checks: Callable[[Staged], Sequence[Check]], options: ExecOptions,
    context: GateContext | None = None,
) -> Statement:  # fmt: skip
    """Judge the report, stage the image, run the checks.

    Args:
        report: the verification of the one or two archives.
        stage: stages the first archive; called only when both its gates passed.
        checks: the checks for the staged image.

    Never raises for what the archives or the checks do; the receipt says it.
    """
    context = context or GateContext()
    portable = context.portable or Portable()
    started = stamp()
    results = [*by_findings(report)]
    host = this_host()
    details: dict[str, Any] = {"portable": portable.reason} if portable.reason else {}
    if all(r.outcome == "pass" for r in results):
        more, host, found = execute(stage, checks, options, host, context.emit)
        results += more
        details |= found
    else:
        results.append(Result(name=EXEC, outcome="skipped", reason="not run: an earlier gate did not pass"))
    receipt = Receipt(
        release=context.release, stage=context.stage, attempt=new_attempt(), engine=context.engine,
        spec=context.spec or None, tools=tool_versions(), host=host, started=started, finished=stamp(),
        checks=tuple(results), details=details,
    ).redacted(secret_values(os.environ))  # fmt: skip
    statement = Statement(subject=_subjects(report, portable), predicate=receipt)
    parse_statement(statement.model_dump_json(by_alias=True, exclude_none=True).encode(), "receipt")
    return statement


def _subjects(report: Report, portable: Portable) -> tuple[Subject, ...]:
    named: dict[str, str] = {}
    for value in report.subjects:
        kind = str(value.get("kind"))
        name = _SUBJECT_NAMES.get(kind, re.sub(r"[^A-Za-z0-9._+-]", "_", kind))
        named[name] = str(value.get("sha256") or "").removeprefix("sha256:")
    named[PORTABLE] = portable.sha256
    return tuple(
        Subject.model_validate({"name": name, "digest": {"sha256": sha256}}) for name, sha256 in named.items() if sha256
    )


def by_findings(report: Report) -> tuple[Result, Result]:
    """``container-archive`` and ``container-assembly`` by a verification's findings.

    Of an archive whose bytes are no good nothing more is known: its assembly is ``skipped``, unless that is wrong too.
    """
    if not report.subjects:
        return _untried(ARCHIVE, "no archive was verified"), _untried(ASSEMBLY, "no archive was verified")
    wrong = [f for f in report.errors if not _is_assembly(f.code)]
    apart = [f for f in report.errors if _is_assembly(f.code)]
    archive, assembly = _found(ARCHIVE, wrong, report), _found(ASSEMBLY, apart, report)
    if wrong and not apart:
        assembly = _untried(ASSEMBLY, f"not judged: {ARCHIVE} did not pass")
    return archive, assembly


def _is_assembly(code: str) -> bool:
    return code.startswith(_ASSEMBLY) and code not in _UNREAD


def _untried(name: str, reason: str) -> Result:
    return Result(name=name, outcome="skipped", reason=reason)


def _found(name: str, found: Sequence[Finding], report: Report) -> Result:
    if not found:
        return Result(name=name, outcome="pass", details={"warnings": len(report.findings) - len(report.errors)})
    return Result(name=name, outcome="fail", reason=_reasons(found), details={"codes": sorted({f.code for f in found})})


def _reasons(findings: Sequence[Finding]) -> str:
    lines = [f"[{f.code}] {f.where}: {f.message}" for f in findings[:10]]
    more = f" (and {len(findings) - 10} more)" if len(findings) > 10 else ""
    return ("; ".join(lines) + more)[:_REASON]


def execute(
    stage: Stage, checks: Callable[[Staged], Sequence[Check]], options: ExecOptions, host: Host, emit: Emit = silent
) -> tuple[list[Result], Host, dict[str, Any]]:
    """Only the third gate: (its outcome and the checks', the host as the receipt names it, details).

    Never raises for what the archives or the checks do.
    """
    try:
        with stage() as staged:
            wanted = checks(staged)
            require_receivable(wanted, "checks")
            task = "run checks"
            emit(Event("start", task, unit="items"))
            emit(Event("note", task, message=", ".join(show(check.name) for check in wanted)[:_REASON]))
            receipt = run_checks(staged.root, staged.config, wanted, options)
            emit(Event("done", task, unit="items"))
            ran_on = _host(receipt, staged.root)
    except OciBuilderError as error:
        return [Result(name=EXEC, outcome="error", reason=str(error)[:_REASON])], host, {}
    details = {
        "sandbox": receipt["sandbox"],
        "runner": receipt["runner"],
        "machine": receipt["host"],
        "manifest": staged.manifest,
        "config": staged.config_digest,
        "staged_again": not staged.reused,
    }
    if receipt["gpu"]:
        details["gpu"] = {k: v for k, v in receipt["gpu"].items() if k != "probe"}
    results = _bounded([_result(check) for check in receipt["checks"]])
    return [_overall(receipt, options.gpu is not None), *results], ran_on, details


def _overall(receipt: Mapping[str, Any], gpus: bool) -> Result:
    outcome = receipt["outcome"]
    by_outcome = {o: [c["name"] for c in receipt["checks"] if c["outcome"] == o] for o in ("pass", "deferred")}
    details = {"deferred": by_outcome["deferred"]} if by_outcome["deferred"] else {}
    if outcome == "pass" or (outcome == "deferred" and by_outcome["pass"] and not gpus):
        return Result(name=EXEC, outcome="pass", details=details)
    if receipt["error"]:
        reason = f"[{receipt['error']['code']}] {receipt['error']['message']}"
    else:
        reason = "; ".join(f"{c['name']}: {c['outcome']}" for c in receipt["checks"] if c["outcome"] != "pass")
    return Result(name=EXEC, outcome=outcome, reason=reason[:_REASON], details=details)


def _result(check: Mapping[str, Any]) -> Result:
    details = {k: check[k] for k in ("argv", "exit", "signal", "uid", "left_running", "details") if k in check}
    for stream in ("stdout", "stderr"):
        if check[stream]:
            details[stream] = {k: check[stream][k] for k in ("bytes", "sha256", "truncated")}
    reason = f"[{check['code']}] {check['message']}" if check["outcome"] != "pass" else ""
    return Result(
        name=check["name"], outcome=check["outcome"], reason=redact(reason)[:_REASON], seconds=check["seconds"],
        details=redact_value(details),
    )


def _bounded(results: list[Result]) -> list[Result]:
    """The entries with their details, as long as there is room; every outcome stays."""
    room, out = _MOST_ENTRIES, []
    for result in results:
        size = len(result.model_dump_json().encode())
        room -= size
        left_out = {"reason": result.reason[:_SHORT_REASON], "details": {"left_out": size}}
        out.append(result if room >= 0 else result.model_copy(update=left_out))
    return out


def _host(receipt: Mapping[str, Any], root: Path) -> Host:
    sandbox = receipt["sandbox"]
    gpu = receipt["gpu"] or {}
    gpus = tuple(
        Gpu(name=d["name"], uuid=d["uuid"], capability=d["capability"], memory=d["memory"])
        for d in (gpu.get("probe") or {}).get("devices", ())
    )
    kind = f"{sandbox.get('isolation', 'none')}, {sandbox.get('root', '')} root, {sandbox.get('enter', '')}"
    return this_host(gpus=gpus, sandbox=f"chroot_exec ({kind})").model_copy(
        update={"os": image_os(root), "driver": gpu.get("driver", "")}
    )


def image_os(root: Path) -> str:
    """The image's own os-release, read inside the root."""
    opened = Root(str(root))
    try:
        text = (opened.read("/etc/os-release", 1 << 16) or b"").decode("utf-8", "replace")
    finally:
        opened.close()
    pairs = dict(re.findall(r"^([A-Z_]+)=[\"']?(.*?)[\"']?$", text, re.MULTILINE))
    return " ".join(p for p in (pairs.get("ID", ""), pairs.get("VERSION_ID", "")) if p)
