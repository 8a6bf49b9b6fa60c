"""The receipt: one JSON object that says what was run, in what, and how it ended.

    {"schema": "chroot-exec-receipt/1", "outcome": "pass" | "deferred" | "fail" | "error",
     "error": null | {"code", "message"},
     "started", "finished": ISO 8601 in UTC, "runner": {"version", "python"}, "host": {...},
     "sandbox": {"isolation", "namespaces", "ids", "root", "enter", "devices", "proc", "sys", "differs", "notes"},
     "gpu": null | {...}, "checks": [{"name", "outcome", "code", "message", "argv", "exit", "signal", "seconds", …}],
     "exec": null | {"argv", "exit", "signal", "seconds", "message", …}, "interrupted": 0 | signal number}

A run of checks that a signal ended has ``interrupted``, the error ``run.interrupted`` and only the checks that had
ended before: the one that was running, and those after it, have no outcome.
A note of the sandbox that has a code begins with it: ``[sandbox.attributes]``, rootless before Linux 6.6.
The ``message`` of ``exec`` says why the program could not be started (exit 126 or 127); else it is empty.

``fail`` means that a check ran and said no; ``error`` that it could not be run as asked; ``deferred`` that a check
which may do so put its question off, with its reason as ``message``. A check's outcome is never ``pass`` unless its
program ran to its end.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from chroot_exec import __version__, process
from chroot_exec.mounts import NO_ATTRIBUTES
from chroot_exec.protocol import Check
from chroot_exec.result import parse_result

SCHEMA = "chroot-exec-receipt/1"
_PATTERN_SECONDS = 5.0


def now() -> str:
    """The present time, as receipts write it."""
    return datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def host_facts() -> dict[str, Any]:
    """What the machine is: kernel, distribution, processors, memory."""
    uname = os.uname()
    return {
        "kernel": uname.release,
        "machine": uname.machine,
        "os": _os_release(),
        "libc": " ".join(platform.libc_ver()),
        "cpus": os.cpu_count() or 0,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def runner_facts() -> dict[str, str]:
    """What ran it."""
    return {"version": __version__, "python": platform.python_version()}


def _os_release() -> str:
    try:
        with open("/etc/os-release", encoding="utf-8", errors="replace") as file:
            rows = dict(line.rstrip("\n").split("=", 1) for line in file if "=" in line)
    except OSError:
        return ""
    return rows.get("PRETTY_NAME", "").strip("\"'")


def judge(check: Check, answer: dict[str, Any]) -> dict[str, Any]:
    """A check's entry: its outcome from what PID 1 answered."""
    outcome, code, message, details = _verdict(check, answer)
    if outcome == "fail":
        message += _machines_part(answer)
    return {
        "name": check.name, "outcome": outcome, "code": code, "message": message,
        **program_facts(answer), "expected_exit": check.exit, "details": details,
        "stdout": answer.get("stdout"), "stderr": answer.get("stderr"),
    }  # fmt: skip


def _machines_part(answer: dict[str, Any]) -> str:
    """What the sandbox lacks here, where a check that failed speaks of it."""
    said = " ".join(answer[stream]["text"] for stream in ("stdout", "stderr"))
    notes = [note for note in answer["sandbox"]["notes"] if note.startswith(f"[{NO_ATTRIBUTES}]")]
    return f"; {notes[0]}" if notes and any(os.strerror(n) in said for n in (errno.EIO, errno.EOPNOTSUPP)) else ""


def _verdict(check: Check, answer: dict[str, Any]) -> tuple[str, str, str, dict[str, Any]]:
    if answer.get("error"):
        return "error", answer["error"]["code"], answer["error"]["message"], {}
    ended = answer["ended"]
    if ended["start_error"]:
        return "error", "check.start", ended["start_message"], {}
    code, message = _ending(check, ended)
    if not code:
        try:
            with _time_limit(_PATTERN_SECONDS):
                code, message = _match(check, answer)
        except TimeoutError:
            code, message = "check.pattern", f"a pattern took longer than {_PATTERN_SECONDS:g} seconds to match"
    if check.result == "json":
        return _by_result(check, code, message, answer["stdout"]["text"])
    return ("fail" if code else "pass"), code, message, {}


def _by_result(check: Check, code: str, message: str, text: str) -> tuple[str, str, str, dict[str, Any]]:
    """The check's own word, as far as it does not contradict how it ended."""
    try:
        value = parse_result(text)
    except ValueError as error:
        wrong = f"the last line of standard output is no result: {error}"
        return "fail", code or "check.result", message or wrong, {}
    own, reason = value["outcome"], value.get("reason", "")
    if code:
        return "fail", code, f"{message}; {reason}" if reason else message, value
    if own == "deferred" and check.deferrable:
        return "deferred", "check.deferred", reason, value
    return ("pass", "", "", value) if own == "pass" else ("fail", f"check.{own}", reason, value)


def program_facts(answer: dict[str, Any]) -> dict[str, Any]:
    """Who ran what, for how long, and how it ended."""
    ended = answer.get("ended") or {}
    started = answer.get("started_by") or {}
    return {
        **started,
        "exit": process.start_status(ended["start_error"]) if ended.get("start_error") else ended.get("status"),
        "signal": _signal_name(ended.get("signal") or 0),
        "timed_out": ended.get("timed_out", False),
        "left_running": ended.get("left", 0),
        "seconds": round(ended.get("seconds", 0.0), 3),
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name if number else ""
    except ValueError:
        return f"SIG{number}"


def _ending(check: Check, ended: dict[str, Any]) -> tuple[str, str]:
    if ended["timed_out"]:
        return "check.timeout", f"not done after {check.timeout:g} seconds; all its processes were killed"
    if ended["status"] == check.exit:
        return "", ""
    if ended["signal"]:
        return "check.signal", f"ended by {_signal_name(ended['signal'])}"
    return "check.exit", f"exit status {ended['status']}, expected {check.exit}"


def _match(check: Check, answer: dict[str, Any]) -> tuple[str, str]:
    texts = {stream: answer[stream]["text"] for stream in ("stdout", "stderr")}
    for stream, patterns in (("stdout", check.stdout), ("stderr", check.stderr)):
        for pattern in patterns:
            if not re.search(pattern, texts[stream], re.MULTILINE):
                return "check.output", f"{stream} has no match for {pattern!r}"
    for pattern in check.reject:
        for stream, text in texts.items():
            if re.search(pattern, text, re.MULTILINE):
                return "check.output", f"{stream} matches {pattern!r}, which it must not"
    return "", ""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError after so much of our own time: patterns may come from the image, and some take exponential time.

    A busy machine's time is not counted: it is no reason for another verdict.
    """

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def overall(checks: list[dict[str, Any]]) -> str:
    """``error`` before ``fail`` before ``deferred`` before ``pass``."""
    outcomes = {c["outcome"] for c in checks}
    return next((o for o in ("error", "fail", "deferred") if o in outcomes), "pass")
