"""A Docker Engine as a destination: load an archive, and hold the engine's name for it against what was foretold.

The only file that imports the docker SDK. An engine gives an image one of two IDs: the config's digest in its classic
store, the manifest's in its containerd store; ``container.json`` foretells both (``image_ids``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.model.errors import CheckFailed, SpecError, TransportError, disk_error, show
from oci_builder.model.events import Emit, Event, silent

TIMEOUT_SECONDS = 600
_BLOCK = 1 << 20
CLASSIC, CONTAINERD = "classic", "containerd"


@dataclass(frozen=True, slots=True)
class Loaded:
    """An image in an engine.

    Attributes:
        reference: the name that was asked for.
        image_id: as the engine says it, ``sha256:…``.
        store: ``classic`` or ``containerd``, by the ID that it has.
        engine: version of the engine.
    """

    reference: str
    image_id: str
    store: str
    engine: str


def load_into_engine(
    archive: Path, container: Mapping[str, Any], *, url: str | None = None, emit: Emit = silent
) -> Loaded:
    """Load an image archive and check that the engine has the image that the record foretells. Idempotent.

    Args:
        archive: ``runtime.docker.tar.gz`` or ``runtime.oci.tar`` beside the record.
        container: ``container.json``.
        url: of the engine; by default what ``DOCKER_HOST`` says, else the usual socket.

    Raises:
        SpecError: ``spec.container`` when the record does not tell of this archive.
        TransportError: ``daemon.connect``, ``daemon.load``, ``daemon.error``, ``io.*``.
        CheckFailed: ``check.image_id`` when the engine has another image by that name afterwards.
    """
    reference, expected = _foretold(container, archive.name)
    with _engine(url) as client:
        _send(client, archive, emit)
        image_id = str(client.images.get(reference).id)
        version = str(client.version().get("Version", ""))
    store = next((store for store, known in expected.items() if known == image_id), None)
    if store is None:
        raise CheckFailed(
            "check.image_id",
            f"the engine calls {show(reference)} {image_id}, not {' or '.join(expected.values())}: "
            "it holds another image by this name, or changed the one that it was given",
            where=str(archive), expected=expected, actual=image_id,
        )  # fmt: skip
    return Loaded(reference, image_id, store, version)


def _foretold(container: Mapping[str, Any], name: str) -> tuple[str, dict[str, str]]:
    try:
        ids = container["image_ids"]
        return str(container["reference"]), {CLASSIC: ids["classic"], CONTAINERD: ids["containerd"][name]}
    except (KeyError, TypeError):
        raise SpecError(
            "spec.container", f"container.json does not tell of {show(name)}; take the record of the same build",
            where="container.json",
        ) from None  # fmt: skip


@contextmanager
def _engine(url: str | None) -> Iterator[Any]:
    """A client of the engine; its errors become ours."""
    import docker
    from docker.errors import APIError, DockerException

    try:
        client = (
            docker.DockerClient(base_url=url, version="auto", timeout=TIMEOUT_SECONDS)
            if url
            else docker.from_env(version="auto", timeout=TIMEOUT_SECONDS)
        )
    except DockerException as error:
        raise TransportError(
            "daemon.connect", f"no Docker Engine answers: {error}; start it, or set DOCKER_HOST", where=url or ""
        ) from None
    try:
        yield client
    except APIError as error:
        raise TransportError("daemon.error", f"the engine refused: {error.explanation or error}") from None
    except (DockerException, ConnectionError, TimeoutError) as error:
        raise TransportError("daemon.error", f"talking to the engine: {error}") from None
    finally:
        client.close()


def _send(client: Any, archive: Path, emit: Emit) -> None:
    """Stream the archive; the engine's answers are a stream of JSON objects, an error among them."""
    task = f"load {archive.name}"
    try:
        size = archive.stat().st_size
        emit(Event("start", task, total=size))
        answers = client.api.load_image(_blocks(archive, task, emit))
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise disk_error(error, "loading") from None
    for answer in answers:
        if detail := answer.get("errorDetail"):
            message = str(detail.get("message", detail))
            raise TransportError("daemon.load", f"the engine refused {archive.name}: {message}", where=str(archive))
    emit(Event("done", task))


def _blocks(archive: Path, task: str, emit: Emit) -> Iterator[bytes]:
    with archive.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block
            emit(Event("advance", task, len(block)))
