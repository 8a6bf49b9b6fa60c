"""A registry on loopback that can be made to fail in every way that the field reports know.

It speaks the pull, push and referrers parts of the distribution-spec from memory. A fault is a function that sees the
request and the reply that would be sent, and gives another reply or None; faults are tried in order. A fault with
``refuses`` says so before anything is done for the request.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from oci_builder.model import media
from oci_builder.model.digest import Digest

_PATH = re.compile(r"/v2/(?P<repo>.+?)/(?P<what>manifests|blobs|referrers)/(?P<name>.*)\Z")


@dataclass
class Request:
    """One request as it came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""
    client: Any = None

    @property
    def repo(self) -> str:
        """The repository that it is about; empty for none."""
        found = _PATH.match(self.path)
        return found["repo"] if found else ""

    @property
    def what(self) -> str:
        """``manifests``, ``blobs``, ``uploads``, ``referrers``, ``token`` or the path."""
        if "/blobs/uploads" in self.path:
            return "uploads"
        found = _PATH.match(self.path)
        return found["what"] if found else self.path.strip("/").split("/")[0]


@dataclass
class Reply:
    """What is sent.

    ``cut``: bytes after which the connection breaks; ``gate``: called before each ``chunk`` of the body with its size,
    and can hold it back.
    """

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    endless: bool = False
    chunk: int = 1 << 20
    gate: Callable[[int], None] = lambda _size: None


Fault = Callable[[Request, Reply], Reply | None]


class Registry:
    """The server. Use it as a context manager; ``host`` is what a reference names."""

    def __init__(self, address: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.uploads: dict[str, bytearray] = {}
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.referrers_api = True
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer((address, 0), _handler(self))
        self._server.daemon_threads = True
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.scheme = "https" if context else "http"
        self.host = f"{address}:{self._server.server_address[1]}"

    def __enter__(self) -> Registry:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Scheme and host."""
        return f"{self.scheme}://{self.host}"

    def calls(self, method: str, what: str) -> list[Request]:
        """Requests so far of this method and kind."""
        return [r for r in self.log if r.method == method and r.what == what]

    def put_blob(self, data: bytes) -> Digest:
        """Add a blob."""
        digest = Digest.of(data)
        self.blobs[digest] = data
        return digest

    def put_manifest(self, repo: str, data: bytes, media_type: str, *names: str) -> Digest:
        """Add a manifest under its digest and tags."""
        digest = Digest.of(data)
        for name in (digest, *names):
            self.manifests[repo, name] = (media_type, data)
        return digest

    def answer(self, request: Request) -> Reply:
        """The reply, faults applied."""
        with self.lock:
            self.log.append(request)
        refused = any(fault.refuses(request) for fault in self.faults if hasattr(fault, "refuses"))
        reply = Reply(401) if refused else self._honest(request)
        for fault in list(self.faults):
            reply = fault(request, reply) or reply
        return reply

    def _honest(self, request: Request) -> Reply:
        found = _PATH.match(request.path)
        if request.path in ("/v2/", "/v2"):
            return Reply(200, b"{}")
        if found is None:
            return Reply(404)
        if request.what == "uploads":
            return self._upload(request, found["repo"])
        if found["what"] == "manifests":
            return self._manifest(request, found["repo"], found["name"])
        if found["what"] == "referrers":
            return self._referrers(found["repo"], found["name"])
        data = self.blobs.get(found["name"])
        if data is None:
            return _error(404, "BLOB_UNKNOWN")
        return ranged(request, data)

    def _manifest(self, request: Request, repo: str, name: str) -> Reply:
        if request.method == "PUT":
            kind, digest = request.headers.get("content-type", ""), Digest.of(request.body)
            if name.startswith("sha256:") and name != digest:
                return _error(400, "DIGEST_INVALID")
            self.put_manifest(repo, request.body, kind, name)
            subject = json.loads(request.body).get("subject")
            extra = {"OCI-Subject": subject["digest"]} if subject and self.referrers_api else {}
            return Reply(
                201, b"", {"Docker-Content-Digest": digest, "Location": f"/v2/{repo}/manifests/{digest}", **extra}
            )
        known = self.manifests.get((repo, name))
        if known is None:
            return _error(404, "MANIFEST_UNKNOWN")
        accepted = [part.strip() for part in request.headers.get("accept", "").split(",")]
        if known[0] not in accepted and known[0] not in (media.DOCKER_SCHEMA1, media.DOCKER_SCHEMA1_SIGNED):
            return _error(404, "MANIFEST_UNKNOWN", f"the media type {known[0]} is not accepted")
        return Reply(200, known[1], {"Content-Type": known[0], "Docker-Content-Digest": Digest.of(known[1])})

    def _referrers(self, repo: str, subject: str) -> Reply:
        if not self.referrers_api:
            return _error(404, "NOT_FOUND")
        found = []
        for (place, name), (kind, data) in self.manifests.items():
            value = json.loads(data)
            if place == repo and name.startswith("sha256:") and value.get("subject", {}).get("digest") == subject:
                found.append(
                    {"mediaType": kind, "digest": name, "size": len(data), "artifactType": value.get("artifactType")}
                )
        index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": found}
        return Reply(200, json.dumps(index).encode(), {"Content-Type": media.OCI_INDEX})

    def _upload(self, request: Request, repo: str) -> Reply:
        if request.method == "POST":
            name = uuid.uuid4().hex
            self.uploads[name] = bytearray()
            return Reply(202, b"", {"Location": f"/v2/{repo}/blobs/uploads/{name}?_state=s3cr3t-state"})
        name = request.path.rpartition("/")[2]
        if name not in self.uploads:
            return _error(404, "BLOB_UPLOAD_UNKNOWN")
        self.uploads[name] += request.body
        if request.method == "PATCH":
            return Reply(202, b"", {"Location": f"/v2/{repo}/blobs/uploads/{name}?_state=s3cr3t-state"})
        data = bytes(self.uploads.pop(name))
        if Digest.of(data) != request.query.get("digest"):
            return _error(400, "DIGEST_INVALID")
        return Reply(201, b"", {"Docker-Content-Digest": self.put_blob(data)})


def ranged(request: Request, data: bytes) -> Reply:
    """A blob, or the part of it that was asked for."""
    found = re.match(r"bytes=(\d+)-", request.headers.get("range", ""))
    headers = {"Content-Type": "application/octet-stream", "Docker-Content-Digest": Digest.of(data)}
    if not found:
        return Reply(200, data, headers)
    return part(data, int(found[1]))


def part(data: bytes, start: int, total: int | None = None) -> Reply:
    """A 206 from ``start`` on, or a 416."""
    if start >= len(data):
        return Reply(416, b"", {"Content-Range": f"bytes */{len(data)}"})
    return Reply(206, data[start:], {"Content-Range": f"bytes {start}-{len(data) - 1}/{total or len(data)}"})


def _error(status: int, code: str, message: str = "") -> Reply:
    body = json.dumps({"errors": [{"code": code, "message": message or code.lower()}]}).encode()
    return Reply(status, body, {"Content-Type": "application/json"})


class _Handler(BaseHTTPRequestHandler):
    registry: Registry
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        headers = {k.lower(): v for k, v in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(self._chunks())
        query = {k: " ".join(v) for k, v in parse_qs(parts.query).items()}
        request = Request(self.command, parts.path, query, headers, body, self)
        reply = self.registry.answer(request)
        try:
            self._send(reply, self.command == "HEAD")
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            self.close_connection = True

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _send(self, reply: Reply, head: bool) -> None:
        self.send_response(reply.status)
        for key, value in reply.headers.items():
            self.send_header(key, value)
        if not reply.endless and "Content-Length" not in reply.headers:
            self.send_header("Content-Length", str(len(reply.body)))
        if reply.endless or reply.cut is not None:
            self.close_connection = True
        self.end_headers()
        if head:
            return
        body = reply.body if reply.cut is None else reply.body[: reply.cut]
        for at in range(0, len(body), reply.chunk):
            reply.gate(len(body[at : at + reply.chunk]))
            self.wfile.write(body[at : at + reply.chunk])
        sent = 0
        while reply.endless and sent < 1 << 30:
            sent += self.wfile.write(bytes(reply.chunk))
        if reply.cut is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None: ...

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = _serve


def _handler(registry: Registry) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"registry": registry})


class Allowance:
    """Bytes of bodies that go out before the rest waits; ``used`` is set when they have."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.used, self.ended = threading.Event(), threading.Event()
        self._guard = threading.Lock()

    def __call__(self, size: int) -> None:
        with self._guard:
            self.left -= size
        if self.left < 0:
            self.used.set()
            self.ended.wait(300)


# -- faults ------------------------------------------------------------------------------------------------------------


def on(method: str, what: str, change: Callable[[Request, Reply], Reply | None], times: int | None = None) -> Fault:
    """``change`` for requests of this method and kind, the first ``times`` of them."""
    left = [times]
    guard = threading.Lock()

    def fault(request: Request, reply: Reply) -> Reply | None:
        if request.method != method or request.what != what:
            return None
        with guard:
            if left[0] is not None:
                if left[0] <= 0:
                    return None
                left[0] -= 1
        return change(request, reply)

    return fault


def status(code: int, **headers: str) -> Callable[[Request, Reply], Reply]:
    """Another status; header names with _ for -."""
    named = {k.replace("_", "-"): v for k, v in headers.items()}
    return lambda _request, _reply: Reply(code, b"", named)


def held_until(ended: threading.Event) -> Callable[[Request, Reply], Reply]:
    """No word of an answer before ``ended`` is set."""

    def change(_request: Request, reply: Reply) -> Reply:
        ended.wait(300)
        return reply

    return change


def drop_after(count: int) -> Callable[[Request, Reply], Reply]:
    """The connection breaks after ``count`` bytes of the body."""
    return lambda _request, reply: replace(reply, cut=count)


@contextmanager
def storage(registry: Registry, once: bool = False) -> Iterator[Registry]:
    """A second server that the registry redirects blobs to by signed links; it refuses any Authorization (B072).

    With ``once`` a link is dead after its first use.
    """
    links: dict[str, str] = {}

    def serve(request: Request, _reply: Reply) -> Reply:
        if "authorization" in request.headers:
            return Reply(400, b"only one way to authenticate is allowed")
        name = request.query.get("X-Amz-Signature", "")
        digest = links.get(name, "")
        if once:
            links[name] = ""
        if not digest:
            return Reply(403, b"<Error>AccessDenied</Error>")
        return ranged(request, registry.blobs[digest])

    with Registry() as other:
        other.faults.append(serve)

        def redirect(request: Request, reply: Reply) -> Reply | None:
            if request.method != "GET" or request.what != "blobs" or reply.status not in (200, 206):
                return None
            with registry.lock:
                name = f"s1gn3d{len(links)}"
                links[name] = request.path.rpartition("/")[2]
            return Reply(307, b"", {"Location": f"{other.url}/data?X-Amz-Signature={name}"})

        registry.faults.append(redirect)
        yield other
