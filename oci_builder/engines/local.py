"""Stages on this machine, in a process of their own, held to their needs as a machine of Modal would hold them.

What cannot be enforced is refused: no network means a network namespace, a GPU means one that the driver gives, a time
limit means that the whole tree of processes ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oci_builder
from oci_builder.engines.local_limits import find_gpus, require_gpus, require_scratch, warn_memory
from oci_builder.engines.local_tree import LATE
from oci_builder.engines.local_worker import event_of
from oci_builder.engines.needs import LARGEST_SCRATCH, LONGEST, Needs, validate
from oci_builder.engines.stages import Request, find_stage
from oci_builder.model.errors import CheckFailed, PolicyError, SpecError, TransportError
from oci_builder.model.events import Emit, silent
from oci_builder.model.spec import GitTier, LockTier, load_spec

# Seconds between asking a stage to end and ending it: time to take a sandbox down.
GRACE = 10.0
_SMALL_SCRATCH = 2.0


@dataclass(frozen=True, slots=True)
class LocalRunner:
    """Runs stages here.

    Attributes:
        scratch_gib: room that a stage must find; None: what the stage says for a spec that compiles, else 2 GiB.
        timeout_s: seconds; None: the stage's own limit.
        any_gpu: GPUs of another kind than the stage's are good enough for supporting evidence.
    """

    scratch_gib: float | None = None
    timeout_s: float | None = None
    any_gpu: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that are no amounts.

        Raises:
            SpecError: ``needs.timeout``, ``needs.size``.
        """
        if self.timeout_s is not None and not 0 < self.timeout_s <= LONGEST:
            raise SpecError("needs.timeout", f"a time limit is more than 0 and at most {LONGEST} seconds")
        if self.scratch_gib is not None and not 0 <= self.scratch_gib <= LARGEST_SCRATCH:
            raise SpecError("needs.size", f"scratch is 0 to {LARGEST_SCRATCH} GiB")

    def check(self, name: str, request: Request, emit: Emit = silent) -> Needs:
        """Refuse a stage that this machine cannot run; nothing is started.

        Raises:
            SpecError: ``stage.name``, ``spec.*``; PolicyError: ``needs.gpu``; TransportError: ``io.space``.
        """
        needs = validate(find_stage(name).needs, f"stage {name}")
        if needs.gpu:
            require_gpus(needs, find_gpus(), self.any_gpu, emit)
        gib = self.scratch_gib if self.scratch_gib is not None else _scratch(needs, request)
        require_scratch(Path(request.scratch or request.cache), gib)
        warn_memory(needs, emit)
        return needs

    def run(self, name: str, request: Request, emit: Emit = silent) -> dict[str, Any]:
        """Check, then run; the result of ``run_stage``.

        Raises:
            as ``check``; PolicyError: ``needs.network``: the stage must run without network, and cannot here.
            CheckFailed: ``stage.timeout``; TransportError: ``stage.died``. All its processes have ended then.
        """
        needs = self.check(name, request, emit)
        limit = self.timeout_s if self.timeout_s is not None else float(needs.timeout_s)
        asked = {
            "stage": name, "request": request.to_json(), "network": needs.network, "limit": limit, "grace": GRACE,
            "runner": os.getpid(),
        }  # fmt: skip
        return _Worker(name, asked, emit).run()


def _scratch(needs: Needs, request: Request) -> float:
    """The needs are those of a runtime whose packages are compiled and unpacked; other specs are small."""
    big = any(isinstance(tier, LockTier | GitTier) for tier in load_spec(Path(request.spec)).tiers.values())
    return float(needs.scratch_gib) if big else min(_SMALL_SCRATCH, needs.scratch_gib)


class _Worker:
    """One stage's process and what it says."""

    def __init__(self, name: str, asked: Mapping[str, Any], emit: Emit) -> None:
        self._name, self._asked, self._emit = name, asked, emit
        self._result: dict[str, Any] | None = None
        self._refused: dict[str, str] | None = None

    def run(self) -> dict[str, Any]:
        package = str(Path(oci_builder.__file__).resolve().parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        path = package if not inherited else f"{package}{os.pathsep}{inherited}"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "oci_builder.engines.local_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(self._asked).encode())
                process.stdin.close()
            for line in process.stdout:
                # A worker that was killed may leave half a line; that it has no result says the rest.
                with suppress(ValueError):
                    self._take(json.loads(line))
            process.wait()
        finally:
            if process.poll() is None:
                # Interrupted: the supervisor ends its tree, for which the stage has its grace.
                process.terminate()
                process.wait()
        return self._answer(process.returncode)

    def _take(self, line: dict[str, Any]) -> None:
        if "event" in line:
            self._emit(event_of(line["event"]))
        self._result = line.get("result", self._result)
        self._refused = line.get("refused", self._refused)

    def _answer(self, status: int) -> dict[str, Any]:
        if self._refused is not None:
            raise PolicyError(self._refused["code"], self._refused["message"])
        if self._result is not None:
            return self._result
        if status == LATE:
            raise CheckFailed(
                "stage.timeout", f"{self._name} was not done after {self._asked['limit']:g} seconds; all its processes "
                "were ended. Run it again: what is finished is kept", where=f"stage {self._name}",
            )  # fmt: skip
        killed = ": it was killed, as for lack of memory" if status == 128 + signal.SIGKILL else ""
        text = f"the process of stage {self._name} ended with {status} and no result{killed}"
        raise TransportError("stage.died", text, where=f"stage {self._name}")
