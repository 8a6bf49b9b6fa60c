"""Conditions that every check proves for itself: network blocked, caches empty at the start, which GPUs."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

from .common import Result, scratch_folder
from .gpu import NoGpu, gpu_facts

# Addresses that are reserved for documentation: nothing answers there, so only the way to them is asked about.
_FAR = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPERM, errno.EACCES)
_NAME = "example.com"

# Variable -> folder below the cache root. Compilers, hubs and engines write there and nowhere else.
CACHES = {
    "XDG_CACHE_HOME": "xdg", "XDG_CONFIG_HOME": "config", "HF_HOME": "hf", "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "triton-home", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TORCH_EXTENSIONS_DIR": "extensions",
    "VLLM_CACHE_ROOT": "vllm", "VLLM_CONFIG_ROOT": "vllm-config", "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "DG_JIT_CACHE_DIR": "deep-gemm", "TILELANG_CACHE_DIR": "tilelang", "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba", "MPLCONFIGDIR": "mpl",
}  # fmt: skip
# A cluster's variables, which name interfaces, addresses and rendezvous that are not here while the network is blocked.
STRAYS = ("NCCL_SOCKET_IFNAME", "NCCL_COMM_ID", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "VLLM_HOST_IP",
          "RAY_ADDRESS", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")  # fmt: skip
# Variables that win over those above: one that is inherited would lead elsewhere, so it is looked at and dropped.
OVERRIDES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE",
             "TRANSFORMERS_CACHE", "TORCH_HOME", "VLLM_ASSETS_CACHE", "VLLM_XLA_CACHE_PATH", "FLASHINFER_CUBIN_DIR",
             "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "CUTE_DSL_CACHE_DIR")  # fmt: skip
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "FLASHINFER_NO_DOWNLOAD": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0", "WANDB_MODE": "offline",
}  # fmt: skip


def network(result: Result) -> None:
    """Nothing but loopback is up, no packet has a way out, and no name resolves.

    Drops the variables of ``STRAYS`` from this process's environment.
    """
    result.details["dropped"] = sorted(name for name in STRAYS if os.environ.pop(name, None) is not None)
    found: dict[str, Any] = {"interfaces": interfaces_up()}
    result.expect(found["interfaces"] == ["lo"], f"interfaces besides loopback are up: {found['interfaces']}")
    for family, address in _FAR:
        found[address] = reach(family, address)
        result.expect(found[address] in _NO_WAY, f"the network is not blocked: {address} gave {_word(found[address])}")
        found[address] = _word(found[address])
    resolved = resolves(_NAME)
    result.expect(not resolved, f"the network is not blocked: {_NAME} resolves")
    result.details["network"] = {**found, _NAME: "resolves" if resolved else "does not resolve"}


def interfaces_up() -> list[str]:
    """Interfaces that are up and have a way to carry packets."""
    flags = {}
    for _, name in socket.if_nameindex():
        try:
            flags[name] = int(Path(f"/sys/class/net/{name}/flags").read_text(), 16)
        except (OSError, ValueError):
            flags[name] = 1
    return sorted(name for name, value in flags.items() if value & 1)


def reach(family: int, address: str) -> int:
    """The error number of a connection attempt; 0 when it was made."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(2)
            return sock.connect_ex((address, 80))
    except OSError as error:
        return error.errno or -1


def resolves(name: str) -> bool:
    """Whether a name has an address here."""
    try:
        return bool(socket.getaddrinfo(name, 80))
    except OSError:
        return False


def _word(number: int) -> str:
    return errno.errorcode.get(number, str(number)) if number else "a connection"


def caches(result: Result) -> None:
    """What this process inherited as caches holds no file; then it gets folders of its own, empty ones.

    Sets the variables of ``CACHES`` and ``OFFLINE``, and HOME, in this process's environment.
    """
    inherited = {name: os.environ[name] for name in (*CACHES, *OVERRIDES) if os.environ.get(name)}
    home = os.environ.get("HOME", "")
    places = [*inherited.values(), *(f"{home}/{n}" for n in (".cache", ".triton", ".nv", ".deep_gemm") if home)]
    full = sorted({place for place in places if first_file(Path(place))})
    result.expect(not full, f"caches were not empty at the start: {', '.join(full)}")
    for name in OVERRIDES:
        os.environ.pop(name, None)
    root = Path(scratch_folder("nrl-check-"))
    os.environ.update({name: str(root / folder) for name, folder in CACHES.items()})
    os.environ.update(OFFLINE, HOME=str(root / "home"))
    for folder in (*CACHES.values(), "home"):
        (root / folder).mkdir()
    result.details["caches"] = {"looked": sorted(set(places)), "root": str(root), "empty": not full}


def first_file(folder: Path) -> str:
    """Some file below a folder, or what cannot be looked into, or nothing; empty folders do not count."""
    if os.path.isfile(folder):
        return str(folder)
    closed: list[OSError] = []
    for place, _, files in os.walk(folder, onerror=closed.append):
        if files:
            return f"{place}/{files[0]}"
    return next((str(e.filename) for e in closed if e.errno not in (errno.ENOENT, errno.ENOTDIR)), "")


def cache_files(name: str) -> list[str]:
    """Files that a cache holds by now, relative."""
    root = Path(os.environ[name])
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def gpus(result: Result, wanted: int = 1, exact: bool = False) -> int:
    """Which GPUs the driver gives; fewer than wanted (and none at all) is a failure. Returns their number."""
    try:
        facts = gpu_facts()
    except NoGpu as error:
        result.add([f"no GPU: {error}"])
        result.details["gpus"] = []
        return 0
    result.details["driver"] = facts["driver"]
    result.details["gpus"] = facts["gpus"]
    count = len(facts["gpus"])
    result.expect(count > 0, "zero GPUs")
    result.expect(count == wanted if exact else count >= wanted, f"{count} GPUs, {wanted} wanted")
    uuids = {gpu["uuid"] for gpu in facts["gpus"]}
    result.expect(len(uuids) == count, "two devices have one UUID")
    return count


def all_conditions(result: Result, wanted: int = 1) -> int:
    """Network, caches and GPUs; the number of GPUs. Where one does not hold, a check proves nothing and should end."""
    network(result)
    caches(result)
    return gpus(result, wanted)
