"""Debian's docker-registry on loopback, with or without TLS and users."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.waits import until

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
    if login:
        (folder / "htpasswd").write_text(f"{LOGIN[0]}:{_BCRYPT}\n")
    for _ in range(10):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = _serve(folder, port, login, tls)
        if process.poll() is None:
            break  # else somebody took the port meanwhile
    try:
        assert process.poll() is None, (folder / "log").read_text()
        yield DockerRegistry(f"127.0.0.1:{port}", folder / "log")
    finally:
        process.terminate()
        process.wait()


def _serve(folder: Path, port: int, login: bool, tls: tuple[Path, Path] | None) -> subprocess.Popen[bytes]:
    """It listens, or it has ended."""
    lines = ["version: 0.1", "log: {level: info, accesslog: {disabled: false}}"]
    lines += [f"storage: {{filesystem: {{rootdirectory: {folder / 'data'}}}, delete: {{enabled: true}}}}"]
    lines += ["http:", f"  addr: 127.0.0.1:{port}"]
    if tls:
        lines += [f"  tls: {{certificate: {tls[0]}, key: {tls[1]}}}"]
    if login:
        lines += [f"auth: {{htpasswd: {{realm: lab, path: {folder / 'htpasswd'}}}}}"]
    (folder / "config.yml").write_text("\n".join(lines) + "\n")
    with open(folder / "log", "wb") as out:
        process = subprocess.Popen([str(PROGRAM), "serve", str(folder / "config.yml")], stdout=out, stderr=out)
    until(lambda: process.poll() is not None or b"listening on" in (folder / "log").read_bytes())
    return process
