"""A hub behind TLS with its own CA, and the CONNECT proxy that alone leads to it. Real sockets on loopback."""

from __future__ import annotations

import http.server
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.certificates import make_certificates

HUB = "huggingface.co"
CDN = "cas-bridge.xethub.hf.co"
ELSEWHERE = "files.example.net"


@dataclass
class Faults:
    """What goes wrong, and how often.

    Attributes:
        drop_at: the connection breaks after this many bytes of a body, ``drops`` times.
        ignore_range: answer 200 to a Range.
        early: a 206 begins this many bytes before what was asked for (B077).
        body: send these bytes instead of the file's.
        redirect: where the hub sends the client; None: it serves the file itself.
        second: where the CDN sends it on, once.
        expired: the first so many links of the CDN answer 403.
        status: the hub answers this to everything.
        hang_at: a body stops after this many bytes, and nobody hangs up.
    """

    drop_at: int = 0
    drops: int = 0
    ignore_range: bool = False
    early: int = 0
    body: bytes | None = None
    redirect: str | None = CDN
    second: str = ""
    expired: int = 0
    status: int = 0
    hang_at: int = 0


@dataclass
class Hub:
    """Both servers. ``requests`` is (host, method, path, Range, Authorization); ``connects`` what the proxy was asked."""

    data: bytes
    folder: Path
    faults: Faults = field(default_factory=Faults)
    requests: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    connects: list[str] = field(default_factory=list)
    stop: list[Callable[[], None]] = field(default_factory=list)
    proxy: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"https://{HUB}/datasets/lab/runtime/resolve/0123abc/runtime.tar.gz"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def start(self) -> Hub:
        names = f"DNS:{HUB},DNS:*.hf.co,DNS:*.xethub.hf.co,DNS:{ELSEWHERE}"
        context = make_certificates(self.folder, names).server_context()
        tls = _server(_handler(self))
        tls.socket = context.wrap_socket(tls.socket, server_side=True, do_handshake_on_connect=False)
        proxy = _server(_proxy(self, tls.server_address[1]))
        for server in (tls, proxy):
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            self.stop += [server.shutdown, server.server_close]
        self.proxy = f"http://127.0.0.1:{proxy.server_address[1]}"
        return self

    def close(self) -> None:
        self.over.set()
        for stop in self.stop:
            stop()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Broken connections are what these servers are for."""


def _server(handler: type[socketserver.BaseRequestHandler]) -> _Server:
    return _Server(("127.0.0.1", 0), handler)


def _proxy(hub: Hub, port: int) -> type[socketserver.BaseRequestHandler]:
    class Proxy(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (part := self.request.recv(4096)):
                    return
                head += part
            hub.connects.append(head.split()[1].decode())
            with socket.create_connection(("127.0.0.1", port)) as far:
                self.request.sendall(b"HTTP/1.1 200 Connection established\r\nContent-Length: 0\r\n\r\n")
                there = threading.Thread(target=_pump, args=(self.request, far), daemon=True)
                there.start()
                _pump(far, self.request)
                there.join(5)

    return Proxy


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(65536):
            sink.sendall(part)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def note(self) -> str:
        host = self.headers["Host"].partition(":")[0]
        about = (self.headers.get("Range", ""), self.headers.get("Authorization", ""))
        self.hub.requests.append((host, self.command, self.path, *about))
        return host

    def do_HEAD(self) -> None:
        self.answer(self.note(), False)

    def do_GET(self) -> None:
        self.answer(self.note(), True)

    def answer(self, host: str, body: bool) -> None:
        faults = self.hub.faults
        if faults.status:
            return self.plain(faults.status)
        if host == HUB and faults.redirect:
            return self.redirect(f"https://{faults.redirect}/signed/{len(self.hub.requests)}")
        if host != HUB and faults.expired:
            faults.expired -= 1
            return self.plain(403)
        if host != HUB and faults.second:
            target, faults.second = faults.second, ""
            return self.redirect(target)
        return self.file(body)

    def plain(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def redirect(self, target: str) -> None:
        text = b"this is the body of a redirect and must not get into the file\n"
        self.send_response(302)
        self.send_header("Location", target)
        self.send_header("X-Linked-Size", str(len(self.hub.data)))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)

    def file(self, body: bool) -> None:
        faults, data = self.hub.faults, self.hub.data if self.hub.faults.body is None else self.hub.faults.body
        asked, start = self.headers.get("Range", ""), 0
        if asked.startswith("bytes=") and not faults.ignore_range:
            start = max(0, int(asked[6:].split("-")[0]) - faults.early)
            if start >= len(data):
                return self.plain(416)
        self.send_response(206 if start or (asked and not faults.ignore_range) else 200)
        if asked and not faults.ignore_range:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if body:
            self.send(data[start:])

    def send(self, data: bytes) -> None:
        faults = self.hub.faults
        if faults.drops and len(data) > faults.drop_at:
            faults.drops -= 1
            self.wfile.write(data[: faults.drop_at])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        if faults.hang_at:
            self.wfile.write(data[: faults.hang_at])
            self.wfile.flush()
            self.hub.over.wait(300)
            return
        self.wfile.write(data)


def _handler(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"hub": hub})
