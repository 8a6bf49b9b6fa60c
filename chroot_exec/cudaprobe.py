"""Asks the CUDA driver itself, inside the sandbox, whether it is up and which GPUs it gives.

nvidia-smi can list a GPU that CUDA cannot use yet (error 802: the NVLink fabric is not ready). This runs in a process
of its own with the payload's rights; the driver library is the host's, and so are the C libraries already loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

_NOT_READY = 802
_RETRY_SECONDS = 2.0
_MAJOR, _MINOR = 75, 76
_PRELOAD = ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1")

# What each error of cuInit means here (cuda.h), and what to look at.
MEANINGS = {
    3: ("gpu.init", "CUDA could not be initialised: look at the nodes /dev/nvidiactl and /dev/nvidia-uvm"),
    100: ("gpu.none", "CUDA sees no device; CUDA_VISIBLE_DEVICES may hide them"),
    101: ("gpu.none", "CUDA refuses the device"),
    304: ("gpu.proc", "an operating system call failed: the driver reads and writes /proc; is it mounted and whole?"),
    802: ("gpu.not_ready", "fabric not ready: the NVLink fabric has not come up (fabric manager)"),
    803: ("gpu.mismatch", "the driver library does not match the kernel module: a compat or stray libcuda was loaded"),
    804: ("gpu.mismatch", "the compat libcuda is not for this GPU"),
    999: ("gpu.init", "unknown error: a device node may have the wrong number"),
}  # fmt: skip


def preload() -> None:
    """Load the libraries that a driver library needs, while the host's are in reach."""
    for name in _PRELOAD:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue


def wait_ready(
    library: str, env: Mapping[str, str], timeout: float, drop: Callable[[], None]
) -> tuple[dict[str, Any], str, str]:
    """Probe until CUDA is up or ``timeout`` seconds have passed.

    Returns:
        What was found, and an error's code and message, both empty when CUDA is up and gives a device.
    """
    deadline = time.monotonic() + timeout
    found: dict[str, Any] = {}
    while True:
        left = max(1.0, deadline - time.monotonic())
        # What CUDA has said stays said when the time that is left is too short for another answer.
        found = _in_child(library, env, left, drop) or found
        found = found or {"error": f"CUDA did not answer within {left:.0f} seconds"}
        code, message = judge(found)
        if found.get("cuInit") != _NOT_READY or time.monotonic() + _RETRY_SECONDS > deadline:
            return found, code, message
        time.sleep(_RETRY_SECONDS)


def judge(found: Mapping[str, Any]) -> tuple[str, str]:
    """The error of a probe's answer, or two empty texts."""
    if "error" in found:
        return "gpu.probe", str(found["error"])
    status = int(found["cuInit"])
    if status:
        code, meaning = MEANINGS.get(status, ("gpu.init", "see cuda.h"))
        return code, f"cuInit gave {status}: {meaning}"
    if not found.get("devices"):
        return MEANINGS[100]
    return "", ""


def _in_child(library: str, env: Mapping[str, str], timeout: float, drop: Callable[[], None]) -> dict[str, Any]:
    """A probe's answer; empty when there was none in time."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            drop()
            os.environ.update(env)
            os.write(writer, json.dumps(probe(library)).encode())
        except BaseException as error:
            os.write(writer, json.dumps({"error": repr(error)}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        if not select.select([reader], [], [], timeout)[0]:
            return {}
        with open(os.dup(reader), "rb") as file:
            data = file.read()
        return dict(json.loads(data)) if data else {"error": "the probe died: the driver library crashed"}
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def probe(library: str) -> dict[str, Any]:
    """cuInit's answer and the devices, by the driver's own interface."""
    cuda = ctypes.CDLL(library)
    status = int(cuda.cuInit(0))
    if status:
        return {"cuInit": status, "devices": []}
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    status = int(cuda.cuDeviceGetCount(ctypes.byref(count)))
    return {
        "cuInit": status,
        "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "devices": [_device(cuda, i) for i in range(count.value)],
    }


def _device(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    handle, name, raw = ctypes.c_int(), ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    bus, memory = ctypes.create_string_buffer(64), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(handle), index)
    cuda.cuDeviceGetName(name, 255, handle)
    cuda.cuDeviceGetUuid(ctypes.byref(raw), handle)
    cuda.cuDeviceGetPCIBusId(bus, 63, handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    text = bytes(raw).hex()
    return {
        "name": name.value.decode("utf-8", "replace"),
        "uuid": f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}",
        "bus": bus.value.decode("ascii", "replace"),
        "memory": memory.value,
        "capability": f"{_attribute(cuda, handle, _MAJOR)}.{_attribute(cuda, handle, _MINOR)}",
    }


def _attribute(cuda: ctypes.CDLL, handle: ctypes.c_int, which: int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), which, handle)
    return value.value
