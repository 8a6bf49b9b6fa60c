"""A logging HTTP proxy on loopback: CONNECT tunnels and plain requests, to one upstream whatever host is asked for."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    target: tuple[str, int]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_CONNECT(self) -> None:
        self._note()
        with socket.create_connection(self.target) as there:
            self.send_response(200)
            self.end_headers()
            _pump(self.connection, there)
        self.close_connection = True

    def do_GET(self) -> None:
        self._note()
        parts = urlsplit(self.path)
        connection = HTTPConnection(*self.target)
        headers = {k: v for k, v in self.headers.items() if not k.lower().startswith("proxy-")}
        connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _note(self) -> None:
        self.proxy.log.append((self.command, self.path, self.headers.get("Proxy-Authorization", "")))

    def log_message(self, *_: object) -> None: ...


class Proxy:
    """Use ``with``. ``log`` holds the first line's method and target, and any ``Proxy-Authorization``.

    Args:
        upstream: host:port that every name resolves to here.
    """

    def __init__(self, upstream: str) -> None:
        self.log: list[tuple[str, str, str]] = []
        host, _, port = upstream.rpartition(":")
        known = {"proxy": self, "target": (host, int(port))}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), known))
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _pump(one: socket.socket, two: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            for ready in select.select([one, two], [], [], 10)[0]:
                data = ready.recv(1 << 16)
                if not data:
                    return
                (two if ready is one else one).sendall(data)
