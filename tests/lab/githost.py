"""A real git server behind TLS with a CA of its own: git's http-backend (smart), or the files alone (dumb)."""

from __future__ import annotations

import base64
import http.server
import os
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.lab.certificates import make_certificates


@dataclass
class GitHost:
    """Serves the repositories below a folder.

    Attributes:
        dumb: no program answers, only files.
        password: asked of everybody (user ``u``); empty for none.
        fail: so many requests are answered with 503.
    """

    root: Path
    folder: Path
    dumb: bool = False
    password: str = ""
    fail: int = 0
    requests: list[str] = field(default_factory=list)
    server: http.server.ThreadingHTTPServer | None = None

    def start(self) -> GitHost:
        context = make_certificates(self.folder, "DNS:localhost").server_context()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def close(self) -> None:
        assert self.server
        self.server.shutdown()
        self.server.server_close()

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.pem")

    def url(self, name: str) -> str:
        assert self.server
        return f"https://localhost:{self.server.server_address[1]}/{name}"


class _Handler(http.server.BaseHTTPRequestHandler):
    host: GitHost

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.host.requests.append(self.path)
        wanted = "Basic " + base64.b64encode(f"u:{self.host.password}".encode()).decode()
        if self.host.fail > 0:
            self.host.fail -= 1
            self.send_error(503)
        elif self.host.password and self.headers.get("Authorization") != wanted:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="lab"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.host.dumb:
            self._file()
        else:
            self._backend()

    do_POST = do_GET

    def _file(self) -> None:
        path = self.host.root / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _backend(self) -> None:
        parts = urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        env = {
            "PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": str(self.host.root), "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": unquote(parts.path), "QUERY_STRING": parts.query, "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type") or "", "CONTENT_LENGTH": str(len(data)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding") or "",
            "GIT_PROTOCOL": self.headers.get("Git-Protocol") or "", "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent",
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }  # fmt: skip
        done = subprocess.run(["git", "http-backend"], input=data, env=env, capture_output=True, check=False)
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        fields = [line.split(": ", 1) for line in head.decode().splitlines()]
        status = next((int(value.split()[0]) for name, value in fields if name == "Status"), 200)
        self.send_response(status)
        for name, value in fields:
            if name != "Status":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _handler(host: GitHost) -> type[http.server.BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"host": host})


def git(place: Path, *words: str) -> str:
    """Run git in a folder as somebody with a name; what it prints."""
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *identity, "-C", str(place), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
