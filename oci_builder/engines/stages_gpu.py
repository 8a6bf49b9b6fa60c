"""Stages on GPUs: ``single``, ``nccl8``, ``nccl8-u24``. Nothing is compiled or fetched; the runtime's own checks run.

``where`` says on what system: ``host`` installs the portable archive with ``ensure_runtime.sh`` and runs its checks on
this root file system (on Modal: an Ubuntu image made for this archive), ``image`` unpacks the image and runs them in a
chroot. Either way the checks are those that the runtime carries in ``checks/``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from chroot_exec.protocol import Check, Twin
from oci_builder.engines.stages_build import stage_tree
from oci_builder.engines.stages_files import checked_copy, merged, recorded
from oci_builder.engines.stages_host import Checks, run_on_host
from oci_builder.engines.stages_request import Outcome, Request
from oci_builder.execution.companions import layer_facts
from oci_builder.execution.gates import GateContext, verify_exec
from oci_builder.execution.run import ExecOptions, gpu_selection, load_checks, run_checks
from oci_builder.execution.staging import Staged
from oci_builder.model.errors import PolicyError, SpecError
from oci_builder.model.events import Emit
from oci_builder.model.receipts import OCI, PORTABLE
from oci_builder.model.spec import Spec, load_spec
from oci_builder.release.host import os_name
from oci_builder.verify import VerifyOptions, verify_archives

WHERE = ("host", "image")


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
    """``nccl8`` on Ubuntu 24.04: on the host's own system, since the image is one of 22.04.

    Raises:
        PolicyError: ``stage.os``: this is another system; else as ``single_stage``.
    """
    found = os_name(Path("/"))
    if found != "ubuntu 24.04" or request.options.get("where") == "image":
        raise PolicyError(
            "stage.os", f"nccl8-u24 runs on an Ubuntu 24.04 host, and this would be {found or 'an unknown system'}",
            expected="ubuntu 24.04", actual=found,
        )  # fmt: skip
    return nccl_stage(request, emit)


def _gpu_stage(request: Request, listed: str, gpus: int, emit: Emit) -> Outcome:
    where = str(request.options.get("where") or "host")
    if where not in WHERE:
        raise SpecError("stage.option", f"where is host or image, not {where!r}", where="options.where")
    spec = load_spec(Path(request.spec))
    which = Checks(listed, _tiers(request, spec), gpus)
    sha256 = _portable(request, emit)
    if where == "host":
        return run_on_host(request, spec, which, sha256, emit)
    return _in_image(request, spec, which, sha256, emit)


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


def _in_image(request: Request, spec: Spec, which: Checks, sha256: str, emit: Emit) -> Outcome:
    archive = Path(request.out) / OCI
    report = verify_archives((archive,), VerifyOptions(profile="strict", emit=emit))
    gpu, env = gpu_selection()
    options = ExecOptions(isolation=str(request.options.get("isolation") or "auto"), gpu=gpu, env=env)
    statement = verify_exec(
        report, lambda: stage_tree(archive, request, emit, needed=layer_facts(report)[1]),
        lambda staged: _listed(staged, spec, which, Path(request.work)), options, GateContext(),
    )  # fmt: skip
    receipt = statement.predicate
    subjects = merged(recorded(request), statement.digests)
    checks = tuple(check.model_dump(mode="json") for check in receipt.checks)
    details = {**receipt.details, "where": "image"}
    return Outcome({}, {PORTABLE: sha256, OCI: subjects[OCI]}, checks, receipt.host.model_dump(mode="json"), details)


def _listed(staged: Staged, spec: Spec, which: Checks, work: Path) -> Sequence[Check]:
    """The runtime's own list, asked for inside the image."""
    python, second = f"{spec.prefix}/envs/{which.tiers[0]}/bin/python3", f"{spec.prefix}-second"
    argv = (python, f"{spec.prefix}/checks", "list", *which.words(spec.prefix), "--second", second)
    receipt = run_checks(staged.root, staged.config, [Check("list", argv)], ExecOptions(output_limit=1 << 20))
    done = receipt["checks"][0] if receipt["checks"] else {}
    if done.get("outcome") != "pass":
        raise SpecError("stage.checks", f"the image gives no list of checks: {done.get('message', receipt['error'])}")
    listed = work / "list.json"
    listed.write_text(done["stdout"]["text"])
    twin = (Twin(spec.prefix, second),)
    return [replace(c, twins=c.twins or twin) if c.name == "relocation" else c for c in load_checks(listed)]
