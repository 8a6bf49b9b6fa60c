"""Run programs in an unpacked image through ``chroot_exec``: the ``exec`` verb, and the gates of ``verify --exec``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import chroot_exec
from chroot_exec.errors import RequestError
from chroot_exec.interruption import ENDING
from chroot_exec.protocol import SCHEMA, Bind, Check, Gpu, parse_checks, parse_request
from chroot_exec.resolve import Root
from oci_builder.model.errors import CheckFailed, OciBuilderError, PolicyError, SpecError, TransportError
from oci_builder.model.jsontext import dump_json
from oci_builder.model.specvalues import read_input

# Settings of a machine's owner that protect its hardware: a program with an environment of its own must keep them.
SITE_VARIABLES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
# Names that a receipt gives to the gates themselves.
GATES = ("container-archive", "container-assembly", "container-exec")
_LARGEST_CHECKS = 1 << 20
_MOST_CHECKS = 1000
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class ExecOptions:
    """How programs run; the fields are those of ``chroot_exec.protocol.Request``."""

    isolation: str = "auto"
    network: str = "none"
    write: str = "overlay"
    read_only: bool = False
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    binds: tuple[Bind, ...] = ()
    tmpfs: tuple[str, ...] = ()
    rlimits: Mapping[str, int] = field(default_factory=dict)
    shm_size: int = 0
    tmp_size: int = 0
    gpu: Gpu | None = None
    state: str = ""
    output_limit: int = 65536


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a program ended.

    Attributes:
        status: its exit status; 128 + N for signal N, 126 or 127 when it could not be started.
        signal: the signal's name, or empty.
        message: why it could not be started, or empty.
        receipt: the runner's.
    """

    status: int
    signal: str
    message: str
    receipt: Mapping[str, Any]


def gpu_selection(devices: str = "", environ: Mapping[str, str] = os.environ) -> tuple[Gpu, dict[str, str]]:
    """The GPUs for a run, and variables that go with them.

    Args:
        devices: ``all``, or indices and UUIDs with commas; empty takes the caller's CUDA_VISIBLE_DEVICES, else all.

    The chosen GPUs are the only ones that the sandbox has, so CUDA numbers them from 0 there. An empty
    CUDA_VISIBLE_DEVICES means none, which the runner refuses (``gpu.none``).
    """
    chosen = devices or environ.get("CUDA_VISIBLE_DEVICES", "all")
    site = {name: environ[name] for name in SITE_VARIABLES if name in environ}
    return Gpu(devices=tuple(part.strip() for part in chosen.split(","))), site


def run_in(root: Path, config: Mapping[str, Any], argv: Sequence[str], options: ExecOptions) -> ExitStatus:
    """Run one program with this process's standard streams and wait for it; signals are passed on.

    Args:
        root: an unpacked image.
        config: the image config's ``config`` object; may be empty.
        argv: what to run after the entrypoint; empty runs the image's Cmd.

    Raises:
        OciBuilderError: the runner, not the program, failed (``runner_error``).
    """
    receipt = _run(root, config, options, {"exec": list(argv)}, inherit=True)
    if receipt["error"]:
        raise runner_error(receipt["error"])
    ended = receipt["exec"]
    return ExitStatus(int(ended["exit"]), str(ended["signal"]), str(ended["message"]), receipt)


def run_checks(
    root: Path, config: Mapping[str, Any], checks: Sequence[Check], options: ExecOptions
) -> Mapping[str, Any]:
    """Run checks, each in a sandbox of its own, and return the runner's receipt.

    A failed check is in the receipt, as is a runner that failed (``outcome`` ``error``). A signal that ends this
    process (INT, TERM, HUP, QUIT) ends the checks first, and is then handled as it would have been without them: it
    is no verdict on the check that ran.

    Raises:
        OciBuilderError: ``request.field`` (what the runner would refuse), ``sandbox.died``.
        KeyboardInterrupt: a signal came whose handler returned.
    """
    return _run(root, config, options, {"checks": [asdict(c) for c in checks]}, inherit=False)


def load_checks(path: Path) -> tuple[Check, ...]:
    """The checks of a file (``chroot_exec.protocol.Check`` is the schema).

    Raises:
        SpecError: ``spec.path`` (also for a pipe or device, which is not waited for), ``spec.checks``.
    """
    return _parse_checks(read_input(path, "list of checks"), str(path))


def image_checks(root: Path, prefix: str) -> tuple[Check, ...]:
    """The checks that an image carries, in ``<prefix>/checks.json``; read inside the root, whatever links say.

    Raises:
        SpecError: ``spec.checks``, also when the image has none.
    """
    place = f"{prefix}/checks.json"
    opened = Root(str(root))
    try:
        data = opened.read(place, _LARGEST_CHECKS)
    finally:
        opened.close()
    if data is None:
        raise SpecError("spec.checks", f"the image has no {place}; name a file with checks", where=place)
    return _parse_checks(data, place)


def _parse_checks(data: bytes, where: str) -> tuple[Check, ...]:
    try:
        checks = parse_checks(data)
    except RequestError as error:
        raise SpecError("spec.checks", f"{where}: {error.message}", where=where) from None
    require_receivable(checks, where)
    return checks


def require_receivable(checks: Sequence[Check], where: str) -> None:
    """Refuse, before anything runs, checks whose outcomes no receipt could hold.

    Raises:
        SpecError: ``spec.checks``: more than 1000, the name of a gate, text that is no UTF-8.
    """
    if len(checks) > _MOST_CHECKS:
        raise SpecError("spec.checks", f"{where}: {len(checks)} checks; a receipt holds {_MOST_CHECKS}", where=where)
    for check in checks:
        if check.name in GATES:
            raise SpecError("spec.checks", f"{where}: {check.name} is a gate's name; rename the check", where=where)
        try:
            dump_json(asdict(check))
        except ValueError as error:
            why = f"{where}: {check.name} holds what no receipt can: {error}"
            raise SpecError("spec.checks", why, where=where) from None


def runner_error(error: Mapping[str, str]) -> OciBuilderError:
    """A runner's error as ours: by its code's first word, with the code kept."""
    kind, code = error["code"].partition(".")[0], error["code"]
    by_kind: dict[str, type[OciBuilderError]] = {
        "request": SpecError, "user": SpecError, "gpu": CheckFailed, "check": CheckFailed, "exec": PolicyError,
    }  # fmt: skip
    cls = SpecError if code == "exec.empty" else by_kind.get(kind, TransportError)
    return cls(code, error["message"])


# ``-m`` would look for modules in the caller's folder first, which may be an unpacked image: what lies there must not
# run with the caller's rights. Isolated, without site-packages, which may hold another version of it (-S), and our
# folder behind the standard library.
_RUNNER = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("chroot_exec", run_name="__main__", alter_sys=True)
"""


def _request(root: Path, config: Mapping[str, Any], options: ExecOptions, what: Mapping[str, Any]) -> bytes:
    given = asdict(options)
    if given["gpu"] is not None:
        given["gpu"] = {**given["gpu"], "devices": list(given["gpu"]["devices"])}
    request = {"schema": SCHEMA, "root": str(root.resolve()), "config": dict(config), **given, **what}
    # Bytes of a command line that are no UTF-8 are half surrogate pairs here, which only escapes can carry.
    data = json.dumps(request).encode()
    try:
        parse_request(data)
    except RequestError as error:
        raise SpecError(error.code, error.message) from None
    return data


def _run(
    root: Path, config: Mapping[str, Any], options: ExecOptions, what: Mapping[str, Any], inherit: bool
) -> dict[str, Any]:
    package = Path(chroot_exec.__file__).resolve().parent.parent
    # In memory: whatever dies, nothing is left, and the variables of a request are in nobody's reach.
    with _memory(_request(root, config, options, what)) as request, _memory() as output:
        command = [sys.executable, "-IS", "-c", _RUNNER, str(package), f"fd:{request}", "--output", f"fd:{output}"]
        command += ["--parent", str(os.getpid())]
        streams: dict[str, Any] = {"stderr": subprocess.PIPE} if not inherit else {}
        process = subprocess.Popen(
            command, stdin=None if inherit else subprocess.DEVNULL, stdout=None if inherit else subprocess.DEVNULL,
            pass_fds=(request, output), **streams,
        )  # fmt: skip
        with _forwarding(process, terminal=inherit) as came:
            _, errors = process.communicate()
        if came and not inherit:
            _interrupt(came[0])
        if size := os.fstat(output).st_size:
            value: dict[str, Any] = json.loads(os.pread(output, size, 0))
            return value
    text = (errors or b"").decode("utf-8", "replace").strip()[-2000:]
    if process.returncode == 2:
        raise SpecError("spec.checks", text or "the runner refused the request")
    raise TransportError("sandbox.died", f"the runner ended with {process.returncode} and no receipt: {text}")


@contextmanager
def _memory(data: bytes = b"") -> Iterator[int]:
    """A descriptor of a file in memory that holds ``data``, at its begin."""
    fd = os.memfd_create("oci-builder-exec", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _interrupt(number: int) -> NoReturn:
    signal.raise_signal(number)
    raise KeyboardInterrupt


@contextmanager
def _forwarding(process: subprocess.Popen[bytes], terminal: bool) -> Iterator[list[int]]:
    """While inside, signals go to the runner; gives those that mean an end.

    Args:
        terminal: the runner's program has this process's terminal, and gets the keyboard's signals from there. Without
            one, signals that this process was told to ignore (as by nohup) stay ignored.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def forward(number: int, _frame: object) -> None:
        if number in ENDING:
            came.append(number)
        # From the keyboard it has reached the runner, which shares the terminal, by itself.
        if number != signal.SIGINT or not terminal or not os.isatty(0):
            process.send_signal(number)

    wanted = [n for n in _FORWARDED if terminal or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in wanted}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
