"""The request: what it may hold, checked strictly before anything happens.

A request is one JSON object. Unknown and repeated keys are errors, except inside ``config``, which is the ``config``
object of an OCI image config as it stands. The dataclasses below are the schema; their field names are the JSON keys.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from chroot_exec.errors import RequestError

SCHEMA = "chroot-exec/1"
RLIMITS = ("as", "core", "cpu", "data", "fsize", "memlock", "nofile", "nproc", "rss", "stack")
_LONGEST_PLACE = 200
_ENV_NAME = re.compile(r"[^=\0]+\Z")
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,99}\Z")


@dataclass(frozen=True)
class Bind:
    """A path of the host that shows in the sandbox at ``target``."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class Gpu:
    """Which NVIDIA GPUs are injected, and from where.

    Attributes:
        devices: ``("all",)``, or indices in PCI bus order and UUIDs, whole or as much of the begin as is unique.
        source: ``auto`` (CDI, else nvidia-container-cli, else a scan of the loader cache) or one of these.
        host: root of the host's file system; another one only in tests.
        compat: let the image's forward-compatibility libcuda be used when, and only when, the driver is older.
        probe_timeout: seconds that CUDA may take to come up before the GPUs count as not ready; 0 leaves it out.
    """

    devices: tuple[str, ...] = ("all",)
    source: str = "auto"
    host: str = "/"
    compat: bool = False
    probe_timeout: float = 60.0


@dataclass(frozen=True)
class Twin:
    """A folder of the image that shows a second time, read-only, at ``target``: does what is in it work from there?"""

    source: str
    target: str


@dataclass(frozen=True)
class Check:
    """One program and what it must do.

    Attributes:
        argv: the program and its arguments; the image's entrypoint takes no part.
        exit: expected exit status; 128 + N for an end by signal N.
        stdout, stderr: regular expressions; each must be found (``re.MULTILINE``) in what was kept of that stream.
        reject: regular expressions that must be found in neither.
        timeout: seconds of wall-clock time.
        shm: bytes that /dev/shm must have room for.
        gpus: how many GPUs must have been injected.
        twins: folders of the image that show at a second place, too; never one of the host.
        result: ``exit`` (status and patterns decide), or ``json``: besides, the last line of standard output is an
            object with ``outcome`` (pass, fail, deferred, skipped) and, unless it is pass, ``reason``.
        deferrable: a ``deferred`` outcome is kept as such; otherwise it is a failure, as ``skipped`` always is.
    """

    name: str
    argv: tuple[str, ...]
    exit: int = 0
    stdout: tuple[str, ...] = ()
    stderr: tuple[str, ...] = ()
    reject: tuple[str, ...] = ()
    timeout: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    shm: int = 0
    gpus: int = 0
    twins: tuple[Twin, ...] = ()
    result: str = "exit"
    deferrable: bool = False


@dataclass(frozen=True)
class Request:
    """Everything about a run. Sizes are bytes; 0 leaves a size to the kernel (half of the memory).

    Attributes:
        root: absolute path of the unpacked image.
        state: folder for the records of runs; by default one of the user's own below the temporary folder.
        isolation: ``root``, ``rootless``, or ``auto`` (root when the process may make namespaces, else rootless).
        write: ``overlay`` (writes go to memory and vanish; the root is read-only where the machine has no overlay for
            it) or ``direct`` (they go to ``root``).
        read_only: the root file system is read-only; /tmp, /run, /dev and the binds stay as they are.
        network: ``none`` (only loopback) or ``host``.
        tmpfs: folders that become empty and writable.
        exec: argv of one program that has this process's own standard streams; empty uses the image's Cmd.
        output_limit: bytes of each stream that a receipt keeps, half from its begin and half from its end.
    """

    schema: str
    root: str
    state: str = ""
    isolation: str = "auto"
    write: str = "overlay"
    read_only: bool = False
    network: str = "none"
    hostname: str = "sandbox"
    shm_size: int = 0
    tmp_size: int = 0
    binds: tuple[Bind, ...] = ()
    tmpfs: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    rlimits: Mapping[str, int] = field(default_factory=dict)
    gpu: Gpu | None = None
    output_limit: int = 65536
    checks: tuple[Check, ...] = ()
    exec: tuple[str, ...] | None = None
    entrypoint: tuple[str, ...] | None = None


T = TypeVar("T")


def parse_request(text: str | bytes) -> Request:
    """The request in a JSON text.

    Raises:
        RequestError: ``request.json`` (not JSON, a key stands twice), ``request.field`` (names the field).
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise RequestError("request.json", f"the request is not JSON: {error}") from None
    request = _build(Request, value, "request")
    _validate(request)
    return request


def parse_checks(text: str | bytes) -> tuple[Check, ...]:
    """The checks of a file: a JSON list of them, or an object whose only key is ``checks``.

    Raises:
        RequestError: ``request.json``, ``request.field``.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise RequestError("request.json", f"the checks are not JSON: {error}") from None
    if isinstance(value, dict):
        if set(value) != {"checks"}:
            raise _bad("checks", "a list, or an object with only the key checks", sorted(value))
        value = value["checks"]
    checks = _list_of(Check)(value, "checks")
    if not checks:
        raise _bad("checks", "at least one check", [])
    _validate_checks(checks)
    return checks


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return out


def _bad(where: str, wanted: str, got: object) -> RequestError:
    return RequestError("request.field", f"{where[:_LONGEST_PLACE]}: expected {wanted}, got {ascii(got)[:120]}")


def _member(where: str, key: str) -> str:
    # Somebody else's words, for a terminal.
    return f"{where}.{key}" if key.isascii() and key.isidentifier() else f"{where}.{key!a}"


def _build(cls: type[T], value: Any, where: str) -> T:
    if not isinstance(value, dict):
        raise _bad(where, "an object", value)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in value:
        if key not in known:
            raise _bad(_member(where, key), f"one of the keys {', '.join(known)}", key)
    for name, spec in known.items():
        if name not in value and spec.default is MISSING and spec.default_factory is MISSING:
            raise _bad(f"{where}.{name}", "a value", None)
    return cls(**{k: _READERS[str(known[k].type)](v, f"{where}.{k}") for k, v in value.items()})


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise _bad(where, "a string without NUL", value)
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise _bad(where, "a string of valid Unicode", value) from None
    return value


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _bad(where, "a list of strings", value)
    return tuple(_string(v, f"{where}[{i}]") for i, v in enumerate(value))


def _bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _bad(where, "true or false", value)
    return value


def _size(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise _bad(where, "an integer from 0", value)
    return value


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise _bad(where, "seconds from 0", value)
    return float(value)


def _env(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _bad(where, "an object of strings", value)
    for name in value:
        if not _ENV_NAME.match(name):
            raise _bad(where, "variable names without = and NUL", name)
    return {_string(k, f"{where} (a name)"): _string(v, f"{where}.{k!a}") for k, v in value.items()}


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(where, "an object", value)
    return value


def _sizes(value: Any, where: str) -> dict[str, int]:
    return {k: _size(v, _member(where, k)) for k, v in _object(value, where).items()}


def _list_of(cls: type[T]) -> Callable[[Any, str], tuple[T, ...]]:
    def read(value: Any, where: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise _bad(where, "a list", value)
        return tuple(_build(cls, v, f"{where}[{i}]") for i, v in enumerate(value))

    return read


def _optional(reader: Callable[[Any, str], T]) -> Callable[[Any, str], T | None]:
    return lambda value, where: None if value is None else reader(value, where)


# Keyed by the annotation's text: the dataclasses stay the only place that names a field.
_READERS: dict[str, Callable[[Any, str], Any]] = {
    "str": _string,
    "bool": _bool,
    "int": _size,
    "float": _seconds,
    "tuple[str, ...]": _strings,
    "tuple[str, ...] | None": _optional(_strings),
    "Mapping[str, str]": _env,
    "Mapping[str, int]": _sizes,
    "Mapping[str, Any]": _object,
    "Gpu | None": _optional(lambda value, where: _build(Gpu, value, where)),
    "tuple[Bind, ...]": _list_of(Bind),
    "tuple[Twin, ...]": _list_of(Twin),
    "tuple[Check, ...]": _list_of(Check),
}


def _one_of(where: str, value: str, *choices: str) -> None:
    if value not in choices:
        raise _bad(where, " or ".join(choices), value)


def _absolute(where: str, path: str) -> None:
    if not path.startswith("/"):
        raise _bad(where, "an absolute path", path)


def _own_place(where: str, path: str) -> None:
    """A place in the sandbox that a caller may cover: none of those that make it a sandbox."""
    _absolute(where, path)
    clean = os.path.normpath("/" + path.lstrip("/"))
    if clean in ("/", "/dev") or f"{clean}/".startswith(("/proc/", "/sys/")):
        wanted = "a place outside /proc and /sys, and neither / nor /dev: those are the sandbox's own"
        raise _bad(where, wanted, path)


def _validate(request: Request) -> None:
    _one_of("request.schema", request.schema, SCHEMA)
    _absolute("request.root", request.root)
    if request.state:
        _absolute("request.state", request.state)
    _one_of("request.isolation", request.isolation, "auto", "root", "rootless")
    _one_of("request.write", request.write, "overlay", "direct")
    _one_of("request.network", request.network, "none", "host")
    if not _HOSTNAME.match(request.hostname):
        raise _bad("request.hostname", "a host name", request.hostname)
    for name in request.rlimits:
        _one_of("request.rlimits", name, *RLIMITS)
    for i, bind in enumerate(request.binds):
        _absolute(f"request.binds[{i}].source", bind.source)
        _own_place(f"request.binds[{i}].target", bind.target)
    for i, path in enumerate(request.tmpfs):
        _own_place(f"request.tmpfs[{i}]", path)
    if request.workdir:
        _absolute("request.workdir", request.workdir)
    _validate_config(request.config)
    if request.gpu is not None:
        _one_of("request.gpu.source", request.gpu.source, "auto", "cdi", "cli", "scan")
        _absolute("request.gpu.host", request.gpu.host)
    if (request.exec is None) == (not request.checks):
        raise RequestError("request.field", "request: exactly one of checks (not empty) and exec is needed")
    _validate_checks(request.checks)


def _validate_config(config: Mapping[str, Any]) -> None:
    for key in ("Env", "Entrypoint", "Cmd"):
        if config.get(key) is not None:
            _strings(config[key], f"request.config.{key}")
    for key in ("User", "WorkingDir"):
        if config.get(key) is not None:
            _string(config[key], f"request.config.{key}")


def _validate_checks(checks: tuple[Check, ...]) -> None:
    names = [c.name for c in checks]
    for check in checks:
        where = f"checks[{check.name!a}]"
        _one_of(f"{where}.result", check.result, "exit", "json")
        if not _NAME.match(check.name) or names.count(check.name) > 1:
            raise _bad(where, "a name of its own, of the characters A-Z a-z 0-9 . _ : + -", check.name)
        if not check.argv:
            raise _bad(f"{where}.argv", "at least one word", [])
        for twin in check.twins:
            _absolute(f"{where}.twins", twin.source)
            _own_place(f"{where}.twins", twin.target)
        if check.workdir:
            _absolute(f"{where}.workdir", check.workdir)
        if check.timeout == 0:
            raise _bad(f"{where}.timeout", "more than 0 seconds", 0)
        for pattern in check.stdout + check.stderr + check.reject:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise _bad(where, f"regular expressions ({error})", pattern) from None
