"""The process in which a stage runs on this machine: ``python -m oci_builder.engines.local_worker``.

Standard input has one JSON object (stage, request, network, limit, grace,
runner); standard output gets JSON lines,
``{"event": …}`` and at last ``{"result": …}``. Standard error stays what it is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

from oci_builder.engines.local_limits import leave_network
from oci_builder.engines.local_tree import supervise
from oci_builder.engines.run import run_stage
from oci_builder.model.errors import PolicyError
from oci_builder.model.events import Event


def main() -> int:
    """Run the stage that standard input names, held to its time limit. 0 whenever there is a result."""
    asked = json.loads(sys.stdin.buffer.read())
    return supervise(lambda: work(asked), float(asked["limit"]), float(asked["grace"]), int(asked["runner"]))


def work(asked: dict[str, Any]) -> int:
    """The stage's own process."""
    signal.signal(signal.SIGTERM, _terminated)
    say = _Lines(os.dup(1))
    # What a stage's libraries may print must not break the lines.
    os.dup2(2, 1)
    if not asked["network"]:
        try:
            leave_network()
        except PolicyError as error:
            say({"refused": {"code": error.code, "message": error.message}})
            return 0
    result = run_stage(asked["stage"], asked["request"], "local", lambda event: say({"event": asdict(event)}))
    say({"result": result})
    return 0


class _Lines:
    """JSON lines, whole ones, from any thread."""

    def __init__(self, fd: int) -> None:
        self._file, self._lock = open(fd, "wb"), threading.Lock()

    def __call__(self, value: dict[str, Any]) -> None:
        # Whoever read them was killed: the supervisor ends this process, and there is nobody to complain to.
        with self._lock, suppress(BrokenPipeError):
            self._file.write(json.dumps(value).encode() + b"\n")
            self._file.flush()


def event_of(value: dict[str, Any]) -> Event:
    """The event in a line."""
    return Event(**value)


def _terminated(_number: int, _frame: object) -> NoReturn:
    # As an exception, so that sandboxes are taken down and what is half written goes.
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
