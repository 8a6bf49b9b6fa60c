"""A folder that stands for a machine with NVIDIA GPUs: /proc files, nodes, and driver libraries made by gcc."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

VERSION = "580.95.05"
UUIDS = ("GPU-11111111-0000-0000-0000-000000000000", "GPU-22222222-0000-0000-0000-000000000000")
LIBRARY_FOLDER = "usr/lib/x86_64-linux-gnu"

# cuInit and the number of devices are set by variables, so that one library can play every driver; else the nodes count.
_CUDA = r"""
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static int nodes(void) {
  int n = 0; char path[32];
  for (int i = 0; i < 16; i++) { sprintf(path, "/dev/nvidia%d", i); n += !access(path, F_OK); }
  return n;
}
static int number(const char *name, int other) { const char *v = getenv(name); return v ? atoi(v) : other; }
int cuInit(unsigned f) { return getenv("CUDA_INJECTION64_PATH") ? 36 : number("CUDA_FAKE_INIT", 0); }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = number("CUDA_FAKE_COUNT", nodes()); return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "NVIDIA Fake", n); return 0; }
int cuDeviceGetUuid(unsigned char *u, int d) { memset(u, 0, 16); u[0] = u[1] = u[2] = u[3] = 0x11; return 0; }
int cuDeviceGetPCIBusId(char *s, int n, int d) { strncpy(s, "0000:01:00.0", n); return 0; }
int cuDeviceTotalMem_v2(size_t *b, int d) { *b = 1024; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 10 : 0; return 0; }
"""


def have_compiler() -> bool:
    """Whether fakes can be made."""
    return shutil.which("gcc") is not None


def library(path: Path, soname: str, source: str = "int here;") -> Path:
    """A shared library made by gcc."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-xc", "-", f"-Wl,-soname,{soname}", "-o", str(path)]
    subprocess.run(command, input=source.encode(), check=True)
    return path


def script(path: Path, text: str) -> None:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


class FakeMachine:
    """Two GPUs (minors 0 and 1), driver 580.95.05, uvm on major 509."""

    def __init__(self, root: Path, nodes: bool = True) -> None:
        self.root = root
        self.write("proc/devices", "Character devices:\n  1 mem\n195 nvidia\n509 nvidia-uvm\n510 nvidia-caps\n\n"
                   "Block devices:\n509 other\n")  # fmt: skip
        self.write(
            "proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {VERSION}  Release Build\nGCC version: 13.1\n",
        )
        for index, uuid in enumerate(UUIDS):
            self.write(
                f"proc/driver/nvidia/gpus/0000:0{index + 1}:00.0/information",
                f"Model: \t\t NVIDIA B200\nGPU UUID: \t {uuid}\nDevice Minor: \t {index}\n",
            )
        self.libraries = root / LIBRARY_FOLDER
        library(self.libraries / f"libcuda.so.{VERSION}", "libcuda.so.1", _CUDA)
        library(self.libraries / f"libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1")
        library(self.libraries / f"libnvidia-xyz.so.{VERSION}", "libnvidia-xyz.so.1")
        (self.libraries / "libcuda.so.1").symlink_to(f"libcuda.so.{VERSION}")
        # Any program that shows it ran; a wrapper script of the same name stands earlier in PATH.
        (root / "usr/bin").mkdir(parents=True)
        shutil.copy("/bin/echo", root / "usr/bin/nvidia-smi")
        script(root / "usr/local/bin/nvidia-smi", "echo a wrapper; exit 1\n")
        self.cache([f"libcuda.so.1 (libc6,x86-64) => /{LIBRARY_FOLDER}/libcuda.so.1"])
        if nodes:
            self.nodes()

    def write(self, path: str, text: str) -> None:
        """A text file of the machine."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def cache(self, lines: list[str]) -> None:
        """What ``ldconfig -p`` prints."""
        text = "".join(f"\t{line}\n" for line in lines)
        script(self.root / "sbin/ldconfig", f"cat <<'END'\n{len(lines)} libs found in cache\n{text}END\n")

    def nodes(self) -> None:
        """The device nodes; needs root."""
        for name, major, minor in (
            ("nvidia0", 195, 0), ("nvidia1", 195, 1), ("nvidiactl", 195, 255), ("nvidia-uvm", 509, 0),
            ("nvidia-uvm-tools", 509, 1), ("nvidia-caps/nvidia-cap1", 510, 1),
        ):  # fmt: skip
            self.node(name, major, minor)

    def node(self, name: str, major: int, minor: int) -> None:
        """One device node."""
        place = self.root / "dev" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(major, minor))
