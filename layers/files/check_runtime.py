#!/usr/bin/env python3
"""Is this host fit for the runtime in this folder, and does the runtime work here?

    python3 check_runtime.py [--imports] [--gpu] [--cluster] [--tier NAME]... [--json FILE] [--prefix DIR]

Without options: the host (Linux x86_64, glibc, driver, compiler, memory for collectives) and the installation.
``--imports`` imports every tier, ``--gpu`` runs the checks on this node's GPUs (zero GPUs is a failure), ``--cluster``
asks every node of the running Ray cluster whether it has the same runtime under the same absolute path.
What a build left out is named as skipped, with its reason. Standard library only.
Exit status: 0 nothing failed, 1 a check said no, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = "nrl-check-runtime/1"
GLIBC, DRIVER, CAPABILITY = (2, 35), 580, "10.0"
SHM = 1 << 30
OVERLAID = b"NEMO_RL_PREBUILT_ENV_ROOT"
TOOLS = ("nvcc", "ptxas", "fatbinary", "cudafe++", "nvlink", "cuobjdump", "nvdisasm")
# Checks of one module each -> the package it comes from, which a build may leave out.
PACKAGES = {
    "import:deep_ep": "deep-ep", "import:deep_gemm": "deep-gemm", "import:vllm._C": "vllm",
    "import:vllm.cumem_allocator": "vllm", "import:mooncake": "mooncake-transfer-engine",
}  # fmt: skip
# A user's own caches are no start from nothing.
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "WANDB_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

Row = dict[str, Any]


def row(name: str, good: bool | None, reason: str, **details: Any) -> Row:
    """A result: ``good`` None means deferred, and the reason says to when."""
    outcome = "deferred" if good is None else "pass" if good else "fail"
    return {"name": name, "outcome": outcome, "reason": reason, "details": details}


# ---- the host


def host_rows(prefix: Path, gpu: bool) -> Iterator[Row]:
    """What the runtime needs of a machine."""
    system, machine = platform.system(), platform.machine()
    yield row("platform", (system, machine) == ("Linux", "x86_64"), f"{system} {machine}")
    yield glibc()
    yield driver(gpu)
    yield compiler()
    free = shared_memory()
    yield row("shm", free >= SHM, f"/dev/shm has {free} bytes, collectives need {SHM}")
    yield socket_path()
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


# ---- the installation


def installation_rows(prefix: Path, tiers: Sequence[str]) -> Iterator[Row]:
    """What lies in the folder."""
    good = re.fullmatch(r"/[A-Za-z0-9._/+@=-]+", str(prefix)) is not None
    yield row("prefix", good, str(prefix) if good else f"{prefix}: characters that Ray's workers do not survive")
    record = installed(prefix)
    if record:
        same = os.path.realpath(str(record.get("prefix"))) == os.path.realpath(prefix)
        advice = "run ensure_runtime.sh with this prefix"
        moved = "" if same else f"it was installed at {record.get('prefix')} and moved: {advice}"
        yield row("installed", same, moved or f"archive {record.get('sha256')}", sha256=record.get("sha256"))
    if not tiers:
        yield row("tiers", False, f"no tier in {prefix}/envs")
    for tier in tiers:
        yield interpreter(prefix, tier)
    yield from toolkit(prefix)
    yield from source_tree(prefix)


def source_tree(prefix: Path) -> Iterator[Row]:
    """The source that would be imported has the overlay: without it workers build environments of their own."""
    given = os.environ.get("NEMO_RL_SOURCE_ROOT")
    tree = Path(given or prefix / "source")
    if not given and not (tree / "nemo_rl").is_dir():
        return  # a runtime of packages alone
    reason = str(tree)
    if not tree.is_absolute():
        reason = f"NEMO_RL_SOURCE_ROOT={tree} is not absolute: another folder's processes do not find it"
    elif not (tree / "nemo_rl").is_dir():
        reason = f"NEMO_RL_SOURCE_ROOT={tree} holds no nemo_rl/"
    elif not any(OVERLAID in path.read_bytes() for path in sorted((tree / "nemo_rl").rglob("*.py")) if path.is_file()):
        reason = f"{tree} lacks the overlay (no {OVERLAID.decode()} in it): run {prefix}/overlay/apply.py {tree}"
    yield row("source", reason == str(tree), reason)


def at_home(prefix: Path) -> Path:
    """The prefix as it was named when it was installed, where a link leads to the same folder."""
    named = installed(prefix).get("prefix")
    if isinstance(named, str) and os.path.isabs(named) and os.path.realpath(named) == os.path.realpath(prefix):
        return Path(named)
    return prefix


def installed(prefix: Path) -> Mapping[str, Any]:
    """ensure_runtime.sh's record; empty in an image."""
    try:
        found = json.loads((prefix / ".nrl-install/installed.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def interpreter(prefix: Path, tier: str) -> Row:
    """A tier's Python starts, from this prefix and from nowhere else."""
    python = prefix / "envs" / tier / "bin/python"
    code = "import json, sys; print(json.dumps([sys.version.split()[0], sys.prefix, sys.base_prefix]))"
    try:
        done = subprocess.run([python, "-I", "-B", "-c", code], capture_output=True, text=True, timeout=120)
        version, found, base = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return row(f"interpreter:{tier}", False, f"{python} does not start: {error}")
    home = os.path.realpath(prefix / "envs" / tier)
    good = os.path.realpath(found) == home
    return row(f"interpreter:{tier}", good, f"Python {version}" if good else f"its prefix is {found}", base=base)


def toolkit(prefix: Path) -> Iterator[Row]:
    """The shipped CUDA tools, if this runtime ships them; else the image's."""
    cuda = prefix / "cuda"
    if not cuda.is_dir():
        cuda = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    if not cuda.is_dir():
        yield row("cuda-tools", None, f"no CUDA toolkit in {prefix}/cuda or {cuda}; kernels cannot be compiled here")
        return
    absent = [t for t in TOOLS if not os.access(cuda / "bin" / t, os.X_OK)]
    absent += [f for f in ("include/cuda.h", "nvvm/libdevice") if not (cuda / f).exists()]
    # Of a toolkit that is the host's own, only the kernels that --gpu compiles can say whether it is enough.
    verdict = not absent if cuda == prefix / "cuda" else True if not absent else None
    yield row("cuda-tools", verdict, f"absent in {cuda}: {', '.join(absent)}" if absent else str(cuda))


# ---- the checks that are shipped beside this file


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


def left_out(prefix: Path, tiers: Sequence[str]) -> dict[str, str]:
    """Check -> why its package is not in this build, from the inventories."""
    out = {}
    for tier in tiers:
        try:
            omitted = json.loads((prefix / f"inventory-{tier}.json").read_text()).get("omitted", {})
        except (OSError, ValueError, AttributeError):
            continue
        for check, package in PACKAGES.items():
            if package in omitted:
                out[check] = f"{package} was left out of this build: {omitted[package]}"
    return out


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


def shipped_rows(prefix: Path, tiers: Sequence[str], stages: Sequence[str], only: str) -> list[Row]:
    """Run the lists of these stages with the runner beside this file."""
    python, checks = prefix / "envs" / tiers[0] / "bin/python", prefix / "checks"
    if not checks.is_dir():
        return [row("checks", False, f"{checks} is absent")]
    wanted: list[Mapping[str, Any]] = []
    absent = left_out(prefix, tiers)
    for stage in stages:
        argv = [python, "-B", checks, "list", "--stage", stage, "--prefix", prefix, "--tiers", ",".join(tiers)]
        done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, check=False)
        if done.returncode:
            return [row("checks", False, done.stderr[-500:])]
        known = {check["name"] for check in wanted} | set(absent)
        wanted += [c for c in json.loads(done.stdout)["checks"] if c["name"] not in known and re.match(only, c["name"])]
    with tempfile.TemporaryDirectory(prefix="nrl-check-") as folder:
        listed, receipt = Path(folder, "list.json"), Path(folder, "receipt.json")
        listed.write_text(json.dumps({"checks": wanted}))
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


def gpu_rows(prefix: Path) -> tuple[list[Row], int]:
    """Every visible GPU is a B200; how many there are."""
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\nimport gpu\n"
        "try: print(json.dumps(gpu.gpu_facts()))\nexcept gpu.NoGpu as e: print(json.dumps({'why': str(e), 'gpus': []}))"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code, str(prefix / "checks")], capture_output=True, text=True)
    try:
        facts = json.loads(done.stdout)
    except ValueError:
        facts = {"why": done.stderr[-300:], "gpus": []}
    gpus = facts["gpus"]
    if not gpus:
        return [row("gpus", False, f"zero GPUs: {facts.get('why')}")], 0
    names = sorted({f"{g['name']} ({g['capability']})" for g in gpus})
    other = [g["uuid"] for g in gpus if g["capability"] != CAPABILITY]
    few = len({g["uuid"] for g in gpus}) != len(gpus)
    wrong = f"{len(other)} are not of capability {CAPABILITY}: " if other else ""
    wrong = "two devices have one UUID; " if few else wrong
    return [row("gpus", not wrong, f"{wrong}{len(gpus)} x {', '.join(names)}", gpus=gpus)], len(gpus)


# ---- the cluster

_CLUSTER = """
import json, os, socket, sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
prefix = sys.argv[1]
def ask(prefix):
    import hashlib, json, os, socket, sys
    def read(path):
        try:
            with open(path, "rb") as file: return file.read()
        except OSError: return b""
    record = json.loads(read(os.path.join(prefix, ".nrl-install/installed.json")) or b"{}")
    root = os.environ.get("NEMO_RL_PREBUILT_ENV_ROOT", "")
    inventories = b"".join(read(os.path.join(prefix, "inventory-%s.json" % t)) for t in ("base", "automodel", "vllm"))
    return {"host": socket.gethostname(), "there": os.path.isdir(os.path.join(prefix, "envs")),
            "sha256": record.get("sha256", ""), "inventories": hashlib.sha256(inventories).hexdigest(),
            "executable": sys.executable, "python": sys.version.split()[0],
            "root": root, "same": os.path.realpath(root) == os.path.realpath(os.path.join(prefix, "envs")),
            "driver": read("/proc/driver/nvidia/version").decode("utf-8", "replace").partition("\\n")[0]}
ray.init(address="auto", log_to_driver=False)
nodes = [n for n in ray.nodes() if n["Alive"]]
task = ray.remote(num_cpus=0)(ask)
answers = {}
for node in nodes:
    where = On(node_id=node["NodeID"], soft=False)
    try: answer = ray.get(task.options(scheduling_strategy=where).remote(prefix), timeout=120)
    except Exception as error: answer = {"host": node.get("NodeManagerHostname", "?"), "error": str(error)[-300:]}
    answers[node["NodeID"]] = answer
print("\\n" + json.dumps(answers))
"""


def cluster_rows(prefix: Path) -> list[Row]:
    """Ask every living node of the running cluster."""
    argv = [str(prefix / "envs/base/bin/python"), "-B", "-c", _CLUSTER, str(prefix)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    try:
        answers: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return [row("cluster", False, f"no answer from a running Ray cluster: {done.stderr.strip()[-400:]}")]
    return judge_cluster(prefix, answers)


def judge_cluster(prefix: Path, answers: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """One row a node, and one for whether they are the same."""
    rows = []
    for node, answer in sorted(answers.items()):
        root = str(answer.get("root", "")).rstrip("/")
        wrong = str(answer.get("error", ""))
        if not wrong and not answer.get("there"):
            wrong = f"no runtime at {prefix}"
        elif not wrong and root != f"{prefix}/envs" and not (root and answer.get("same")):
            wrong = f"its raylet was not started from a shell activated there (NEMO_RL_PREBUILT_ENV_ROOT={root!r})"
        reason = wrong or str(answer.get("executable"))
        rows.append(row(f"node:{answer.get('host', node)}", not wrong, reason, **answer))
    if not answers:
        return [row("cluster", False, "the cluster has no living node")]
    reasons = []
    for key in ("sha256", "inventories", "python", "executable"):
        found = {str(a.get(key)) for a in answers.values()}
        if len(found) > 1:
            reasons.append(f"{key} differs: {', '.join(sorted(found))}")
    return [*rows, row("cluster", not reasons, "; ".join(reasons) or f"{len(answers)} nodes, one runtime at {prefix}")]


# ---- the command


def collect(options: argparse.Namespace) -> list[Row]:
    """All rows that were asked for."""
    prefix = at_home(Path(os.path.abspath(options.prefix)))
    envs = prefix / "envs"
    there = sorted(p.name for p in envs.iterdir() if (p / "bin").is_dir()) if envs.is_dir() else []
    tiers = options.tier or sorted(there, key=lambda t: (t != "base", t))
    rows = [*host_rows(prefix, options.gpu), *installation_rows(prefix, tiers)]
    startable = {r["name"] for r in rows if r["outcome"] == "pass"}
    usable = [t for t in tiers if f"interpreter:{t}" in startable]
    if usable and options.imports and not options.gpu:
        rows += shipped_rows(prefix, usable, ["container-check"], r"imports?:")
    if options.gpu:
        found, count = gpu_rows(prefix)
        rows += found
        stages = ["single", "nccl"] if count > 1 else ["single"]
        rows += shipped_rows(prefix, usable, stages, "") if usable and count else []
    if options.cluster:
        rows += cluster_rows(prefix)
    return rows


def table(rows: Sequence[Row]) -> str:
    """One line a row, and the count."""
    width = max(len(r["name"]) for r in rows)
    lines = [f"{r['outcome']:<8} {r['name']:<{width}}  {r['reason'][:300]}".rstrip() for r in rows]
    counts = {o: sum(r["outcome"] == o for r in rows) for o in ("pass", "fail", "deferred", "skipped")}
    return "\n".join([*lines, ", ".join(f"{n} {o}" for o, n in counts.items() if n)])


def main(argv: Sequence[str]) -> int:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(prog="check_runtime.py", description=str(__doc__).splitlines()[0])
    parser.add_argument("--imports", action="store_true", help="import every tier; what needs the driver is deferred")
    parser.add_argument("--gpu", action="store_true", help="run the checks on this node's GPUs, imports included")
    parser.add_argument("--cluster", action="store_true", help="compare all nodes of the running Ray cluster")
    parser.add_argument("--tier", action="append", default=[], help="only this tier (may be repeated)")
    parser.add_argument("--prefix", default=str(Path(__file__).resolve().parent), help="the runtime's folder")
    parser.add_argument("--json", metavar="FILE", help="results as JSON; - for standard output")
    options = parser.parse_args(argv)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    rows = collect(options)
    outcomes = {r["outcome"] for r in rows}
    ok = not outcomes - {"pass", "deferred", "skipped"}
    prefix = str(at_home(Path(os.path.abspath(options.prefix))))
    result = {
        "schema": SCHEMA, "ok": ok, "started": started, "prefix": prefix, "host": platform.node(),
        "archive": installed(Path(prefix)).get("sha256", ""), "kernel": platform.release(), "checks": rows,
    }  # fmt: skip
    try:
        report(rows, json.dumps(result, indent=1, sort_keys=True) + "\n", options.json)
    except BrokenPipeError:  # the reader has seen enough; what the checks say stands
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"check_runtime.py: {options.json}: {error.strerror}", file=sys.stderr)
        return 2
    return 0 if ok else 1


def report(rows: Sequence[Row], result: str, place: str | None) -> None:
    """The table, and the JSON where it is wanted."""
    print(table(rows), file=sys.stderr if place == "-" else sys.stdout)
    if place == "-":
        sys.stdout.write(result)
    elif place:
        Path(place).write_text(result)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
