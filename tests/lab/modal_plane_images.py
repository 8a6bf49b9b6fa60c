"""Images of the control plane's stand-in, and the roots of its containers.

An image's recipe is recorded, and the root of whatever runs in it is put together from this machine's: there is no
Ubuntu here. With the fault ``build`` the steps that read a volume are run for real: these are the project's own and not
Ubuntu's packages. What such a step leaves in ``GROWN`` is the image's from then on, and its os-release says what the
recipe begins with.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from modal_proto import api_pb2 as pb

from tests.lab.modal_plane import BUILDER, Bind, Message, World

# The one folder that a step may leave something in: all else of its root is this machine's, and cannot be written to.
GROWN = "opt/oci-builder"
# Loopback is up where the network is blocked: programs of one container may talk to each other.
LOOPBACK = "import fcntl,socket,struct;fcntl.ioctl(socket.socket(),0x8914,struct.pack('16sh',b'lo',1))"
_SUCCESS, _FAILURE = pb.GenericResult.GENERIC_STATUS_SUCCESS, pb.GenericResult.GENERIC_STATUS_FAILURE


class Images:
    """Handlers about images."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def ImageGetOrCreate(self, request: Message, stream: Any) -> Message:
        image = request.image
        # Equal recipes are one image, as with Modal's cache.
        name = "im-" + hashlib.sha256(image.SerializeToString(deterministic=True)).hexdigest()[:22]
        metadata = pb.ImageMetadata(image_builder_version=request.builder_version)
        if name not in self._world.images:
            self._world.images[name] = image
            self._world.record(
                "image", id=name, base=[b.image_id for b in image.base_images],
                commands=list(image.dockerfile_commands), context=self._world.shipped(image.context_mount_id),
                volumes=sorted(self._world.volumes.get(m.volume_id, ("?", 0))[0] for m in image.volume_mounts),
            )  # fmt: skip
        if image.volume_mounts and self._world.faults.get("build", False) and not self._place(name).exists():
            return pb.ImageGetOrCreateResponse(image_id=name, metadata=metadata)
        failure = self._world.faults.get("image", "")
        result = pb.GenericResult(status=_FAILURE if failure else _SUCCESS, exception=failure)
        return pb.ImageGetOrCreateResponse(image_id=name, result=result, metadata=metadata)

    async def ImageJoinStreaming(self, request: Message, stream: Any) -> AsyncIterator[Message]:
        """Build it, its output as it comes."""
        result = pb.GenericResult(status=_SUCCESS)
        place = self._place(request.image_id)
        if not place.exists():
            shutil.rmtree(partial := place.with_suffix(".partial"), ignore_errors=True)
            (partial / "tmp").mkdir(parents=True)
            (partial / "grown").mkdir()
            process = await asyncio.create_subprocess_exec(
                *self._command(request.image_id, partial), cwd=partial, start_new_session=True,
                env={"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8", "TMPDIR": str(partial / "tmp")},
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            assert process.stdout is not None
            async for line in process.stdout:
                yield pb.ImageJoinStreamingResponse(task_logs=[pb.TaskLogs(data=line.decode(errors="replace"))])
            if status := await process.wait():
                result = pb.GenericResult(status=_FAILURE, exception=f"a step of the image ended with {status}")
            else:
                partial.rename(place)
            self._world.record("build", id=request.image_id, status=status)
        yield pb.ImageJoinStreamingResponse(result=result)

    async def ImageFromId(self, request: Message, stream: Any) -> Message:
        known = {*self._world.images, *self._world.faults.get("images", [])}
        if request.image_id not in known:
            raise GRPCError(Status.NOT_FOUND, f"Image {request.image_id} not found")
        self._world.record("image_from_id", id=request.image_id)
        metadata = pb.ImageMetadata(image_builder_version=BUILDER)
        return pb.ImageFromIdResponse(image_id=request.image_id, metadata=metadata)

    def _place(self, image: str) -> Path:
        return self._world.root / "images" / image

    def _command(self, name: str, place: Path) -> list[str]:
        image = self._world.images[name]
        files = place / "copied"
        for above in chain(self._world, name):
            for file in self._world.mounts.get(above.context_mount_id, []):
                path = files / file.filename.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._world.files[file.sha256_hex])
        binds = [
            *(Bind(top, top.name) for top in (sorted(files.iterdir()) if files.is_dir() else ())),
            Bind(place / "grown", GROWN), *self._world.mounted(image.volume_mounts), *_release(self._world, name, place),
        ]  # fmt: skip
        steps = [line.partition(" ")[2] for line in image.dockerfile_commands if line.startswith("RUN ")]
        run = [f"sh -c {shlex.quote(step)}" for step in steps]
        script = root_script(place / "newroot", binds, run, writable=self._world.root)
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", script]


def chain(world: World, name: str) -> Iterator[Message]:
    """The recipes of an image, its own first."""
    while name in world.images:
        yield world.images[name]
        name = next((base.image_id for base in world.images[name].base_images), "")


def built(world: World, name: str) -> list[Bind]:
    """What the built steps of an image put into its root; nothing where none were run."""
    known = {id(image): known for known, image in world.images.items()}
    for image in chain(world, name):
        place = world.root / "images" / known[id(image)]
        if place.is_dir():
            return [Bind(place / "grown", GROWN), *_release(world, name, place)]
    return []


def _release(world: World, name: str, place: Path) -> list[Bind]:
    """An os-release that says what the recipe begins with."""
    (*_, first) = chain(world, name)
    found = re.match(r"FROM ([a-z]+):([0-9.]+)\Z", first.dockerfile_commands[0])
    assert found is not None, first.dockerfile_commands
    file = place / "os-release"
    file.write_text('ID={}\nVERSION_ID="{}"\n'.format(*found.groups()))
    return [Bind(file, "etc/os-release")]


def root_script(
    new: Path, binds: Sequence[Bind], run: Sequence[str], *, online: bool = True, writable: Path | None = None
) -> str:
    """Shell text that puts a root together from this machine's folders and ``binds``, and runs ``run`` in it.

    New folders of the root appear in it only; nothing is made on this machine.

    Args:
        writable: only the top folder that this lies in can be written to, of this machine's; None: all can.
    """
    quote = shlex.quote
    lines = [f"mkdir {quote(str(new))}", f"mount -t tmpfs plane {quote(str(new))}", f"cd {quote(str(new))}"]
    # A folder that gets new ones beside its own is made anew, with its own in it.
    opened = {parts[0] for bind in binds if len(parts := Path(bind.target).parts) > 1 and not bind.source.is_file()}
    for item in sorted(Path("/").iterdir()):
        if item.name == "proc":
            continue
        if item.is_dir() and not item.is_symlink() and item.name in opened:
            lines += [f"mkdir {quote(item.name)}", *(_line(below) for below in sorted(item.iterdir()))]
            continue
        lines.append(_line(item))
        kept = writable is None or writable.is_relative_to(item) or item.name in ("dev", "sys", "tmp")
        if item.is_dir() and not item.is_symlink() and not kept:
            lines.append(f"mount -o remount,bind,ro {quote(item.name)}")
    lines += ["mkdir proc && mount -t proc proc proc", "mkdir .old"]
    for bind in binds:
        target = quote(bind.target)
        lines.append(f"mount --bind {quote(str(bind.source))} {target}")
        if bind.source.is_dir():
            lines[-1] = f"mkdir -p {target} && {lines[-1]}"
        if bind.read_only:
            lines.append(f"mount -o remount,bind,ro {target}")
    lines += ["pivot_root . .old", "umount -l /.old", "cd /"]
    if not online:
        lines += ["mount -t sysfs sys /sys || true", f'"$1" -c {quote(LOOPBACK)}']
    return "\n".join([*lines, *run])


def _line(item: Path) -> str:
    name = shlex.quote(str(item).lstrip("/"))
    if item.is_symlink():
        return f"cp -P /{name} {name}"
    if item.is_dir():
        return f"mkdir {name} && mount --rbind /{name} {name}"
    return f"true {name}"  # a file at the top of a root is nobody's
