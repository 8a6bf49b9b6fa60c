"""The checks that are shipped in ``checks/``: run without network, with caches of their own."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime_check.rows import Row, row

# Modules that are checked one by one -> the package they come from, which a build may leave out.
PACKAGES = {
    "deep_ep": "deep-ep", "deep_gemm": "deep-gemm", "vllm._C": "vllm", "vllm.cumem_allocator": "vllm",
    "mooncake": "mooncake-transfer-engine-cuda13",
}  # fmt: skip
# A user's own caches are no start from nothing.
_CACHES = (
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE",
    "TRANSFORMERS_CACHE", "TORCH_HOME", "VLLM_ASSETS_CACHE", "VLLM_XLA_CACHE_PATH", "FLASHINFER_CUBIN_DIR",
    "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "CUTE_DSL_CACHE_DIR", "WANDB_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
)  # fmt: skip
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def without_network() -> None:
    """In a child: an empty network of its own, loopback up. Leaves things as they are where that is not permitted."""
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _CLONE_NEWNET if uid == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    if libc.unshare(flags) != 0:
        return
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        ask = struct.pack("16sh22x", b"lo", 0)
        found = struct.unpack("16sh22x", fcntl.ioctl(sock, _SIOCGIFFLAGS, ask))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", found | _IFF_UP))


def left_out(check: Mapping[str, Any]) -> str:
    """Why the package of a check of one module is not in the tier that it looks at; empty when it is there."""
    argv = [str(word) for word in check.get("argv", [])]
    if "import" not in argv[:-1] or "--inventory" not in argv[:-1]:
        return ""
    package = PACKAGES.get(argv[argv.index("import") + 1], "")
    try:
        omitted = json.loads(Path(argv[argv.index("--inventory") + 1]).read_text())["omitted"]
        return f"{package} was left out of this build: {omitted[package]}" if package in omitted else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def activated(prefix: Path, folder: Path) -> dict[str, str]:
    """What activate.sh makes of this environment, with a home and caches of the checks' own: they start empty."""
    kept = {name: value for name, value in os.environ.items() if name not in _CACHES}
    own = {"HOME": str(folder / "home"), "NRL_CACHE_ROOT": str(folder / "caches")}
    (folder / "home").mkdir()
    code = '. "$0/activate.sh" >&2 && exec env -0'
    done = subprocess.run(["bash", "-c", code, str(prefix)], env={**kept, **own}, stdout=subprocess.PIPE, check=False)
    if done.returncode:  # a prefix without it, or one that it refuses: the checks say what follows from that
        return {**kept, **own, "PYTHONPATH": str(prefix / "source"), "PYTHONDONTWRITEBYTECODE": "1"}
    pairs = (entry.partition(b"=") for entry in done.stdout.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def shipped_rows(prefix: Path, tiers: Sequence[str], stages: Sequence[str], only: str, gpus: int = 0) -> list[Row]:
    """Run the lists of these stages with the runner beside this file.

    Args:
        gpus: ranks of the nccl stage: those that are visible, and at least so many. A gate wants eight by its own list.
    """
    python, checks = prefix / "envs" / tiers[0] / "bin/python", prefix / "checks"
    if not checks.is_dir():
        return [row("checks", False, f"{checks} is absent")]
    wanted: dict[str, Mapping[str, Any]] = {}
    for stage in stages:
        argv = [python, "-B", checks, "list", "--stage", stage, "--prefix", prefix, "--tiers", ",".join(tiers)]
        argv += ["--gpus", gpus] if gpus else []
        done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, check=False)
        if done.returncode:
            return [row("checks", False, done.stderr[-500:])]
        for check in json.loads(done.stdout)["checks"]:
            if re.match(only, check["name"]):
                wanted.setdefault(check["name"], check)
    absent = {name: why for name, check in wanted.items() if (why := left_out(check))}
    there = [check for name, check in wanted.items() if name not in absent]
    with tempfile.TemporaryDirectory(prefix="nrl-check-") as folder:
        listed, receipt = Path(folder, "list.json"), Path(folder, "receipt.json")
        listed.write_text(json.dumps({"checks": there}))
        argv = [python, "-B", checks, "run", "--list", listed, "--json", receipt]
        environment = activated(prefix, Path(folder))
        done = subprocess.run(
            [str(a) for a in argv], env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=without_network
        )
        if not receipt.exists():
            return [row("checks", False, f"the runner ended with {done.returncode}: {done.stdout[-500:]}")]
        rows: list[Row] = json.loads(receipt.read_text())["checks"]
    skipped = [{"name": n, "outcome": "skipped", "reason": why, "details": {}} for n, why in sorted(absent.items())]
    return rows + skipped
