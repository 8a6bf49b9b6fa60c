"""Servers that some peers need, started for a measurement and stopped after it: Docker Engine and docker-registry."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.measure import Failed

_PATIENCE = 60.0


@contextmanager
def dockerd(folder: Path) -> Iterator[tuple[str, ...]]:
    """A Docker Engine whose data lies below the folder; the beginning of a command line for its client."""
    short = Path("/tmp") / f"oci-builder-bench-{os.getpid()}.sock"  # a socket's path has 108 bytes at most
    folder.mkdir(parents=True)
    argv = [
        "dockerd", "--data-root", folder / "data", "--exec-root", folder / "exec", "-H", f"unix://{short}",
        "-p", folder / "pid", "--iptables=false", "--bridge=none",
    ]  # fmt: skip
    client = ("docker", "-H", f"unix://{short}")
    with _running(argv, folder / "log") as process:
        _until(lambda: subprocess.run([*client, "info"], capture_output=True).returncode == 0, process, "dockerd")
        yield client
    short.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """A docker-registry on loopback; its ``host:port``."""
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    with _running(["docker-registry", "serve", folder / "config.yml"], folder / "log") as process:
        _until(lambda: _listens(port), process, "docker-registry")
        yield f"127.0.0.1:{port}"
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(argv: Sequence[str | Path], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "wb") as out:
        process = subprocess.Popen([str(a) for a in argv], stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(_PATIENCE)


def _until(ready: object, process: subprocess.Popen[bytes], name: str) -> None:
    assert callable(ready)
    last = time.monotonic() + _PATIENCE
    while not ready():
        if process.poll() is not None or time.monotonic() > last:
            raise Failed(f"{name} did not come up")
        time.sleep(0.2)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
