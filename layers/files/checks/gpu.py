"""Which GPUs the driver gives, asked of libcuda itself: no package is needed for it."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_MAJOR, _MINOR, _MULTIPROCESSORS = 75, 76, 16
_NAMES = {3: "not initialised", 100: "no device", 802: "the NVLink fabric is not ready", 803: "driver mismatch"}


class NoGpu(Exception):
    """The driver gives no GPU; the text says why."""


def gpu_facts(library: str | None = None) -> dict[str, Any]:
    """Driver version and, of each GPU, name, UUID, capability and memory in bytes.

    Args:
        library: another libcuda; ``NRL_CHECK_LIBCUDA`` sets it too, for tests without a GPU.

    Raises:
        NoGpu: no library, or the driver does not come up, or it gives no device.
    """
    name = library or os.environ.get("NRL_CHECK_LIBCUDA") or "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(name)
    except OSError as error:
        raise NoGpu(f"the driver library cannot be loaded: {error}") from None
    _call(cuda, "cuInit", ctypes.c_uint(0))
    count, version = ctypes.c_int(), ctypes.c_int()
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    _call(cuda, "cuDriverGetVersion", ctypes.byref(version))
    if count.value < 1:
        raise NoGpu("the driver gives zero devices")
    gpus = [_device(cuda, index) for index in range(count.value)]
    return {"driver": {"cuda": version.value, "kernel": _kernel_driver()}, "gpus": gpus}


def _call(cuda: ctypes.CDLL, name: str, *arguments: Any) -> None:
    try:
        status = getattr(cuda, name)(*arguments)
    except AttributeError:
        raise NoGpu(f"the driver library has no {name}") from None
    if status:
        raise NoGpu(f"{name} gave {status} ({_NAMES.get(status, 'see cuda.h')})")


def _device(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    text, uuid = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), index)
    _call(cuda, "cuDeviceGetName", text, 256, device)
    _call(cuda, "cuDeviceGetUuid", ctypes.byref(uuid), device)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    numbers = []
    for attribute in (_MAJOR, _MINOR, _MULTIPROCESSORS):
        value = ctypes.c_int()
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        numbers.append(value.value)
    return {
        "name": text.value.decode("utf-8", "replace"), "uuid": uuid_text(bytes(uuid)),
        "capability": f"{numbers[0]}.{numbers[1]}", "multiprocessors": numbers[2], "memory": memory.value,
    }  # fmt: skip


def uuid_text(raw: bytes) -> str:
    """As nvidia-smi writes it."""
    parts = (raw[0:4], raw[4:6], raw[6:8], raw[8:10], raw[10:16])
    return "GPU-" + "-".join(part.hex() for part in parts)


def _kernel_driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return ""
