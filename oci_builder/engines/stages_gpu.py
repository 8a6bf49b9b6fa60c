"""Stages on GPUs: ``single``, ``nccl8``, ``nccl8-u24``. Nothing is compiled or fetched; the runtime's own checks run.

``where`` says on what system: ``host`` installs the portable archive with ``ensure_runtime.sh`` and runs its checks on
this root file system (on Modal: an Ubuntu image made for this archive), ``root`` does so in a chroot of another one,
``image`` unpacks the image and runs them in that. The checks are always those that the runtime carries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from oci_builder.engines.stages_chroot import require_system, run_in_image, run_in_root
from oci_builder.engines.stages_files import checked_copy, recorded
from oci_builder.engines.stages_host import Checks, run_on_host
from oci_builder.engines.stages_request import Outcome, Request
from oci_builder.model.errors import PolicyError, SpecError
from oci_builder.model.events import Emit
from oci_builder.model.receipts import PORTABLE
from oci_builder.model.spec import Spec, load_spec
from oci_builder.release.host import os_name

_WAYS: Mapping[str, Callable[[Request, Spec, Checks, str, Emit], Outcome]] = {
    "host": run_on_host, "root": run_in_root, "image": run_in_image,
}  # fmt: skip
WHERE = tuple(_WAYS)


def single_stage(request: Request, emit: Emit) -> Outcome:
    """The list ``single`` of the runtime's checks, on one GPU.

    Raises:
        SpecError: ``stage.option``, ``stage.order``, ``stage.checks`` (the runtime carries none).
        CheckFailed: ``stage.install``; TransportError: ``io.*``; OciBuilderError: what unpacking raises.
    """
    return _gpu_stage(request, "single", 1, emit)


def nccl_stage(request: Request, emit: Emit) -> Outcome:
    """The list ``nccl`` on eight GPUs. Raises as ``single_stage``."""
    return _gpu_stage(request, "nccl", 8, emit)


def second_ubuntu_stage(request: Request, emit: Emit) -> Outcome:
    """``nccl8`` on Ubuntu 24.04: on such a host, or with ``where=root`` in a root of it (option ``root24``).

    Raises:
        PolicyError: ``stage.os``: this is another system; else as ``single_stage``.
    """
    if request.options.get("where") == "root":
        options = {**request.options, "root": request.text("root24"), "system": "ubuntu 24.04"}
        return nccl_stage(replace(request, options=options), emit)
    require_system("ubuntu 24.04", os_name(Path("/")) if request.options.get("where") != "image" else "the image's own")
    return nccl_stage(request, emit)


def _gpu_stage(request: Request, listed: str, gpus: int, emit: Emit) -> Outcome:
    where = str(request.options.get("where") or "host")
    if where not in WHERE:
        raise SpecError("stage.option", f"where is {', '.join(WHERE)}, not {where!r}", where="options.where")
    spec = load_spec(Path(request.spec))
    which = Checks(listed, _tiers(request, spec), gpus)
    sha256 = _portable(request, emit)
    return _WAYS[where](request, spec, which, sha256, emit)


def _portable(request: Request, emit: Emit) -> str:
    """The portable archive's sha256: of the file where it is at hand, else what the request says it is.

    On Modal the archive went into the image and only its digest comes along; the installer compares its own record.
    """
    given = str(request.options.get("sha256") or "")
    archive = Path(request.out) / PORTABLE
    if archive.is_file():
        sha256 = recorded(request)[PORTABLE]
        if given and given != sha256:
            raise PolicyError("stage.subject", f"asked about {given[:12]}, but {archive} is {sha256[:12]}")
        checked_copy(archive, sha256, None, emit)
        return sha256
    if re.fullmatch(r"[0-9a-f]{64}", given) and request.options.get("prefix"):
        return given
    raise SpecError("stage.order", f"{request.out} has no {PORTABLE}: run the stage package first", where=request.out)


def _tiers(request: Request, spec: Spec) -> tuple[str, ...]:
    wanted = request.options.get("tiers") or list(spec.tiers)
    if not isinstance(wanted, list) or not all(isinstance(t, str) and t in spec.tiers for t in wanted):
        raise SpecError("stage.option", f"tiers is a list out of {', '.join(spec.tiers)}", where="options.tiers")
    return tuple(sorted(wanted, key=lambda tier: (tier != "base", tier)))
