"""``python3 -m chroot_exec``: see the package's documentation."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from chroot_exec import runner, syscalls, teardown
from chroot_exec.errors import RequestError, RunnerError
from chroot_exec.protocol import parse_request

_LARGEST_REQUEST = 16 << 20
_DESCRIPTOR = "fd:"


def _read(path: str) -> bytes:
    try:
        if path == "-":
            data = sys.stdin.buffer.read(_LARGEST_REQUEST + 1)
        elif path.startswith(_DESCRIPTOR):
            with open(int(path[len(_DESCRIPTOR) :]), "rb") as file:
                data = file.read(_LARGEST_REQUEST + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(_LARGEST_REQUEST + 1)
    except OSError as error:
        raise RequestError("request.read", f"cannot read {path!r}: {error.strerror}") from None
    if len(data) > _LARGEST_REQUEST:
        raise RequestError("request.json", f"a request has at most {_LARGEST_REQUEST} bytes")
    return data


def _write(path: str, value: object) -> None:
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    if not path:
        sys.stdout.write(text)
        return
    if path.startswith(_DESCRIPTOR):
        with open(int(path[len(_DESCRIPTOR) :]), "wb", closefd=False) as out:
            out.write(text.encode())
        return
    if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
        # A pipe, a device, /dev/stdout: written to. Replacing it by name would break the machine.
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)
        return
    partial = f"{path}.{os.getpid()}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _sweep(state: str) -> int:
    folder = teardown.state_folder(state, make=False)
    removed = teardown.sweep(folder) if folder else []
    if folder:
        teardown.leave(folder)
    _write("", {"removed": removed})
    return 0


def _keep_from_programs(*places: str) -> None:
    """No program that is started may inherit a descriptor that was passed to this one."""
    for place in places:
        if place.startswith(_DESCRIPTOR):
            try:
                os.set_inheritable(int(place[len(_DESCRIPTOR) :]), False)
            except (ValueError, OSError) as error:
                raise RequestError("request.read", f"{place!r} is no open descriptor: {error}") from None


def _follow(parent: int) -> None:
    """Die with the caller: nobody would wait for the program, or end it."""
    if parent:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(125)


def _complain(value: Mapping[str, Any]) -> None:
    """Say why nothing ran, as a shell does; the program's own failures are its own to tell."""
    error = value["error"] or {"code": "exec.start", "message": (value["exec"] or {}).get("message", "")}
    if error["message"]:
        sys.stderr.write(f"chroot_exec: [{error['code']}] {error['message']}\n")


def _run(path: str, output: str) -> int:
    request = parse_request(_read(path))
    value = runner.run(request)
    # The program's own output is on standard output with exec: a receipt would be mixed into it.
    if output or request.exec is None:
        _write(output, value)
    else:
        _complain(value)
    return runner.exit_status(request, value)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="chroot_exec", description="Run checks in an unpacked image.")
    parser.add_argument("request", help="request JSON, - for standard input, fd:N, or the word sweep")
    parser.add_argument("state", nargs="?", default="", help="with sweep: the state folder")
    parser.add_argument("--output", default="", help="file or fd:N for the receipt (default: standard output)")
    parser.add_argument("--parent", type=int, default=0, help="process number of the caller: end when it ends")
    options = parser.parse_args(argv)
    try:
        _keep_from_programs(options.request, options.output)
        _follow(options.parent)
        if options.request == "sweep":
            return _sweep(options.state)
        return _run(options.request, options.output)
    except RequestError as error:
        sys.stderr.write(f"chroot_exec: {error}\n")
        return 2
    except RunnerError as error:
        sys.stderr.write(f"chroot_exec: {error}\n")
        return 125
    except OSError as error:
        sys.stderr.write(f"chroot_exec: [io.error] {error}\n")
        return 125


if __name__ == "__main__":
    sys.exit(main())
