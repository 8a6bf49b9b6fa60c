"""GPU stages in a chroot: of the image itself, or of another system with the portable archive at its prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from chroot_exec.protocol import Bind, Check, Twin
from oci_builder.engines.stages_build import require_one_build, stage_tree
from oci_builder.engines.stages_files import merged, recorded
from oci_builder.engines.stages_host import Checks, install
from oci_builder.engines.stages_request import Outcome, Request
from oci_builder.execution.companions import layer_facts
from oci_builder.execution.gates import GateContext, execute, image_os, verify_exec
from oci_builder.execution.run import ExecOptions, gpu_selection, load_checks, run_checks
from oci_builder.execution.staging import Staged
from oci_builder.model.errors import PolicyError, SpecError
from oci_builder.model.events import Emit
from oci_builder.model.receipts import OCI, PORTABLE
from oci_builder.model.spec import Spec
from oci_builder.release.host import this_host
from oci_builder.verify import VerifyOptions, verify_archives


def run_in_image(request: Request, spec: Spec, which: Checks, sha256: str, emit: Emit) -> Outcome:
    """The checks in the image, after it was verified.

    Raises:
        IntegrityError: ``layer.diff_id``: the archives are of two builds; FormatError: ``release.subject``.
    """
    archive = Path(request.out) / OCI
    report = verify_archives((archive,), VerifyOptions(profile="strict", emit=emit))
    if report.ok:
        require_one_build(request, layer_facts(report)[0])
    statement = verify_exec(
        report, lambda: stage_tree(archive, request, emit, needed=layer_facts(report)[1]),
        lambda staged: _listed(staged, spec.prefix, which, Path(request.work)), _options(request),
        GateContext(emit=emit),
    )  # fmt: skip
    receipt = statement.predicate
    subjects = merged(recorded(request), statement.digests)
    checks = tuple(check.model_dump(mode="json") for check in receipt.checks)
    details = {**receipt.details, "where": "image"}
    return Outcome({}, {PORTABLE: sha256, OCI: subjects[OCI]}, checks, receipt.host.model_dump(mode="json"), details)


def run_in_root(request: Request, spec: Spec, which: Checks, sha256: str, emit: Emit) -> Outcome:
    """The checks in the system of the option ``root`` (archive, OCI layout or folder), which shows the installed
    portable archive, read-only, at its own prefix and for ``relocation`` at a second one.

    Raises:
        PolicyError: ``stage.os``; as ``install`` and unpacking do.
    """
    prefix, root = str(install(request, spec, sha256, emit)), request.path("root")
    binds = (Bind(prefix, prefix), *((Bind(prefix, _second(prefix)),) if which.listed == "single" else ()))
    options = replace(_options(request), binds=binds)
    with stage_tree(root, request, emit) as staged:
        if wanted := request.options.get("system"):
            require_system(str(wanted), image_os(staged.root))
        checks = _listed(staged, prefix, which, Path(request.work), binds)
        results, host, details = execute(lambda: staged, lambda _: checks, options, this_host(), emit)
    rows = tuple(result.model_dump(mode="json") for result in results)
    return Outcome({}, {PORTABLE: sha256}, rows, host.model_dump(mode="json"), {**details, "where": "root"})


def require_system(wanted: str, found: str) -> None:
    """The system that a gate asks about.

    Raises:
        PolicyError: ``stage.os``.
    """
    if found != wanted:
        raise PolicyError(
            "stage.os", f"the stage runs on {wanted}, and this is {found or 'an unknown system'}: name a root of it "
            "(where=root)", expected=wanted, actual=found,
        )  # fmt: skip


def _options(request: Request) -> ExecOptions:
    gpu, env = gpu_selection()
    return ExecOptions(isolation=str(request.options.get("isolation") or "auto"), gpu=gpu, env=env)


def _second(prefix: str) -> str:
    return f"{prefix}-second"


def _listed(
    staged: Staged, prefix: str, which: Checks, work: Path, binds: tuple[Bind, ...] = ()
) -> Sequence[Check]:
    """The runtime's own list, asked for inside the root. A second prefix of the image's own is a twin."""
    python = f"{prefix}/envs/{which.tiers[0]}/bin/python3"
    argv = (python, f"{prefix}/checks", "list", *which.words(prefix), "--second", _second(prefix))
    options = ExecOptions(output_limit=1 << 20, binds=binds)
    receipt = run_checks(staged.root, staged.config, [Check("list", argv)], options)
    done = receipt["checks"][0] if receipt["checks"] else {}
    if done.get("outcome") != "pass":
        raise SpecError("stage.checks", f"the runtime gives no list of checks: {done.get('message', receipt['error'])}")
    listed = work / "list.json"
    listed.write_text(done["stdout"]["text"])
    twins = () if binds else (Twin(prefix, _second(prefix)),)
    return [replace(c, twins=c.twins or twins) if c.name == "relocation" else c for c in load_checks(listed)]
