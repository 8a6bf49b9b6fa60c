"""The chroot runner on real GPUs, on the machine's own root below an overlay: standard library only.

    python3 tests/device/chroot_gpu.py host OUT

Everything is logged to OUT (receipts as JSON, one summary, one log). ``image_gpu.py`` has the chain from a build on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKS = Path(__file__).resolve().parent / "checks"
ORDINARY_UID = 12345
SHM = 1 << 30
# NVLink multicast can put GPUs that others share out of service: off in every program here, whatever the machine says.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# Not part of the image: the tier, the driver, kernel and scratch file systems, caches, and profilers.
EXCLUDED = (
    "opt/nvidia", "usr/local/nvidia", "proc", "sys", "dev", "run", "tmp", "mnt", "media", "work", "root",
    "home", "boot", "var/cache", "var/lib/apt", "var/log", "var/tmp", "usr/share/doc", "usr/share/man", "lost+found",
    "usr/lib/firmware", "usr/lib/modules", "swapfile",
)  # fmt: skip

FACTS = (
    "df -h / /var/tmp /dev/shm",
    "du -xsh / /opt/torch /usr/local/cuda* /opt/* 2>/dev/null",
    "cat /proc/devices",
    "ls -la /dev /proc/driver/nvidia/gpus /usr/local/nvidia /usr/local/nvidia/lib64",
    "cat /proc/driver/nvidia/version",
    "findmnt",
    "ldconfig -p | grep -i -e libcuda -e nvidia-ml",
    "env | grep -i -e nccl -e cuda -e nvshmem -e torch -e path",
    "grep Cap /proc/self/status",
    "readlink -f /opt/torch/.venv/bin/python3; cat /opt/torch/.venv/pyvenv.cfg; ls -la /opt /opt/torch",
)


@dataclass
class Session:
    """Where results go, and how many GPUs there are."""

    out: Path
    work: Path
    python: str
    gpus: int
    summary: dict[str, Any]

    def say(self, text: str) -> None:
        """One line for the log and the terminal."""
        line = f"{time.strftime('%H:%M:%S')} {text}"
        print(line, flush=True)
        with (self.out / "log.txt").open("a") as file:
            file.write(line + "\n")

    def save(self, name: str, value: Any) -> None:
        """A JSON file among the results; the summary is written with each."""
        for place, content in ((name, value), ("summary.json", self.summary)):
            (self.out / place).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")

    def timed(self, name: str, command: Sequence[str], **options: Any) -> int:
        """Run a command, note its seconds and status in the summary, and return the status."""
        self.say("$ " + " ".join(command))
        started = time.monotonic()
        with (self.out / "log.txt").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **options)
            _, ended, usage = os.wait4(process.pid, 0)
            status = process.returncode = os.waitstatus_to_exitcode(ended)
        cpu = usage.ru_utime + usage.ru_stime
        seconds = round(time.monotonic() - started, 2)
        self.summary.setdefault("steps", {})[name] = {
            "status": status,
            "seconds": seconds,
            "cpu_seconds": round(cpu, 2),
            "peak_mib": usage.ru_maxrss >> 10,
        }
        self.say(f"{name}: status {status}, {seconds} s, {cpu:.1f} s of CPU")
        self.save("summary.json", self.summary)
        return status


def checks(python: str, folder: str, gpus: int) -> list[dict[str, Any]]:
    """The checks, for an interpreter and a folder of their programs inside the sandbox."""
    env = {"TRITON_CACHE_DIR": "/tmp/triton", "HOME": "/tmp", "EXPECT_GPUS": str(gpus), **NO_MULTICAST}

    def script(name: str, timeout: float, **more: Any) -> dict[str, Any]:
        return {"name": name, "argv": [python, f"{folder}/gpu_{name}.py"], "timeout": timeout, "env": env, "gpus": 1,
                "result": "json", "shm": SHM, **more}  # fmt: skip

    found = [
        {"name": "ldcache", "argv": ["ldconfig", "-p"], "gpus": 1,
         "stdout": [r"libcuda\.so\.1 .*=> /usr/local/nvidia/"]},
        {"name": "smi", "argv": ["nvidia-smi", "-L"], "stdout": ["UUID: GPU-"], "gpus": 1},
        {"name": "nvcc", "argv": ["/bin/sh", f"{folder}/gpu_nvcc.sh"], "timeout": 120, "gpus": 1,
         "stdout": ["the kernel is right", "linked with the driver"]},
        script("torch", 180),
        script("triton", 180),
    ]  # fmt: skip
    return found + ([script("nccl", 180, gpus=2)] if gpus > 1 else [])


def request(root: str, isolation: str, found: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A request for the runner."""
    base = {"schema": "chroot-exec/1", "root": root, "isolation": isolation, "gpu": {}, "output_limit": 16384}
    return {**base, "checks": found, **more}


def run_request(session: Session, name: str, value: dict[str, Any]) -> bool:
    """Run the copied runner on a request, as an ordinary user when it is rootless; whether all passed."""
    rootless = value["isolation"] == "rootless"
    place = session.work / f"{name}.json"
    place.write_text(json.dumps(value))
    receipt = session.work / "receipts" / f"{name}.json"
    user: dict[str, Any] = {"user": ORDINARY_UID, "group": ORDINARY_UID, "extra_groups": []} if rootless else {}
    command = [session.python, "-m", "chroot_exec", str(place), "--output", str(receipt)]
    session.timed(name, command, cwd=session.work, env={"PATH": os.environ["PATH"], "HOME": "/tmp"}, **user)
    if not receipt.exists():
        return False
    found = json.loads(receipt.read_text())
    session.save(f"{name}.json", found)
    session.say(f"{name}: {found['outcome']} {found['error'] or ''} {found['sandbox'].get('notes')}")
    for check in found["checks"]:
        session.say(f"  {check['name']}: {check['outcome']} {check['code']} {check['message']} {check['seconds']} s")
        if check["outcome"] != "pass" and check["stderr"]:
            session.say(check["stdout"]["text"][-1500:] + check["stderr"]["text"][-1500:])
    session.summary.setdefault("outcomes", {})[name] = {c["name"]: c["outcome"] for c in found["checks"]}
    session.save("summary.json", session.summary)
    return bool(found["outcome"] == "pass")


def prepare(out: Path, facts: Sequence[str] = FACTS, work: Path | None = None) -> Session:
    """Copy runner and checks to where an ordinary user can read them, and note the machine's facts."""
    out.mkdir(parents=True, exist_ok=True)
    if work is None:
        work = Path(tempfile.mkdtemp(prefix="chroot-gpu-", dir="/var/tmp"))
    work.mkdir(exist_ok=True)
    work.chmod(0o755)
    pycache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "chroot_exec", work / "chroot_exec", ignore=pycache, dirs_exist_ok=True)
    shutil.copytree(CHECKS, work / "checks", dirs_exist_ok=True)
    (work / "receipts").mkdir(exist_ok=True)
    (work / "receipts").chmod(0o1777)
    python = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
    listed = subprocess.run(["sh", "-c", "nvidia-smi -L"], capture_output=True, text=True).stdout
    session = Session(out, work, python, listed.count("UUID: GPU-"), {"gpus": listed.splitlines()})
    session.summary["kernel"] = os.uname().release
    session.summary["cpus"] = os.cpu_count()
    for command in facts:
        done = subprocess.run(["timeout", "40", "sh", "-c", command], capture_output=True, text=True)
        session.say(f"$ {command}\n{done.stdout}{done.stderr}")
    return session


def host(session: Session, environment: Path) -> bool:
    """The machine's own root, as root; rootless a copy of hard links, since the root has mounts that are locked."""
    found = checks(str(environment / "bin/python3"), "/checks", session.gpus)
    binds = [{"source": str(session.work / "checks"), "target": "/checks"}]
    good = run_request(session, "host-root", request("/", "root", found, binds=binds))
    tree = session.work / "tree"
    tree.mkdir()
    folders = ["bin", "sbin", "lib", "lib64", "usr", "etc", "opt/gcc", str(environment.parent).lstrip("/")]
    there = [f for f in folders if os.path.lexists("/" + f)]
    session.timed("link", ["cp", "-alx", "--parents", *there, str(tree)], cwd="/")
    for folder in ("proc", "sys", "dev", "tmp", "run", "checks", "usr/local/nvidia"):
        (tree / folder).mkdir(parents=True, exist_ok=True)
    # The placeholders must be the user's own to mount over; the links are the machine's files and stay as they are.
    for path in (tree, *(p for p in tree.iterdir() if p.is_dir() and not p.is_symlink())):
        os.chown(path, ORDINARY_UID, ORDINARY_UID)
    return run_request(session, "host-rootless", request(str(tree), "rootless", found, binds=binds)) and good


def main() -> int:
    """Run one part; 0 when everything passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("host",))
    parser.add_argument("out", type=Path)
    parser.add_argument("--env", type=Path, default=Path("/opt/torch/.venv"))
    options = parser.parse_args()
    session = prepare(options.out)
    try:
        good = host(session, options.env)
    finally:
        shutil.rmtree(session.work, ignore_errors=True)
    session.say("all passed" if good else "NOT all passed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
