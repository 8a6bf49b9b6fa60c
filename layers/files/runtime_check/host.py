"""What the runtime needs of a machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from runtime_check.rows import Row, row

GLIBC, DRIVER = (2, 35), 580
SHM = 1 << 30


def host_rows(gpu: bool) -> Iterator[Row]:
    """All of them."""
    system, machine = platform.system(), platform.machine()
    yield row("platform", (system, machine) == ("Linux", "x86_64"), f"{system} {machine}")
    yield glibc()
    yield driver(gpu)
    yield compiler()
    free = shared_memory()
    yield row("shm", free >= SHM, f"/dev/shm has {free} bytes, collectives need {SHM}")
    yield socket_path()
    yield caches()
    yield from variables()


def glibc() -> Row:
    """2.35 is Ubuntu 22.04's; wheels of the vllm tier are made for it."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        text = ""
    found = re.match(r"glibc (\d+)\.(\d+)", text)
    good = bool(found) and (int(found[1]), int(found[2])) >= GLIBC  # type: ignore[index]
    return row("glibc", good, f"{text or 'no glibc'}, needed {GLIBC[0]}.{GLIBC[1]}")


def driver(gpu: bool, version: str = "/proc/driver/nvidia/version") -> Row:
    """The kernel driver's release; without one it is deferred, unless GPUs were asked for."""
    try:
        text = Path(version).read_text()
    except OSError:
        return row("driver", False if gpu else None, "no NVIDIA driver on this machine; --gpu on a node decides")
    found = re.search(r"\b(\d{3,})\.\d+(\.\d+)?\b", text)
    release = found[0] if found else text[:80]
    return row("driver", bool(found) and int(found[1]) >= DRIVER, f"R{release}, needed R{DRIVER} or later")  # type: ignore[index]


def compiler() -> Row:
    """Triton, FlashInfer and DeepGEMM compile at run time."""
    name = next((c for c in ("g++", "c++") if shutil.which(c)), "")
    if not name or not (shutil.which("gcc") or shutil.which("cc")):
        return row("compiler", False, "gcc and g++ are needed: kernels are compiled at run time")
    done = subprocess.run([name, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=False)
    version = done.stdout.strip()
    old = version.split(".")[0].isdigit() and int(version.split(".")[0]) < 12
    note = "; FlashInfer's TRT-LLM kernels want GCC 12 if they must be compiled" if old else ""
    return row("compiler", done.returncode == 0, f"{name} {version}{note}")


def shared_memory(place: str = "/dev/shm") -> int:
    """Free bytes."""
    try:
        found = os.statvfs(place)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def socket_path() -> Row:
    """Ray's sockets lie about 60 bytes below its folder, and the kernel's limit is 107."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    long = len(folder) > 40
    return row("ray-folder", not long, f"{folder} is longer than 40 bytes: set RAY_TMPDIR" if long else folder)


def caches() -> Row:
    """Kernels are compiled into a cache and loaded from there. Of a shell that is not activated, a guess."""
    own = os.environ.get("NRL_CACHE")
    guess = os.environ.get("NRL_CACHE_ROOT") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = Path(os.path.abspath(own or guess))
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    wrong = ""
    if not os.access(there, os.W_OK):
        wrong = "cannot be written"
    elif os.statvfs(there).f_flag & os.ST_NOEXEC:
        wrong = "is mounted noexec: what is compiled there cannot be loaded"
    verdict = not wrong if own or not wrong else None
    return row("caches", verdict, f"{place} {wrong}: set NRL_CACHE_ROOT" if wrong else str(place))


def variables() -> Iterator[Row]:
    """Variables that would change what runs."""
    wrong = [n for n in ("NRL_CONTAINER", "NRL_FORCE_REBUILD_VENVS", "PYTHONHOME") if os.environ.get(n)]
    if os.environ.get("NEMO_RL_PY_EXECUTABLES_SYSTEM") == "1":
        wrong.append("NEMO_RL_PY_EXECUTABLES_SYSTEM")
    paths = ("PATH", "LD_LIBRARY_PATH", "CPLUS_INCLUDE_PATH", "CUDA_HOME", "PYTHONPATH")
    empty = [n for n in paths if "" in os.environ.get(n, "x").split(":") and os.environ.get(n)]
    reason = "; ".join(
        [f"unset {', '.join(wrong)}"] * bool(wrong) + [f"{', '.join(empty)} has an empty part"] * bool(empty)
    )
    yield row("variables", not reason, reason)
