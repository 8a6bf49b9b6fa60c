"""Functions, their calls, and the containers that answer them: the second half of the control plane's stand-in.

A container is a process in namespaces of its own: processes, mounts with a root put together from this machine's, and,
where the function blocks the network, a network without interfaces. It sees the files that the client uploaded, the
volumes at their mount points, and a temporary folder of its own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shlex
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpclib.server
from google.protobuf.empty_pb2 import Empty
from modal_proto import api_pb2 as pb

from tests.lab.modal_plane import Bind, Message, Objects, Plane, World, build
from tests.lab.modal_plane_images import Images, built, root_script

# How this machine reaches package indexes: a container's network is this machine's.
REACH = ("SSL_CERT_FILE", "SSL_CERT_DIR", "UV_SYSTEM_CERTS", "UV_NATIVE_TLS", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL",
         "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY",
         "NO_PROXY")  # fmt: skip
# An interpreter that has what the image would have, and not the project: else missing sources go unseen.
PYTHON = os.environ.get("FAKEPLANE_PYTHON", sys.executable)
Result = pb.GenericResult


@dataclass
class Call:
    """One function call and the answers that nobody has fetched yet."""

    function: str
    answers: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    open: int = 0


@dataclass
class Task:
    """One container: the input it works on, and what it answered."""

    call: str
    input: str
    index: int
    body: Message
    retry: int
    given: bool = False
    answer: Message | None = None
    failure: str = ""


def token(**values: object) -> str:
    """A web token as the client expects one to look; nobody checks its signature."""
    parts = ({"alg": "none"}, values)
    text = (base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=").decode() for p in parts)
    return ".".join([*text, "x"])


def spec(world: World, function: Message) -> dict[str, Any]:
    """What a function asks for, in plain words."""
    gpu, resources = function.resources.gpu_config, function.resources
    return {
        "name": function.function_name, "module": function.module_name, "gpu": gpu.gpu_type, "gpus": gpu.count,
        "milli_cpu": resources.milli_cpu, "memory_mib": resources.memory_mb, "disk_mib": resources.ephemeral_disk_mb,
        "timeout": function.timeout_secs, "block_network": function.block_network,
        "nonpreemptible": function.scheduler_placement.nonpreemptible,
        "single_use": function.single_use_containers, "no_modal_access": function.untrusted,
        "retries": function.retry_policy.retries if function.HasField("retry_policy") else None,
        "image": function.image_id, "secrets": len(function.secret_ids),
        "volumes": {
            m.mount_path: [world.volumes.get(m.volume_id, ("?", 0))[0], m.read_only] for m in function.volume_mounts
        },
        "files": sorted({name for mount in function.mount_ids for name in world.shipped(mount)}),
    }  # fmt: skip


class Calls:
    """Handlers about functions and their calls."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._layouts: dict[str, Message] = {}
        self._calls: dict[str, Call] = {}
        self._running: set[asyncio.Task[None]] = set()

    # --- definition ---------------------------------------------------------------------------------------------

    def _handle(self, function: str, data: Message) -> Message:
        return build(
            pb.FunctionHandleMetadata, function_name=data.function_name, function_type=data.function_type,
            function_schema=data.function_schema, use_function_id=function, definition_id="de-" + function[3:],
            app_id=self._world.apps.get(function, ""), supported_input_formats=data.supported_input_formats,
            supported_output_formats=data.supported_output_formats,
        )  # fmt: skip

    async def FunctionPrecreate(self, request: Message, stream: Any) -> Message:
        function = request.existing_function_id or self._world.ids.new("fu")
        self._world.apps[function] = request.app_id
        return pb.FunctionPrecreateResponse(function_id=function, handle_metadata=self._handle(function, request))

    async def FunctionCreate(self, request: Message, stream: Any) -> Message:
        name = request.existing_function_id or self._world.ids.new("fu")
        whole = request.HasField("function")
        function = request.function if whole else request.function_data.ranked_functions[0].function
        self._world.functions[name] = function
        self._world.apps[name] = request.app_id
        handle = self._handle(name, function)
        layout = self._layouts.setdefault(request.app_id, pb.AppLayout())
        layout.objects.append(pb.Object(object_id=name, function_handle_metadata=handle))
        self._world.record("function", id=name, **spec(self._world, function))
        ranked = [pb.FunctionData.RankedFunction(rank=0, function=function)]
        data = pb.FunctionData(
            function_name=function.function_name, function_type=function.function_type,
            timeout_secs=function.timeout_secs, ranked_functions=ranked,
        )  # fmt: skip
        return build(
            pb.FunctionCreateResponse, function_id=name, function=function, function_data=data, handle_metadata=handle
        )

    # --- calls --------------------------------------------------------------------------------------------------

    async def FunctionMap(self, request: Message, stream: Any) -> Message:
        call = self._world.ids.new("fc")
        self._calls[call] = Call(request.function_id)
        function = self._world.functions[request.function_id]
        retries = function.retry_policy if function.HasField("retry_policy") else None
        return pb.FunctionMapResponse(
            function_call_id=call, pipelined_inputs=[self._accept(call, i) for i in request.pipelined_inputs],
            function_call_jwt=token(call=call), retry_policy=retries,
            sync_client_retries_enabled=retries is not None, max_inputs_outstanding=1000,
        )  # fmt: skip

    async def FunctionPutInputs(self, request: Message, stream: Any) -> Message:
        return pb.FunctionPutInputsResponse(inputs=[self._accept(request.function_call_id, i) for i in request.inputs])

    async def FunctionRetryInputs(self, request: Message, stream: Any) -> Message:
        tokens = []
        for item in request.inputs:
            old = json.loads(base64.urlsafe_b64decode(item.input_jwt.split(".")[1] + "=="))
            again = pb.FunctionPutInputsItem(idx=old["index"], input=item.input)
            self._world.record("retry", input=old["input"])
            tokens.append(self._accept(old["call"], again, old["retry"] + 1, old["input"]).input_jwt)
        return pb.FunctionRetryInputsResponse(input_jwts=tokens)

    def _accept(self, call: str, item: Message, retry: int = 0, known: str = "") -> Message:
        name = known or self._world.ids.new("in")
        self._calls[call].open += 1
        work = asyncio.get_running_loop().create_task(self._answer(Task(call, name, item.idx, item.input, retry)))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        jwt = token(call=call, input=name, index=item.idx, retry=retry)
        return pb.FunctionPutInputsResponseItem(idx=item.idx, input_id=name, input_jwt=jwt)

    async def FunctionGetOutputs(self, request: Message, stream: Any) -> Message:
        call = self._calls[request.function_call_id]
        try:
            item = await asyncio.wait_for(call.answers.get(), max(request.timeout, 0.01))
        except TimeoutError:
            return pb.FunctionGetOutputsResponse(num_unfinished_inputs=call.open)
        call.open -= 1
        return pb.FunctionGetOutputsResponse(outputs=[item], idxs=[item.idx], num_unfinished_inputs=call.open)

    async def FunctionFinishInputs(self, request: Message, stream: Any) -> Message:
        return Empty()

    async def FunctionCallCancel(self, request: Message, stream: Any) -> Message:
        return Empty()

    # --- containers ---------------------------------------------------------------------------------------------

    async def _answer(self, task: Task) -> None:
        """Run containers until one was not taken away, then pass its answer on."""
        function = self._world.functions[self._calls[task.call].function]
        late = taken = True
        name, status = "", 0
        while taken:
            task.given, task.answer = False, None
            name = self._world.ids.new("ta")
            late, taken, status = await self._contain(name, task, function)
        answer = task.answer or pb.FunctionGetOutputsItem(result=_no_answer(task, function, late, status))
        answer.idx, answer.input_id, answer.retry_count, answer.task_id = task.index, task.input, task.retry, name
        await self._calls[task.call].answers.put(answer)

    async def _contain(self, name: str, task: Task, function: Message) -> tuple[bool, bool, int]:
        """One container to its end: (was it over its time, was it taken away, its exit status)."""
        place = self._world.root / "tasks" / name
        command = self._prepare(place, name, function)
        # A socket's path is at most 107 bytes; pytest's folders are longer.
        socket = f"{self._world.sockets}/{name}"
        server = grpclib.server.Server([Plane(self._world, [Objects(self._world), Images(self._world), Inside(self._world, task)])])
        await server.start(path=socket)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=place, env=self._environment(place, name, function, socket), stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True, limit=1 << 24,
        )  # fmt: skip
        self._world.record("container", task=name, function=function.function_name, input=task.input)
        app = self._world.apps[self._calls[task.call].function]
        self._world.running.setdefault(app, set()).add(process.pid)
        channels = ((process.stdout, pb.FILE_DESCRIPTOR_STDOUT), (process.stderr, pb.FILE_DESCRIPTOR_STDERR))
        pumps = [asyncio.create_task(self._pump(stream, app, name, kind)) for stream, kind in channels]
        try:
            late, taken = await self._wait(process, task, function)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        self._world.running.get(app, set()).discard(process.pid)
        await asyncio.gather(*pumps)
        server.close()
        self._world.record("exit", task=name, function=function.function_name, status=process.returncode, late=late,
                           preempted=taken)  # fmt: skip
        shutil.rmtree(place / "files", ignore_errors=True)
        return late, taken, process.returncode

    async def _wait(self, process: Any, task: Task, function: Message) -> tuple[bool, bool]:
        stays = function.scheduler_placement.nonpreemptible
        if not stays and self._world.faults.once("preempt", function.function_name):
            while not task.given and process.returncode is None:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
            return False, True
        limit = self._world.faults.get("deadline", function.timeout_secs)
        try:
            await asyncio.wait_for(process.wait(), limit)
        except TimeoutError:
            return True, False
        return False, False

    def _prepare(self, place: Path, name: str, function: Message) -> list[str]:
        files = place / "files"
        (files / "root").mkdir(parents=True)
        (place / "tmp").mkdir()
        for mount in function.mount_ids:
            for file in self._world.mounts.get(mount, []):
                path = files / file.filename.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._world.files[file.sha256_hex])
                path.chmod((file.mode & 0o777) or 0o644)
        for changed, text in self._world.faults.get("files", {}).items():
            (files / changed.lstrip("/")).write_text(text)
        arguments = pb.ContainerArguments(
            task_id=name, function_id=self._function_id(function), app_id=self._app_of(function), function_def=function,
            app_layout=self._layout(function), environment_name="main",
        )  # fmt: skip
        (place / "arguments").write_bytes(arguments.SerializeToString())
        flags = ["--net"] if function.block_network else []
        inner = ["sh", "-euc", self._script(place, function), "sh", PYTHON]
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", *flags, *inner]

    def _script(self, place: Path, function: Message) -> str:
        """Shell text that starts the runtime with ``$1``, its interpreter, in the container's root."""
        files = [Bind(top, top.name) for top in sorted((place / "files").iterdir()) if top.name != "root"]
        binds = [*built(self._world, function.image_id), *files, *self._world.mounted(function.volume_mounts)]
        # Not exec: the shell is process 1, which takes in orphans.
        run = [f"cd {shlex.quote(str(place / 'files/root'))}",
               'status=0; "$1" -m modal._container_entrypoint || status=$?; exit "$status"']  # fmt: skip
        return root_script(place / "newroot", binds, run, online=not function.block_network)

    def _environment(self, place: Path, name: str, function: Message, socket: str) -> dict[str, str]:
        found = {
            **{name: os.environ[name] for name in REACH if name in os.environ}, "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}", "HOME": "/root", "LANG": "C.UTF-8", "TMPDIR": str(place / "tmp"),
            "PYTHONPATH": str(place / "files/root"), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1",
            "MODAL_CONTAINER_ARGUMENTS_PATH": str(place / "arguments"), "MODAL_TASK_ID": name, "MODAL_IS_REMOTE": "1",
            "MODAL_SERVER_URL": f"unix://{socket}", "MODAL_IMAGE_ID": function.image_id,
            "MODAL_ENVIRONMENT": "main", "FAKEPLANE_ROOTFS": str(place / "files"),
        }  # fmt: skip
        if function.resources.gpu_config.gpu_type and (driver := self._world.faults.get("driver", "")):
            found["LD_LIBRARY_PATH"] = driver
        for secret in function.secret_ids:
            found.update(self._world.secrets.get(secret, {}))
        return found

    def _function_id(self, function: Message) -> str:
        return next(name for name, known in self._world.functions.items() if known is function)

    def _app_of(self, function: Message) -> str:
        return self._world.apps[self._function_id(function)]

    def _layout(self, function: Message) -> Message:
        layout = pb.AppLayout()
        layout.CopyFrom(self._layouts[self._app_of(function)])
        known = {o.object_id for o in layout.objects}
        for name in (d.object_id for d in function.object_dependencies if d.object_id not in known):
            item = pb.Object(object_id=name)
            if name in self._world.volumes:
                volume, version = self._world.volumes[name]
                item.volume_metadata.CopyFrom(pb.VolumeMetadata(name=volume, version=version))
            elif name in self._world.mounts:
                item.mount_handle_metadata.CopyFrom(pb.MountHandleMetadata(content_checksum_sha256_hex="0"))
            layout.objects.append(item)
        return layout

    async def _pump(self, stream: Any, app: str, task: str, channel: int) -> None:
        async for line in stream:
            await self._world.log_of(app).put((task, channel, line.decode(errors="replace")))


class Inside:
    """What a container's runtime asks. Each container has its own socket: requests do not say whose they are."""

    def __init__(self, world: World, task: Task) -> None:
        self._world = world
        self._task = task

    async def ContainerHello(self, request: Message, stream: Any) -> Message:
        return Empty()

    async def ContainerHeartbeat(self, request: Message, stream: Any) -> Message:
        await asyncio.sleep(5)
        return pb.ContainerHeartbeatResponse()

    async def FunctionGetInputs(self, request: Message, stream: Any) -> Message:
        if self._task.given:
            return pb.FunctionGetInputsResponse(inputs=[pb.FunctionGetInputsItem(kill_switch=True)])
        self._task.given = True
        item = build(
            pb.FunctionGetInputsItem, input_id=self._task.input, input=self._task.body,
            function_call_id=self._task.call, retry_count=self._task.retry,
            function_call_invocation_type=pb.FUNCTION_CALL_INVOCATION_TYPE_SYNC,
        )  # fmt: skip
        return pb.FunctionGetInputsResponse(inputs=[item])

    async def FunctionPutOutputs(self, request: Message, stream: Any) -> Message:
        for output in request.outputs:
            self._task.answer = pb.FunctionGetOutputsItem(result=output.result, data_format=output.data_format)
        return Empty()

    async def TaskResult(self, request: Message, stream: Any) -> Message:
        self._task.failure = request.result.exception
        return Empty()


def _no_answer(task: Task, function: Message, late: bool, status: int) -> Message:
    if late:
        text = f"Task's current input {task.input} hit its timeout of {function.timeout_secs}s"
        return Result(status=Result.GENERIC_STATUS_TIMEOUT, exception=text)
    return Result(status=Result.GENERIC_STATUS_FAILURE, exception=task.failure or f"the container ended with {status} and no answer")
