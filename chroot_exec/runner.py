"""From a request to a receipt."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from chroot_exec import gpu, namespaces, receipt, sandbox, teardown
from chroot_exec.errors import RunnerError
from chroot_exec.gpu import Injection
from chroot_exec.inside import Job
from chroot_exec.interruption import Interrupted, Interruption, watching
from chroot_exec.protocol import Request

# What is not the same without real root, for whoever reads a receipt.
ROOTLESS_DIFFERS = [
    "device nodes are bind mounts of the host's, not made",
    "root inside is an ordinary user outside: ids that are not mapped cannot own files",
    "mounts are the user namespace's own; kernel limits of the user hold",
]


def run(request: Request) -> dict[str, Any]:
    """Run everything that a request asks for; never raises for what the sandbox or a program does."""
    out: dict[str, Any] = {
        "schema": receipt.SCHEMA, "outcome": "error", "error": None, "started": receipt.now(), "finished": "",
        "runner": receipt.runner_facts(), "host": receipt.host_facts(), "sandbox": {}, "gpu": None, "checks": [],
        "exec": None, "interrupted": 0,
    }  # fmt: skip
    _keep_descriptors()
    try:
        if request.exec is not None:
            _run(request, out, None)
        else:
            with watching() as interruption:
                _run(request, out, interruption)
    except RunnerError as error:
        out["interrupted"] = error.signal if isinstance(error, Interrupted) else 0
        out["error"] = {"code": error.code, "message": error.message}
        out["outcome"] = "error"
    except OSError as error:
        out["error"] = {"code": "sandbox.system", "message": str(error)}
        out["outcome"] = "error"
    out["finished"] = receipt.now()
    return out


def _keep_descriptors() -> None:
    """No program gets what the caller has open but the standard streams: a folder would be a way out to the host."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            # One of them was the listing's own, and is closed by now.
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)


def _run(request: Request, out: dict[str, Any], interruption: Interruption | None) -> None:
    rootless = namespaces.choose_isolation(request.isolation) == "rootless"
    out["sandbox"] = {
        "isolation": "rootless" if rootless else "root",
        "namespaces": namespaces.names(request.network, rootless),
        "network": request.network,
        "differs": ROOTLESS_DIFFERS if rootless else [],
    }
    injection = gpu.discover(request.gpu) if request.gpu else None
    if injection:
        out["gpu"] = injection.to_json()
    state = teardown.state_folder(request.state)
    teardown.sweep(state)
    if request.exec is not None:
        out["exec"] = _exec(request, injection, rootless, state, out)
        return
    for check in request.checks:
        if interruption:
            interruption.require_none()
        answer = _answer(Job(request, check, teardown.Run(state, request.root), injection, rootless), out, interruption)
        out["checks"].append(receipt.judge(check, answer))
    out["outcome"] = receipt.overall(out["checks"])


def _answer(job: Job, out: dict[str, Any], interruption: Interruption | None = None) -> dict[str, Any]:
    given = len(job.injection.gpus) if job.injection else 0
    if job.check and job.check.gpus > given:
        job.run.end()
        return _failed("check.gpus", f"{job.check.name} needs {job.check.gpus} GPUs, {given} given")
    try:
        answer = sandbox.run(job, interruption)
    except Interrupted:
        job.run.end()
        raise
    except RunnerError as error:
        answer = _failed(error.code, error.message)
    job.run.end()
    out["sandbox"].update({k: v for k, v in (answer.get("sandbox") or {}).items() if v or k not in out["sandbox"]})
    out["sandbox"]["ids"] = answer.get("ids", "")
    if answer.get("gpu") and out["gpu"] is not None:
        out["gpu"].update(answer["gpu"])
    return answer


def _failed(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def _exec(
    request: Request, injection: Injection | None, rootless: bool, state: str, out: dict[str, Any]
) -> dict[str, Any]:
    answer = _answer(Job(request, None, teardown.Run(state, request.root), injection, rootless), out)
    if answer.get("error"):
        raise RunnerError(answer["error"]["code"], answer["error"]["message"])
    facts = {**receipt.program_facts(answer), "message": answer["ended"]["start_message"]}
    out["outcome"] = "pass" if facts["exit"] == 0 else "fail"
    return facts


def exit_status(request: Request, value: dict[str, Any]) -> int:
    """The process's exit status for a receipt, as the package's documentation gives it."""
    if request.exec is not None and value["exec"]:
        return int(value["exec"]["exit"])
    if value["interrupted"]:
        return 128 + int(value["interrupted"])
    broken = value["error"] or any(_is_ours(c) for c in value["checks"])
    return 125 if broken else 0 if value["outcome"] in ("pass", "deferred") else 1


def _is_ours(check: dict[str, Any]) -> bool:
    return check["outcome"] == "error" and not check["code"].startswith("check.")
