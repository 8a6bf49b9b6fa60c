"""What this machine has and can enforce: GPUs, disk, a network namespace. It refuses before anything starts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chroot_exec
from chroot_exec import namespaces, syscalls
from oci_builder.engines.needs import Needs
from oci_builder.model.errors import PolicyError, TransportError, disk_error
from oci_builder.model.events import Emit, Event

_PROBE = "import json; from chroot_exec.cudaprobe import probe; print(json.dumps(probe('libcuda.so.1')))"
_GIB = 1 << 30


def find_gpus(library_path: Mapping[str, str] | None = None) -> tuple[dict[str, Any], ...]:
    """The GPUs that the CUDA driver gives (name, uuid, capability, memory). Asked in a process of its own: a driver
    that crashes takes only that with it, and none of its state stays here.

    Args:
        library_path: environment for the probe, in place of this process's.
    """
    package = str(Path(chroot_exec.__file__).resolve().parent.parent)
    env = {**(os.environ if library_path is None else library_path), "PYTHONPATH": package}
    try:
        argv = [sys.executable, "-P", "-c", _PROBE]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ()
    devices = found.get("devices") if isinstance(found, dict) else None
    return tuple(devices or ())


# The next step of people here; an engine elsewhere takes it off.
ELSEWHERE = ": run it on a GPU node, or --on modal"


def require_gpus(needs: Needs, gpus: tuple[dict[str, Any], ...], any_gpu: bool, emit: Emit) -> None:
    """Enough GPUs of the right kind.

    Args:
        any_gpu: another kind is taken with a warning; its receipt is supporting evidence and meets no gate.

    Raises:
        PolicyError: ``needs.gpu``.
    """
    if not needs.gpu:
        return
    uuids = {str(gpu.get("uuid")) for gpu in gpus}
    if len(uuids) < needs.gpu_count:
        raise PolicyError(
            "needs.gpu", f"the stage needs {needs.gpu_count} x {needs.gpu_name}, and the driver of this machine gives "
            f"{len(uuids)} GPUs{ELSEWHERE}", expected=needs.gpu, actual=len(uuids),
        )  # fmt: skip
    wanted = needs.gpu_name.rstrip("!+")
    others = sorted({str(gpu.get("name")) for gpu in gpus if wanted not in str(gpu.get("name")).upper()})
    if not others:
        return
    text = f"the stage needs {needs.gpu_name}, and this machine has {', '.join(others)}"
    if not any_gpu:
        raise PolicyError("needs.gpu", f"{text}; --any-gpu runs it for supporting evidence", expected=needs.gpu_name,
                          actual=", ".join(others))  # fmt: skip
    emit(Event("warning", "gpu", message=f"{text}: the receipt is supporting evidence and meets no B200 gate"))


def require_scratch(place: Path, gib: float) -> None:
    """Room on the disk.

    Raises:
        TransportError: ``io.space``, ``io.*``.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise disk_error(error, "looking for room") from None
    if free < gib * _GIB:
        raise TransportError(
            "io.space", f"{place} has {free / _GIB:.1f} GiB free, the stage needs {gib:g} GiB: free space, or say with "
            "--scratch what this spec really takes", where=str(place), expected=f">= {gib:g} GiB", actual=free,
        )  # fmt: skip


def warn_memory(needs: Needs, emit: Emit) -> None:
    """Less memory than a stage reserves elsewhere is a warning: what it reserves is not what it always takes."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    if total < needs.memory_mib:
        text = f"this machine has {total} MiB of memory, the stage asks for {needs.memory_mib}"
        emit(Event("warning", "memory", message=text))


def leave_network() -> None:
    """Put this process (one thread) into a network namespace of its own, with nothing but loopback in it.

    As an ordinary user a user namespace is made for it, in which this process keeps its own ids.

    Raises:
        PolicyError: ``needs.network``: neither is permitted here, or an interface besides loopback is left.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid == 0:
            syscalls.unshare(syscalls.CLONE_NEWNET)
        else:
            syscalls.unshare(syscalls.CLONE_NEWNET | syscalls.CLONE_NEWUSER)
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                Path("/proc/self", name).write_text(text)
        namespaces.raise_loopback()
        left = interfaces()
    except OSError as error:
        # What the kernel says of a namespace too many speaks of disks.
        full = error.errno == errno.ENOSPC
        said = "the limit on namespaces is reached (sysctl user.max_*_namespaces)" if full else str(error)
        raise PolicyError(
            "needs.network", f"the stage must run without network, and no network namespace can be made here: {said}; "
            "run it as root, or allow user namespaces",
        ) from None  # fmt: skip
    if left != ["lo"]:
        raise PolicyError("needs.network", f"interfaces besides loopback are left: {', '.join(left)}")


def interfaces() -> list[str]:
    """The network interfaces of this process's namespace, asked of the kernel through netlink's own file.

    /sys shows the namespace that it was mounted in; /proc/net follows the process.
    """
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sorted(line.partition(":")[0].strip() for line in lines)
