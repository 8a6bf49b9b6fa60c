"""Several checks without the chroot runner: each in a process of its own, a table, and a JSON receipt."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import listing
from .common import last_json
from .gpu import NoGpu, gpu_facts
from .process import Done, run

SCHEMA = "nrl-checks/1"
OUTCOMES = ("pass", "fail", "deferred", "skipped")


def options(parser: argparse.ArgumentParser) -> None:
    """A stage's list, or a file with one, and where the receipt goes."""
    listing.options(parser)
    parser.add_argument("--list", type=Path, default=None, help="checks as `list` prints them, instead of a stage")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run only these")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="receipt; never overwritten")


def main(given: argparse.Namespace) -> int:
    """Run them; 0 when each passed, or was put off as it may be; 2 when there was nothing to run."""
    if given.list is not None:
        found = json.loads(given.list.read_text())["checks"]
    else:
        tiers = given.tiers.split(",")
        found = listing.checks(given.stage, given.prefix, tiers, given.second, given.gpus, given.module)
    wanted = [c for c in found if not given.only or c["name"] in given.only]
    unknown = sorted(set(given.only) - {c["name"] for c in found})
    if unknown or not wanted:
        sys.stderr.write(f"checks: no such check: {', '.join(unknown) or 'the list is empty'}\n")
        return 2
    receipt = run_all(wanted)
    print(table(receipt["checks"]))
    if given.json is not None:
        with given.json.open("x") as file:
            json.dump(receipt, file, indent=1, sort_keys=True)
    return 0 if receipt["outcome"] in ("pass", "deferred") else 1


def run_all(checks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The receipt of a run."""
    started = _now()
    rows = []
    for check in checks:
        sys.stderr.write(f"{check['name']} ...\n")
        rows.append(run_one(check))
    outcomes = {row["outcome"] for row in rows}
    overall = "fail" if outcomes - {"pass", "deferred"} else "deferred" if "deferred" in outcomes else "pass"
    return {
        "schema": SCHEMA, "outcome": overall, "started": started, "finished": _now(), "host": host(), "checks": rows,
    }  # fmt: skip


def run_one(check: Mapping[str, Any]) -> dict[str, Any]:
    """One check in a process of its own, with temporary files of its own."""
    with tempfile.TemporaryDirectory(prefix="nrl-run-") as folder:
        env = {**os.environ, "TMPDIR": folder, **check.get("env", {})}
        done = run(check["argv"], timeout=float(check.get("timeout", 600)), env=env)
    outcome, reason, details = verdict(check, done)
    return {
        "name": check["name"], "outcome": outcome, "reason": reason, "seconds": round(done.seconds, 2),
        "argv": list(check["argv"]), "exit": done.status, "left_running": done.left, "details": details,
        "stderr": done.stderr[-2000:] if outcome == "fail" else "",
    }  # fmt: skip


def verdict(check: Mapping[str, Any], done: Done) -> tuple[str, str, Any]:
    """A check's own word, as far as it does not contradict how it ended."""
    value = last_json(done.stdout) or {}
    details, reason = value.get("details", {}), str(value.get("reason", ""))
    if done.timed_out:
        return "fail", f"not done after {check.get('timeout', 600)} seconds; all its processes were killed", details
    outcome = value.get("outcome")
    if outcome not in OUTCOMES:
        return "fail", f"no result; it ended with {done.status}: {done.stderr[-300:]}", details
    if outcome == "pass" and done.status == 0:
        return "pass", "", details
    if outcome == "deferred" and done.status == 0 and check.get("deferrable") and reason:
        return "deferred", reason, details
    return "fail", reason or f"{outcome}, and it ended with {done.status}", details


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a check, and the count."""
    width = max(len(row["name"]) for row in rows)
    lines = [f"{r['outcome']:<8} {r['name']:<{width}} {r['seconds']:8.1f} s  {r['reason'][:160]}" for r in rows]
    counts = {outcome: sum(r["outcome"] == outcome for r in rows) for outcome in OUTCOMES}
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    return "\n".join([*map(str.rstrip, lines), f"{len(rows)} checks: {summary}"])


def host() -> dict[str, Any]:
    """What the machine is; without GPUs, why."""
    facts: dict[str, Any] = {"kernel": platform.release(), "python": platform.python_version(), "cpus": os.cpu_count()}
    try:
        facts.update(gpu_facts())
    except NoGpu as error:
        facts.update(gpus=[], no_gpu=str(error))
    return facts


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
