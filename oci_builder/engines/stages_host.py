"""GPU stages on this root file system: the portable archive installed as users install it, its own checks run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.engines.stages_request import Outcome, Request
from oci_builder.model.errors import CheckFailed, SpecError, disk_error
from oci_builder.model.events import Emit, Event
from oci_builder.model.jsontext import load_json
from oci_builder.model.receipts import PORTABLE, Gpu
from oci_builder.model.spec import Spec
from oci_builder.payload.runtime import link_tree
from oci_builder.release.host import this_host
from oci_builder.store.removal import clear_folder


@dataclass(frozen=True, slots=True)
class Checks:
    """Which of the runtime's lists, for which tiers and how many GPUs."""

    listed: str
    tiers: tuple[str, ...]
    gpus: int

    def words(self, prefix: str) -> list[str]:
        """Arguments of ``checks list`` and ``checks run``."""
        return ["--stage", self.listed, "--prefix", prefix, "--tiers", ",".join(self.tiers), "--gpus", str(self.gpus)]


def run_on_host(request: Request, spec: Spec, which: Checks, sha256: str, emit: Emit) -> Outcome:
    """Install (or check again) the portable archive ``sha256``, and run the list of its checks.

    Raises:
        SpecError: ``stage.checks``: the runtime carries none.
        CheckFailed: ``stage.install``, ``stage.checks``: the installer or the checks ended without a result.
        TransportError: ``io.*``.
    """
    prefix = install(request, spec, sha256, emit)
    second = prefix.with_name(prefix.name + ".second") if which.listed == "single" else None
    python, checks = prefix / "envs" / which.tiers[0] / "bin/python3", prefix / "checks"
    answer = Path(request.work) / "run.json"
    if not (checks / "__main__.py").is_file():
        raise SpecError("stage.checks", f"the runtime in {prefix} carries no checks", where=str(checks))
    argv = [python, checks, "run", *which.words(str(prefix)), "--json", answer]
    answer.unlink(missing_ok=True)
    try:
        if second is not None:
            _twin(prefix, second)
            argv += ["--second", second]
        status, log = _run([str(a) for a in argv], _environment(prefix), Path(request.work) / "checks.log", emit)
    finally:
        if second is not None:
            clear_folder(second)
    if not answer.is_file():
        raise CheckFailed("stage.checks", f"the checks ended with {status} and no result: {log}", where=str(checks))
    receipt = load_json(answer.read_bytes(), str(answer))
    return Outcome({}, {PORTABLE: sha256}, tuple(_row(r) for r in receipt["checks"]), _host(receipt), {"where": "host"})


def install(request: Request, spec: Spec, sha256: str, emit: Emit) -> Path:
    """The portable archive at its prefix, by the installer that users run; a matching one is checked again.

    Raises:
        SpecError: ``stage.checks``: there is no installer; CheckFailed: ``stage.install``; TransportError: ``io.*``.
    """
    given = request.options.get("prefix")
    prefix = Path(str(given)) if given else Path(request.cache).absolute() / "installed" / sha256[:16] / "runtime"
    helper = _helper(request, spec, prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    archive = Path(request.out).absolute() / PORTABLE
    status, log = _run(
        ["bash", str(helper), str(archive), sha256, str(prefix)], dict(os.environ), Path(request.work) / "install.log",
        emit,
    )  # fmt: skip
    if not given:
        os.utime(prefix.parent)  # used now: pruning the cache goes by it
    if status:
        raise CheckFailed("stage.install", f"the installer ended with {status}: {log}", where=str(prefix))
    return prefix


def _helper(request: Request, spec: Spec, prefix: Path) -> Path:
    named = request.options.get("helper")
    places = [Path(str(named))] if named else []
    if spec.files is not None:
        places.append(Path(request.spec).absolute().parent / spec.files / "files/ensure_runtime.sh")
    places.append(prefix / "ensure_runtime.sh")
    for place in places:
        if place.is_file():
            return place
    raise SpecError("stage.checks", "there is no ensure_runtime.sh: this spec ships no runtime that GPU stages know")


def _twin(prefix: Path, second: Path) -> None:
    """The same installation at a second place: folders anew, files as hard links."""
    clear_folder(second)
    link_tree(prefix, second)


def _environment(prefix: Path) -> dict[str, str]:
    """What the checks get: no caches, no settings of the caller but those of the machine."""
    kept = ("PATH", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NCCL_NVLS_ENABLE",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")  # fmt: skip
    env = {name: os.environ[name] for name in kept if name in os.environ}
    return {**env, "PYTHONPATH": str(prefix / "source"), "PYTHONDONTWRITEBYTECODE": "1"}


def _run(argv: Sequence[str], env: Mapping[str, str], log: Path, emit: Emit) -> tuple[int, str]:
    """Run a program, its output into ``log`` and line by line to whoever watches; the end of it comes back."""
    last: list[str] = []
    try:
        with log.open("wb") as file, subprocess.Popen(
            argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                text = line.decode("utf-8", "replace").rstrip()
                last = [*last[-20:], text]
                emit(Event("note", Path(argv[0]).name, message=text[:400]))
    except OSError as error:
        raise disk_error(error, f"running {argv[0]}") from None
    return process.returncode, "\n".join(last)[-2000:]


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    details = {"exit": row.get("exit"), "details": row.get("details", {})}
    reason = str(row.get("reason", ""))
    if row["outcome"] != "pass" and not reason:
        reason = "the check gave no reason"
    return {"name": row["name"], "outcome": row["outcome"], "reason": reason[:4000], "seconds": row.get("seconds", 0),
            "details": details}  # fmt: skip


def _host(receipt: Mapping[str, Any]) -> dict[str, Any]:
    gpus = tuple(
        Gpu(name=g["name"], uuid=g["uuid"], capability=g["capability"], memory=int(g.get("memory", 0)))
        for g in receipt.get("host", {}).get("gpus", ())
    )
    return this_host(gpus=gpus).model_dump(mode="json")
