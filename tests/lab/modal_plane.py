"""A stand-in for Modal's control plane, so that the real ``modal run`` can be tried with no account and no network.

Real: the client, its upload of sources, the protocol messages, pickling, and the container runtime
(``python -m modal._container_entrypoint``), which sees the uploaded files only. Not real: image builds (recorded; the
one step that reads a volume can be run, ``modal_plane_images``), GPUs, prices, quotas, and whatever Modal's servers check.
Every container is marked with ``FAKEPLANE_ROOTFS``, and
a receipt made in one says ``engine: fake``.

``python -m tests.lab.modal_plane FOLDER`` serves until it is killed. In FOLDER: ``port`` (the URL, once it serves),
``events.jsonl`` (what arrived), ``volumes/NAME`` (their files), and ``faults.json``, read at each use (``Faults``).
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpclib.const
import grpclib.server
from aiohttp import web
from google.protobuf import message_factory
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from modal_proto import api_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["ModalClient"]
BUILDER = "2025.06"
Message = Any


def build(cls: Any, **values: Any) -> Message:
    """A message; fields that this client's version does not have are left out (they come and go between versions)."""
    known = {f.name for f in cls.DESCRIPTOR.fields}
    return cls(**{name: value for name, value in values.items() if name in known and value is not None})


class Faults:
    """What goes wrong, as ``faults.json`` says.

    ``rpc``: name -> [status, message]; ``image``: why image builds fail; ``preempt``: function names, each taken away
    once; ``deadline``: seconds that stand for every timeout; ``volumes``: name -> version that it has already;
    ``images``: ids that ``from_id`` knows; ``secrets``: name -> variables;
    ``build``: run the steps of images that read a volume; ``driver``: folder of the libcuda.so.1 that functions with a
    GPU see; ``uploads``: how often each upload over HTTP is answered 503; ``files``: path in containers -> other content than was uploaded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spent: set[str] = set()

    def get(self, name: str, default: Any) -> Any:
        """The entry of that name, now."""
        try:
            return json.loads(self._path.read_text()).get(name, default)
        except FileNotFoundError:
            return default

    def once(self, name: str, item: str) -> bool:
        """True the first time that ``item`` stands in the list ``name``."""
        if item not in self.get(name, []) or f"{name}/{item}" in self._spent:
            return False
        self._spent.add(f"{name}/{item}")
        return True


class Ids:
    """Names of objects, in Modal's form."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def new(self, prefix: str) -> str:
        """The next name, such as ``fu-000001``."""
        self._count[prefix] += 1
        return f"{prefix}-{self._count[prefix]:06d}"


class Bind(NamedTuple):
    """A file or folder of this machine, and where a root shows it."""

    source: Path
    target: str
    read_only: bool = False


class World:
    """All state that handlers share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ids = Ids()
        self.faults = Faults(root / "faults.json")
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.mounts: dict[str, list[Message]] = {}
        self.images: dict[str, Message] = {}
        self.volumes: dict[str, tuple[str, int]] = {}
        self.secrets: dict[str, dict[str, str]] = {}
        self.functions: dict[str, Message] = {}
        self.apps: dict[str, str] = {}
        self.logs: dict[str, asyncio.Queue[Any]] = {}
        self.running: dict[str, set[int]] = {}
        self.sockets = ""
        self.blob_url = ""

    def record(self, kind: str, **values: Any) -> None:
        """One line of ``events.jsonl``."""
        with (self.root / "events.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    def log_of(self, app: str) -> asyncio.Queue[Any]:
        """The queue of an app's log lines."""
        return self.logs.setdefault(app, asyncio.Queue())

    def end_app(self, app: str, why: str) -> None:
        """End an app's containers, as the service does when its client has gone."""
        for group in self.running.pop(app, ()):
            self.record("ended", app=app, why=why)
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def mounted(self, mounts: Any) -> list[Bind]:
        """A function's or an image's volumes, at their mount points."""
        places = (self.root / "volumes" / self.volumes[m.volume_id][0] for m in mounts)
        return [Bind(place, m.mount_path.lstrip("/"), m.read_only) for place, m in zip(places, mounts, strict=True)]

    def shipped(self, mount: str) -> list[str]:
        """Names of a mount's files."""
        return sorted(f.filename for f in self.mounts.get(mount, []))


Handler = Callable[[Message, Any], Any]


class Plane:
    """The gRPC service: handlers are the methods of its parts whose names are those of RPCs."""

    def __init__(self, world: World, parts: list[Any]) -> None:
        self._world = world
        self._parts = parts

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        found = {}
        for method in SERVICE.methods:
            request, reply = (message_factory.GetMessageClass(t) for t in (method.input_type, method.output_type))
            shape = grpclib.const.Cardinality
            kind = shape.UNARY_STREAM if method.server_streaming else shape.UNARY_UNARY
            handler = grpclib.const.Handler(self._serve(method.name, reply), kind, request, reply)
            found[f"/{SERVICE.full_name}/{method.name}"] = handler
        return found

    def _serve(self, name: str, reply: Any) -> Callable[[Any], Any]:
        handler: Handler | None = next((getattr(p, name) for p in self._parts if hasattr(p, name)), None)

        async def serve(stream: Any) -> None:
            request = await stream.recv_message()
            fault = self._world.faults.get("rpc", {}).get(name)
            if fault:
                raise GRPCError(Status[fault[0]], fault[1])
            if handler is None:
                self._world.record("unknown", rpc=name)
                raise GRPCError(Status.UNIMPLEMENTED, f"the stand-in has no {name}")
            if inspect.isasyncgenfunction(handler):
                async for message in handler(request, stream):
                    await stream.send_message(message)
            else:
                await stream.send_message(await handler(request, stream) or reply())

        return serve


class Objects:
    """Workspace, apps, sources, images, volumes and secrets."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._streams: Counter[str] = Counter()
        self._lost: list[asyncio.Task[None]] = []

    async def ClientHello(self, request: Message, stream: Any) -> None:
        pass

    async def AuthTokenGet(self, request: Message, stream: Any) -> Message:
        return pb.AuthTokenGetResponse(token="e30.eyJleHAiOjQxMDI0NDQ4MDB9.x")

    async def EnvironmentGetOrCreate(self, request: Message, stream: Any) -> Message:
        settings = pb.EnvironmentSettings(image_builder_version=BUILDER)
        metadata = pb.EnvironmentMetadata(name=request.deployment_name or "main", settings=settings)
        return pb.EnvironmentGetOrCreateResponse(environment_id="en-000001", metadata=metadata)

    async def AppCreate(self, request: Message, stream: Any) -> Message:
        app = self._world.ids.new("ap")
        token = stream.metadata.get("x-modal-token-id", "")
        self._world.record("app", id=app, name=request.description, token=token)
        url = f"http://localhost/{app}"
        return pb.AppCreateResponse(app_id=app, app_page_url=url, app_logs_url=url)

    async def AppHeartbeat(self, request: Message, stream: Any) -> None:
        pass

    async def AppPublish(self, request: Message, stream: Any) -> None:
        pass

    async def AppClientDisconnect(self, request: Message, stream: Any) -> None:
        reason = pb.AppDisconnectReason.Name(request.reason)
        self._world.record("disconnect", reason=reason, exception=request.exception)
        self._world.end_app(request.app_id, reason)
        await self._world.log_of(request.app_id).put(None)

    async def AppGetLogs(self, request: Message, stream: Any) -> AsyncIterator[Message]:
        lines = self._world.log_of(request.app_id)
        self._streams[request.app_id] += 1
        while True:
            try:
                line = await asyncio.wait_for(lines.get(), request.timeout or 55)
            except TimeoutError:
                return
            except asyncio.CancelledError:
                self._lost.append(asyncio.create_task(self._end_unless_back(request.app_id, self._streams[request.app_id])))
                raise
            if line is None:
                yield pb.TaskLogsBatch(app_done=True)
                return
            task, channel, text = line
            entry = pb.TaskLogs(data=text, file_descriptor=channel)
            yield pb.TaskLogsBatch(entry_id=self._world.ids.new("entry"), task_id=task, items=[entry])

    async def _end_unless_back(self, app: str, stream: int) -> None:
        """The service ends an App whose client's heartbeats it misses; here, one whose connection has gone for good."""
        await asyncio.sleep(10)
        if self._streams[app] == stream:
            self._world.end_app(app, "lost")

    async def MountBatchedCheckExistence(self, request: Message, stream: Any) -> Message:
        missing = [h for h in request.sha256_hex_hashes if h not in self._world.files]
        return pb.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    async def MountPutFile(self, request: Message, stream: Any) -> Message:
        kind = request.WhichOneof("data_oneof")
        if kind is None:
            return pb.MountPutFileResponse(exists=request.sha256_hex in self._world.files)
        data = request.data if kind == "data" else self._world.blobs[request.data_blob_id]
        if hashlib.sha256(data).hexdigest() != request.sha256_hex:
            raise GRPCError(Status.INVALID_ARGUMENT, "a file is not what its hash says")
        self._world.files[request.sha256_hex] = data
        return pb.MountPutFileResponse(exists=True)

    async def MountGetOrCreate(self, request: Message, stream: Any) -> Message:
        content = sorted(f.SerializeToString(deterministic=True) for f in request.files)
        checksum = hashlib.sha256(b"".join([request.deployment_name.encode(), *content])).hexdigest()
        mount = f"mo-{checksum[:22]}"
        self._world.mounts[mount] = list(request.files)
        metadata = pb.MountHandleMetadata(content_checksum_sha256_hex=checksum)
        return pb.MountGetOrCreateResponse(mount_id=mount, handle_metadata=metadata)

    async def VolumeGetOrCreate(self, request: Message, stream: Any) -> Message:
        name = request.deployment_name
        volume = "vo-" + hashlib.sha256(name.encode()).hexdigest()[:12]
        there = self._world.faults.get("volumes", {}).get(name)
        folder = self._world.root / "volumes" / name
        if (
            request.object_creation_type == pb.OBJECT_CREATION_TYPE_UNSPECIFIED
            and there is None
            and not folder.is_dir()
        ):
            raise GRPCError(Status.NOT_FOUND, f"Volume '{name}' not found")
        folder.mkdir(parents=True, exist_ok=True)
        version = int(there if there is not None else request.version)
        if volume not in self._world.volumes:
            self._world.record("volume", id=volume, name=name, version=version, asked=request.version)
        self._world.volumes[volume] = (name, version)
        metadata = pb.VolumeMetadata(name=name, version=version)
        return pb.VolumeGetOrCreateResponse(volume_id=volume, version=version, metadata=metadata)

    async def VolumeCommit(self, request: Message, stream: Any) -> Message:
        self._world.record("commit", volume=self._world.volumes[request.volume_id][0])
        return pb.VolumeCommitResponse(skip_reload=True)

    async def SecretGetOrCreate(self, request: Message, stream: Any) -> Message:
        secret = self._world.ids.new("st")
        values = dict(request.env_dict)
        if request.deployment_name and not values:
            known = self._world.faults.get("secrets", {})
            if request.deployment_name not in known:
                raise GRPCError(Status.NOT_FOUND, f"Secret '{request.deployment_name}' not found")
            values = known[request.deployment_name]
        self._world.secrets[secret] = values
        return pb.SecretGetOrCreateResponse(secret_id=secret)

    async def BlobCreate(self, request: Message, stream: Any) -> Message:
        blob = self._world.ids.new("bl")
        url = f"{self._world.blob_url}/{blob}"
        urls = pb.UploadUrlList(items=[url])
        return build(pb.BlobCreateResponse, blob_id=blob, blob_ids=[blob], upload_url=url, upload_urls=urls)

    async def BlobGet(self, request: Message, stream: Any) -> Message:
        return pb.BlobGetResponse(download_url=f"{self._world.blob_url}/{request.blob_id}")


async def _serve_blobs(world: World) -> None:
    """What is larger than a message travels over HTTP."""

    refused: Counter[str] = Counter()

    async def put(request: web.Request) -> web.Response:
        blob = request.match_info["id"]
        refused[blob] += 1
        if refused[blob] <= world.faults.get("uploads", 0):
            return web.Response(status=503, text="busy")
        data = world.blobs[blob] = await request.read()
        return web.Response(headers={"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    async def get(request: web.Request) -> web.Response:
        return web.Response(body=world.blobs[request.match_info["id"]])

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.put("/{id}", put), web.get("/{id}", get)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    world.blob_url = f"http://{host}:{port}"


async def serve(root: Path) -> None:
    """Serve until stopped: TCP for the client, a socket file for each container, which may have no network."""
    from tests.lab.modal_plane_calls import Calls
    from tests.lab.modal_plane_images import Images

    logging.getLogger("grpclib").setLevel(logging.CRITICAL)
    root.mkdir(parents=True, exist_ok=True)
    world = World(root)
    await _serve_blobs(world)
    outside = grpclib.server.Server([Plane(world, [Objects(world), Images(world), Calls(world)])])
    with tempfile.TemporaryDirectory(prefix="plane-", dir="/tmp") as world.sockets:
        await outside.start("127.0.0.1", 0)
        assert outside._server is not None
        port = outside._server.sockets[0].getsockname()[1]
        (root / "port.new").write_text(f"http://127.0.0.1:{port}")
        (root / "port.new").rename(root / "port")
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]).resolve()))
