"""A certificate authority of our own and a server certificate for loopback, made with openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@dataclass(frozen=True)
class Certificates:
    """Files in PEM."""

    authority: Path
    certificate: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        """For a server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


def make_certificates(folder: Path, names: str = "DNS:localhost,DNS:registry.test,IP:127.0.0.1") -> Certificates:
    """Make them."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    root = ["-keyout", folder / "ca.key", "-out", made.authority]
    _openssl("req", "-x509", *key, *root, "-days", "2", "-subj", "/CN=lab")
    _openssl("req", *key, "-keyout", made.key, "-out", folder / "server.csr", "-subj", "/CN=localhost")
    (folder / "extensions").write_text(f"subjectAltName={names}\n")
    _openssl(
        "x509", "-req", "-in", folder / "server.csr", "-CA", made.authority, "-CAkey", folder / "ca.key",
        "-CAcreateserial", "-days", "2", "-extfile", folder / "extensions", "-out", made.certificate,
    )  # fmt: skip
    return made


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
