"""A stand-in for the Hub: the calls that ``huggingface_hub`` makes for a dataset, in memory, on loopback, with faults.

A second server on another port plays the storage host: uploads go there, downloads are redirected there, and a request
that arrives there with an Authorization header is refused, as the real one does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"
LFS_FROM = 1000  # bytes from which a file is "lfs"
Fault = Callable[["Request"], "Answer | None"]


@dataclass(frozen=True)
class Request:
    """What came in: ``server`` is ``hub`` or ``store``."""

    server: str
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What goes out; ``cut`` closes the connection after so many bytes of the body."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


@dataclass
class FakeHub:
    """The state, and the two servers while entered.

    Attributes:
        commits: oldest first, each (id, files); a file is its bytes.
        blobs: LFS objects by sha256.
        log: every request.
        faults: asked first, in order; the first answer wins.
        chunk: multipart chunk size; 0: single part uploads.
    """

    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=lambda: [("0" * 40, {})])
    blobs: dict[str, bytes] = field(default_factory=dict)
    pieces: dict[tuple[str, int], bytes] = field(default_factory=dict)
    log: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    chunk: int = 0
    exists: bool = True

    def __enter__(self) -> FakeHub:
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, name)) for name in ("hub", "store")]
        for server in self._servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        """The Hub's endpoint."""
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def store(self) -> str:
        """The storage host's endpoint."""
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    @property
    def files(self) -> dict[str, bytes]:
        """The newest commit's files."""
        return self.commits[-1][1]

    def add_commit(self, changes: dict[str, bytes]) -> str:
        """A commit on top, by somebody."""
        new = {**self.files, **changes}
        name = hashlib.sha1(repr((self.commits[-1][0], sorted(new))).encode()).hexdigest()
        self.commits.append((name, new))
        return name

    def sent(self, method: str, part: str) -> list[Request]:
        """Requests with that method whose path contains ``part``."""
        return [r for r in self.log if r.method == method and part in r.path]

    def answer(self, request: Request) -> Answer:
        """Route one request."""
        self.log.append(request)
        for fault in self.faults:
            found = fault(request)
            if found is not None:
                return found
        if request.server == "store":
            if "authorization" in request.headers:
                return Answer(400, b"credentials do not belong here")
            return self._store(request)
        # The completion link of a multipart upload is signed, and comes without the token.
        if not request.path.startswith("/complete/") and request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _json({"error": "Invalid credentials"}, 401)
        return self._hub(request)

    def _hub(self, r: Request) -> Answer:
        if r.path == "/api/repos/create":
            return _json({"url": f"{self.url}/datasets/o/r"}, 409 if self.exists else 200)
        if r.path == "/api/validate-yaml":
            return _json({"warnings": [], "errors": []})
        if r.path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(r.body))
        if r.path.startswith("/complete/"):
            return self._complete(json.loads(r.body))
        if "/resolve/" in r.path:
            return self._resolve(r)
        action = r.path.removeprefix("/api/datasets/o/r/").split("/")[0]
        handlers = {
            "revision": self._revision, "preupload": self._preupload, "paths-info": self._paths, "commit": self._commit,
        }  # fmt: skip
        return handlers[action](r) if action in handlers else _json({"error": "not found"}, 404)

    def _revision(self, _r: Request) -> Answer:
        return _json({"id": "o/r", "sha": self.commits[-1][0], "siblings": [], "tags": []})

    def _preupload(self, r: Request) -> Answer:
        files = []
        for item in json.loads(r.body)["files"]:
            lfs = item["size"] >= LFS_FROM
            old = self.files.get(item["path"])
            oid = None if old is None else hashlib.sha256(old).hexdigest() if lfs else _git(old)
            mode = "lfs" if lfs else "regular"
            files.append({"path": item["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return _json({"files": files})

    def _paths(self, r: Request) -> Answer:
        out = []
        for path in parse_qs(r.body.decode())["paths"]:
            data = self._at(r.path.rsplit("/", 1)[1]).get(path)
            if data is not None:
                entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _git(data)}
                if len(data) >= LFS_FROM:
                    oid = hashlib.sha256(data).hexdigest()
                    entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 130}
                out.append(entry)
        return _json(out)

    def _at(self, revision: str) -> dict[str, bytes]:
        return next((files for name, files in self.commits if name == revision), self.files)

    def _batch(self, body: dict[str, Any]) -> Answer:
        objects = [self._action(item) for item in body["objects"]]
        return _json({"transfer": "multipart" if self.chunk else "basic", "objects": objects})

    def _action(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["oid"] in self.blobs:
            return item
        if not self.chunk:
            return {**item, "actions": {"upload": {"href": f"{self.store}/put/{item['oid']}?X-Amz-Signature=s3cr3t"}}}
        count = -(-item["size"] // self.chunk)
        urls = {str(i + 1): f"{self.store}/piece/{item['oid']}/{i + 1}?sig=s3cr3t" for i in range(count)}
        header = {"chunk_size": str(self.chunk), **urls}
        return {**item, "actions": {"upload": {"href": f"{self.url}/complete/{item['oid']}", "header": header}}}

    def _complete(self, body: dict[str, Any]) -> Answer:
        data = b"".join(self.pieces[body["oid"], p["partNumber"]] for p in body["parts"])
        if hashlib.sha256(data).hexdigest() != body["oid"]:
            return _json({"error": "hash mismatch"}, 400)
        self.blobs[body["oid"]] = data
        return _json({})

    def _commit(self, r: Request) -> Answer:
        lines = [json.loads(line) for line in r.body.splitlines()]
        parent = lines[0]["value"].get("parentCommit")
        if parent is not None and parent != self.commits[-1][0]:
            return _json({"error": "A commit has happened since. Please refresh and try again."}, 412)
        changes = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile" and value["oid"] not in self.blobs:
                return _json({"error": "LFS object missing"}, 400)
            lfs = line["key"] == "lfsFile"
            changes[value["path"]] = self.blobs[value["oid"]] if lfs else base64.b64decode(value["content"])
        oid = self.add_commit(changes)
        return _json({"commitUrl": f"{self.url}/datasets/o/r/commit/{oid}", "commitOid": oid, "pullRequestUrl": None})

    def _resolve(self, r: Request) -> Answer:
        revision, path = r.path.split("/resolve/", 1)[1].split("/", 1)
        data = self._at(revision).get(unquote(path))
        if data is None:
            return _json({"error": "Entry not found"}, 404)
        if len(data) < LFS_FROM:
            return Answer(200, data)
        return Answer(302, b"", {"Location": f"{self.store}/get/{revision}/{path}?X-Amz-Signature=s3cr3t"})

    def _store(self, r: Request) -> Answer:
        kind, name = r.path.strip("/").split("/", 1)
        if kind == "put":
            if hashlib.sha256(r.body).hexdigest() != name:
                return Answer(400, b"hash mismatch")
            self.blobs[name] = r.body
            return Answer(200)
        if kind == "piece":
            oid, number = name.split("/")
            self.pieces[oid, int(number)] = r.body
            return Answer(200, headers={"ETag": hashlib.sha256(r.body).hexdigest()})
        revision, path = name.split("/", 1)
        data = self._at(revision)[unquote(path)]
        asked = r.headers.get("range")
        if asked is None:
            return Answer(200, data)
        start = int(asked.removeprefix("bytes=").split("-")[0])
        return Answer(206, data[start:], {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"})


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _handler(hub: FakeHub, name: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            headers = {k.lower(): v for k, v in self.headers.items()}
            body = self._body(headers)
            answer = hub.answer(Request(name, self.command, parts.path, parse_qs(parts.query), headers, body))
            self.send_response(answer.status)
            for key, value in answer.headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[: answer.cut])
            if answer.cut is not None:
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)

        def _body(self, headers: dict[str, str]) -> bytes:
            if headers.get("transfer-encoding") == "chunked":
                out = b""
                while size := int(self.rfile.readline(), 16):
                    out += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return out
            return self.rfile.read(int(headers.get("content-length", 0)))

        do_GET = do_POST = do_PUT = do_HEAD = _serve

        def log_message(self, *_args: Any) -> None:
            pass

    return Handler


def times(count: int, when: Callable[[Request], bool], answer: Answer) -> Fault:
    """A fault that answers the first ``count`` requests that ``when`` picks."""
    left = [count]

    def fault(request: Request) -> Answer | None:
        if left[0] <= 0 or not when(request):
            return None
        left[0] -= 1
        return answer

    return fault
