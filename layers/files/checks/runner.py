"""Several checks without the chroot runner: each in a process of its own, a table, and a JSON receipt."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import listing
from .common import CheckFailed, finite, last_json, say
from .gpu import NoGpu, gpu_facts
from .process import Done, run
from .progress import Progress, one_line

SCHEMA = "nrl-checks/1"
OUTCOMES = ("pass", "fail", "deferred", "skipped")


def options(parser: argparse.ArgumentParser) -> None:
    """A stage's list, or a file with one, and where the receipt goes."""
    listing.options(parser)
    parser.add_argument("--list", type=Path, default=None, help="checks as `list` prints them, instead of a stage")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run only these")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="receipt; never overwritten")


def main(given: argparse.Namespace) -> int:
    """Run them; 0 when each passed, or was put off as it may be; 2 when nothing was run.

    Interrupted, it says so of the checks that are left, and writes the receipt all the same.
    """
    try:
        wanted = chosen(given)
        kept = None if given.json is None else Receipt(given.json)
    except CheckFailed as error:
        say(f"checks: {error}\n", sys.stderr)
        return 2
    receipt = run_all(wanted)
    written = kept is None or kept.write(receipt)
    say(table(receipt["checks"]) + "\n", sys.stdout)
    if not written:
        return 1
    return 0 if receipt["outcome"] in ("pass", "deferred") else 1


def chosen(given: argparse.Namespace) -> list[Mapping[str, Any]]:
    """The checks that the options ask for.

    Raises:
        CheckFailed: there are none, or the list is not one.
    """
    if given.list is not None:
        found = read_list(given.list)
    else:
        tiers = given.tiers.split(",")
        found = listing.checks(given.stage, given.prefix, tiers, given.second, given.gpus, given.module)
    unknown = sorted(set(given.only) - {c["name"] for c in found})
    wanted = [c for c in found if not given.only or c["name"] in given.only]
    if unknown or not wanted:
        raise CheckFailed(f"no such check: {', '.join(unknown) or 'the list is empty'}")
    return list(wanted)


def read_list(path: Path) -> list[dict[str, Any]]:
    """A list as ``list`` prints it.

    Raises:
        CheckFailed: it cannot be read, or it is none.
    """
    try:
        found = json.loads(path.read_text())["checks"]
        for check in found:
            words = [check["name"], *check["argv"]]
            if len(words) < 2 or not all(isinstance(word, str) for word in words):
                raise TypeError("a check needs a name and a command of words")
            if not float(check.get("timeout", 600)) > 0:
                raise ValueError("a timeout is a number of seconds")
        if len({check["name"] for check in found}) < len(found):
            raise ValueError("two checks have one name")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckFailed(f"no list of checks at {path}: {type(error).__name__}: {error}") from None
    return list(found)


class Receipt:
    """A file that will be there whole or not at all, and never in place of another."""

    def __init__(self, path: Path) -> None:
        """Find out before the checks run whether it can be written.

        Raises:
            CheckFailed: it cannot.
        """
        self.path = path
        if path.exists() or path.is_symlink():
            raise CheckFailed(f"{path} is there already, and no receipt is overwritten")
        try:
            self.file = tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".receipt-")
        except OSError as error:
            raise CheckFailed(f"no receipt can be written to {path}: {error.strerror}") from None

    def write(self, receipt: Mapping[str, Any]) -> bool:
        """Write it; where that fails after all it goes to standard output, and the answer is no."""
        with self.file as file:
            try:
                json.dump(receipt, file, indent=1, sort_keys=True)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
                os.link(file.name, self.path)
                return True
            except OSError as error:
                say(f"checks: no receipt at {self.path}: {error.strerror}; here it is instead\n", sys.stderr)
                say(json.dumps(receipt, indent=1, sort_keys=True) + "\n", sys.stdout)
                return False


def run_all(checks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The receipt of a run."""
    started = _now()
    rows: list[dict[str, Any]] = []
    for check in checks:
        say(f"{check['name']} ...\n", sys.stderr)
        try:
            rows.append(run_one(check))
        except (KeyboardInterrupt, SystemExit):
            rows += [not_run(left, "interrupted" if left is check else "not run") for left in checks[len(rows) :]]
            break
        except Exception as error:  # a full disk, say: what the others found must not be lost
            rows.append(not_run(check, f"it could not be run: {type(error).__name__}: {error}"))
    outcomes = {row["outcome"] for row in rows}
    overall = "fail" if outcomes - {"pass", "deferred"} else "deferred" if "deferred" in outcomes else "pass"
    return {
        "schema": SCHEMA, "outcome": overall, "started": started, "finished": _now(), "host": host(), "checks": rows,
    }  # fmt: skip


def not_run(check: Mapping[str, Any], why: str) -> dict[str, Any]:
    """The row of a check that could not be run, or that somebody's interruption ended or kept from starting."""
    done = Done(-1, "", "", 0.0, False, 0)
    return row(check, done, "fail", why, {})


def run_one(check: Mapping[str, Any]) -> dict[str, Any]:
    """One check in a process of its own, with temporary files of its own."""
    with tempfile.TemporaryDirectory(prefix="nrl-run-", ignore_cleanup_errors=True) as folder:
        env = {**os.environ, "TMPDIR": folder, **check.get("env", {})}
        watch = Progress(check["name"], [Path(folder)], patience=math.inf)
        done = run(check["argv"], timeout=float(check.get("timeout", 600)), env=env, watch=watch)
    outcome, reason, details = verdict(check, done)
    return row(check, done, outcome, f"{reason} ({watch.words()})" if done.timed_out else reason, details)


def row(check: Mapping[str, Any], done: Done, outcome: str, reason: str, details: Any) -> dict[str, Any]:
    """What the receipt says about one check."""
    return {
        "name": check["name"], "outcome": outcome, "reason": reason, "seconds": round(done.seconds, 2),
        "argv": list(check["argv"]), "exit": done.status, "left_running": done.left, "details": finite(details),
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
    reasons = [one_line(row["reason"])[:160] for row in rows]
    told = zip(rows, reasons, strict=True)
    lines = [f"{r['outcome']:<8} {r['name']:<{width}} {r['seconds']:8.1f} s  {reason}" for r, reason in told]
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
