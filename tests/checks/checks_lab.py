"""The shipped checks as programs and as a package, and a driver library that gives as many GPUs as a test asks for."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FILES = Path(__file__).resolve().parents[2] / "layers/files"


def _package() -> None:
    """The shipped folder as the package that its own ``__main__`` makes of it."""
    folder = FILES / "checks"
    spec = importlib.util.spec_from_file_location(
        "nrl_checks", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["nrl_checks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["nrl_checks"])


_package()

_FAKE = r"""
#include <stdlib.h>
#include <string.h>
static int count(void) { const char *n = getenv("FAKE_GPUS"); return n ? atoi(n) : 0; }
int cuInit(unsigned f) { const char *e = getenv("FAKE_CUINIT"); return e ? atoi(e) : 0; }
int cuDeviceGetCount(int *n) { *n = count(); return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *t, int n, int d) { strncpy(t, "NVIDIA B200", n); return 0; }
int cuDeviceGetUuid(unsigned char *u, int d) { memset(u, 0, 16); u[15] = getenv("FAKE_TWINS") ? 1 : d + 1; return 0; }
int cuDeviceTotalMem_v2(size_t *m, int d) { *m = 1UL << 34; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 10 : a == 76 ? 0 : 148; return 0; }
"""


def fake_driver(folder: Path) -> Path:
    """A libcuda of our own."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (folder / "fake.c").write_text(_FAKE)
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", str(folder / "fake.c"), "-o", str(library)], check=True)
    return library


def run_check(*argv: str, isolated: bool = True, **env: str) -> tuple[int, dict[str, Any]]:
    """A check's exit status and result; ``isolated`` without a network, where this user may make namespaces."""
    command = [sys.executable, str(FILES / "checks"), *argv]
    if isolated:
        command = ["unshare", "--net", *([] if os.getuid() == 0 else ["--map-root-user"]), "sh", "-c",
                   'ip link set lo up 2>/dev/null; exec "$@"', "sh", *command]  # fmt: skip
        if subprocess.run([*command[: command.index("sh")], "true"], capture_output=True).returncode:
            pytest.skip("needs network namespaces")
    given = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", **env}
    done = subprocess.run(command, capture_output=True, text=True, env=given, timeout=300)
    return done.returncode, json.loads(done.stdout.rstrip().splitlines()[-1])


def write_inventory(path: Path, packages: dict[str, str], omitted: dict[str, str] | None = None) -> Path:
    """An inventory as a build writes it."""
    listed = [{"name": name, "version": version} for name, version in packages.items()]
    path.write_text(json.dumps({"tier": "t", "packages": listed, "omitted": omitted or {}}))
    return path


def distribution(folder: Path, name: str, version: str) -> Path:
    """An installed package with metadata, and a module of its name; the folder for a path."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / f"{name.replace('-', '_')}.py").write_text(f"__version__ = {version!r}\n")
    return folder
