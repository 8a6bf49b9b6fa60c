"""Which files of the host are the NVIDIA driver's user-mode part.

The list is the driver's own: every library that carries the running driver's version in its name (apptainer #4989: a
fixed list differs from what a driver needs). Never one from a compat folder (nvidia-docker #1515: error 804).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from chroot_exec import elf
from chroot_exec.errors import RunnerError
from chroot_exec.host import PROGRAM_FOLDERS, Host

TOOLS = (
    "nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server",
)  # fmt: skip
_FOLDERS = (
    "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64", "/usr/lib", "/lib/x86_64-linux-gnu", "/lib64",
)  # fmt: skip
_VERSION = re.compile(r"\b(\d{3,4}\.\d+(?:\.\d+)?)\b")
_CACHE_LINE = re.compile(r"\s*(\S+) \(.*\) => (/.+)")


@dataclass(frozen=True)
class DriverFiles:
    """Host paths of the driver's libraries, tools, and other files that keep their place."""

    libraries: tuple[str, ...]
    tools: tuple[str, ...]
    others: tuple[str, ...] = ()


def driver_version(host: Host) -> str:
    """The running kernel module's version, e.g. ``580.95.05``; empty when none is loaded."""
    first = host.read("/proc/driver/nvidia/version").split("\n")[0]
    for text in (first, host.read("/sys/module/nvidia/version")):
        match = _VERSION.search(text)
        if match:
            return match.group(1)
    return ""


def parse_version(text: str) -> tuple[int, ...]:
    """A version that compares as numbers."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def use_compat(driver: str, compat: str) -> bool:
    """Whether an image's forward-compatibility libcuda of version ``compat`` is for a host with ``driver``.

    Only on an older driver: on an equal or newer one it fails with error 803 (labs-molt #44).
    """
    return bool(driver and compat) and parse_version(driver) < parse_version(compat)


def cache_entries(lines: Iterable[str]) -> list[tuple[str, str]]:
    """(soname, path) of each line of ``ldconfig -p``, in order."""
    return [m.groups() for m in map(_CACHE_LINE.match, lines) if m]  # type: ignore[misc]


def in_compat(path: str) -> bool:
    """Whether a path lies in a forward-compatibility folder."""
    return "compat" in path.split("/")[:-1]


def scan(host: Host, version: str) -> DriverFiles:
    """Find the driver's files by the loader's cache and the usual folders.

    Args:
        version: the running driver's; empty takes the version that the host's libcuda has.

    Raises:
        RunnerError: ``gpu.libraries``.
    """
    cached = [_real(host, path) for _, path in cache_entries(host.ask("ldconfig", "-p")) if not in_compat(path)]
    folders = list(dict.fromkeys([*(os.path.dirname(p) for p in cached), *_FOLDERS]))
    version = version or _version_of_libcuda(host, cached, folders)
    suffix = f".so.{version}"
    home = next((f for f in folders if not in_compat(f + "/") and host.exists(f"{f}/libcuda{suffix}")), "")
    if not version or not home:
        raise RunnerError(
            "gpu.libraries", f"no libcuda.so.{version or '*'} in the loader's cache or in {', '.join(_FOLDERS)}"
        )
    found = [f"{home}/{name}" for name in host.names(home) if name.endswith(suffix)]
    found += [path for path in cached if path.endswith(suffix) and not in_compat(path)]
    return DriverFiles(_libraries(host, found), _tools(host, home))


def ask_container_cli(host: Host, version: str) -> DriverFiles | None:
    """The driver's files by ``nvidia-container-cli list``; None when it is absent or names no libcuda."""
    lines = [line.strip() for line in host.ask("nvidia-container-cli", "list")]
    paths = [line for line in lines if line.startswith("/") and not line.startswith("/dev/") and not in_compat(line)]
    named = [p for p in paths if ".so" in os.path.basename(p)]
    libraries = _libraries(host, [_real(host, p) for p in named])
    if not any(os.path.basename(p).startswith("libcuda.so") for p in libraries):
        return None
    tools = tuple(p for p in paths if os.path.basename(p) in TOOLS and host.exists(p))
    others = tuple(p for p in paths if p not in named and p not in tools and host.exists(p))
    # Its list is a fixed one of its own: what else carries the driver's version goes with it.
    home = os.path.dirname(next(p for p in libraries if os.path.basename(p).startswith("libcuda.so")))
    more = [f"{home}/{n}" for n in host.names(home) if version and n.endswith(f".so.{version}")]
    return DriverFiles(_libraries(host, [*libraries, *more]), tools, others)


def _real(host: Host, path: str) -> str:
    return host.inner(os.path.realpath(host.path(path)))


def _version_of_libcuda(host: Host, cached: list[str], folders: list[str]) -> str:
    names = [os.path.basename(p) for p in cached]
    names += [name for folder in folders if not in_compat(folder + "/") for name in host.names(folder)]
    versions = [n.removeprefix("libcuda.so.") for n in names if n.startswith("libcuda.so.") and n.count(".") > 2]
    return versions[0] if versions else ""


def _libraries(host: Host, paths: Iterable[str]) -> tuple[str, ...]:
    """One path a name, the first; only this machine's kind."""
    machine = os.uname().machine
    by_name: dict[str, str] = {}
    for path in paths:
        if elf.is_library(host.path(path), machine):
            by_name.setdefault(os.path.basename(path), path)
    return tuple(by_name[name] for name in sorted(by_name))


def _tools(host: Host, home: str) -> tuple[str, ...]:
    """The driver's programs, rather those beside its libraries; a script of that name is some wrapper of the host."""
    folders = (os.path.join(os.path.dirname(home), "bin"), *PROGRAM_FOLDERS)
    found = ((f"{folder}/{name}" for folder in folders if elf.is_elf(host.path(f"{folder}/{name}"))) for name in TOOLS)
    return tuple(path for path in (next(paths, "") for paths in found) if path)
