"""Debian's docker-registry on loopback, with or without TLS and users."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = shutil.which("docker-registry")
# docker-registry takes bcrypt only, which Python's standard library does not make: one known pair.
LOGIN = ("lab", "lab-password")
_BCRYPT = "$2b$04$IK3PzvmImisFyVcqAnkv3eMwV16B4XfmTwq5ISfeeUjVC1YQ2y6iu"
needs_registry = pytest.mark.skipif(PROGRAM is None, reason="docker-registry is not installed")


@dataclass(frozen=True)
class DockerRegistry:
    """A running one."""

    host: str
    log: Path


@contextmanager
def docker_registry(
    folder: Path, *, login: bool = False, tls: tuple[Path, Path] | None = None
) -> Iterator[DockerRegistry]:
    """Start one; its data is below ``folder``.

    Args:
        login: demand ``LOGIN`` by basic authentication.
        tls: certificate and key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines = ["version: 0.1", "log: {level: info, accesslog: {disabled: false}}"]
    lines += [f"storage: {{filesystem: {{rootdirectory: {folder / 'data'}}}, delete: {{enabled: true}}}}"]
    lines += ["http:", f"  addr: 127.0.0.1:{port}"]
    if tls:
        lines += [f"  tls: {{certificate: {tls[0]}, key: {tls[1]}}}"]
    if login:
        (folder / "htpasswd").write_text(f"{LOGIN[0]}:{_BCRYPT}\n")
        lines += [f"auth: {{htpasswd: {{realm: lab, path: {folder / 'htpasswd'}}}}}"]
    (folder / "config.yml").write_text("\n".join(lines) + "\n")
    log = folder / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen([str(PROGRAM), "serve", str(folder / "config.yml")], stdout=out, stderr=out)
    try:
        _wait(port, process)
        yield DockerRegistry(f"127.0.0.1:{port}", log)
    finally:
        process.terminate()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(200):
        assert process.poll() is None, "docker-registry ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("docker-registry does not listen")
