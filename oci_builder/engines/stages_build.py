"""Stages on CPUs: ``build``, ``package``, ``container``, ``container-check``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oci_builder.build import BuildOptions, BuildResult, build
from oci_builder.engines.stages_files import (
    RECORDS,
    checked_copy,
    digest_of,
    kept_build,
    merged,
    recorded,
    refuse_other_release,
)
from oci_builder.engines.stages_relocation import with_relocation
from oci_builder.engines.stages_request import Outcome, Request
from oci_builder.execution.companions import layer_facts
from oci_builder.execution.gates import GateContext, by_findings, verify_exec
from oci_builder.execution.run import ExecOptions, image_checks, load_checks
from oci_builder.execution.staging import Staged, Unpacked, stage
from oci_builder.model.digest import Digest
from oci_builder.model.errors import CheckFailed, IntegrityError, SpecError
from oci_builder.model.events import Emit
from oci_builder.model.gates import parse_gates
from oci_builder.model.receipts import DOCKER, OCI, PORTABLE
from oci_builder.model.report import Report
from oci_builder.model.spec import Spec, load_spec
from oci_builder.payload.make import make_runtime
from oci_builder.payload.tidy import in_use
from oci_builder.qualification import Rules
from oci_builder.readiness import readiness
from oci_builder.record import RecordRequest, record
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.scan import read_allowed
from oci_builder.release.secrets import ScanOptions
from oci_builder.release.signing import load_key
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.verify import VerifyOptions, verify_archives


def build_stage(request: Request, emit: Emit) -> Outcome:
    """The environments, and the runtime that they come together in; both stay in the cache for ``package``.

    Raises:
        OciBuilderError: what ``make_runtime`` raises.
    """
    path = Path(request.spec)
    spec, folder, work = load_spec(path), path.absolute().parent, Path(request.cache) / "tiers"
    probe_hard_links(Path(request.cache))
    with in_use(work):
        runtime = make_runtime(spec, folder, work, jobs(request), emit)
    notes = [f"tier {name}: {place}" for name, place in runtime.tiers.items()]
    notes += [f"{name}: {place}" for name, place in runtime.trees.items()]
    return Outcome({name: digest_of(data) for name, data in runtime.files.items()}, notes=tuple(notes))


def package_stage(request: Request, emit: Emit) -> Outcome:
    """All three archives and their records, in one compression pass; what is finished stays as it is.

    Raises:
        OciBuilderError: what ``build`` raises; ConflictError: ``release.exists``.
    """
    with kept_build(request):
        made = _build(request, emit)
        refuse_other_release(request)
    found = recorded(request)
    return Outcome(found, notes=("nothing has changed",) if made.unchanged else ())


def container_stage(request: Request, emit: Emit) -> Outcome:
    """The image archives: there, unchanged by a second build, and every byte of all archives what the records say.

    Where ``package`` was preempted before it was done, this stage finishes its work first. A good build is recorded in
    the release folder, with SBOMs and signed provenance; without a key the folder is left alone.

    Raises:
        OciBuilderError: what ``build`` raises; IntegrityError: ``blob.digest``.
    """
    before = recorded(request) if all((Path(request.out) / name).is_file() for name in RECORDS) else {}
    with kept_build(request):
        made = _build(request, emit)
        refuse_other_release(request)
    report, subjects = _verified(request, emit)
    same = made.unchanged or before == subjects
    if made.unchanged:
        note = "nothing has changed"
    else:
        note = "finished what package had left open" if not before else "another build was replaced"
        note = "a second build gave the same bytes" if same else note
    notes = (note, *(_record(request, emit) if report.ok and request.release else ()))
    return Outcome(subjects, subjects, _gates_of(report), details={"unchanged": same}, notes=notes)


def check_stage(request: Request, emit: Emit) -> Outcome:
    """Verify the archives, judge readiness, and run the offline checks in a chroot without network.

    Raises:
        SpecError: ``stage.order``, ``spec.*``; IntegrityError: ``blob.digest``.
    """
    spec = load_spec(Path(request.spec))
    report, subjects = _verified(request, emit)
    archive = _local(request) / OCI
    given, wanted = request.options.get("checks"), _wanted(spec, "container-check")
    options = ExecOptions(isolation=str(request.options.get("isolation") or "auto"))
    statement = verify_exec(
        report,
        lambda: stage_tree(archive, request, emit, needed=layer_facts(report)[1]),
        lambda staged: with_relocation(
            load_checks(Path(given)) if given else image_checks(staged.root, spec.prefix), spec.prefix,
            tuple(spec.tiers), "relocation" in wanted,
        ),
        options, GateContext(emit=emit),
    )  # fmt: skip
    receipt = statement.predicate
    checks = [check.model_dump(mode="json") for check in receipt.checks]
    if report.ok and "readiness" in wanted:
        checks.append(_timed("readiness", lambda: _readiness(archive, emit)))
    host = receipt.host.model_dump(mode="json")
    return Outcome(subjects, merged(subjects, statement.digests), tuple(checks), host, receipt.details)


def stage_tree(archive: Path, request: Request, emit: Emit, needed: int = 0) -> Staged:
    """The archive's unpacked tree, below the scratch folder where there is one, else in the cache.

    Args:
        needed: bytes that it takes, where that is known.

    Raises:
        OciBuilderError: what unpacking raises.
    """

    def unpack(source: Path, folder: Path) -> Unpacked:
        done = unpack_image(source, folder, UnpackOptions(), emit)
        return Unpacked(Digest(done.manifest), done.config)

    return stage(archive, Path(request.scratch or request.cache) / "staged", unpack, needed=needed, emit=emit)


def jobs(request: Request) -> int:
    """Threads: the option, else the CPUs that this process may use.

    Raises:
        SpecError: ``stage.option``.
    """
    value = request.options.get("jobs", 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1024:
        raise SpecError("stage.option", f"jobs is a number of threads, not {value!r}", where="options.jobs")
    return value or len(os.sched_getaffinity(0))


def allowed(request: Request) -> ScanOptions:
    """What the scan for secrets and weights lets through.

    Raises:
        SpecError: as ``read_allowed``.
    """
    given = request.options.get("allow")
    return read_allowed(Path(str(given)) if given else None)


def probe_hard_links(cache: Path) -> None:
    """uv links the tiers from one cache: a file system without hard links fails here, not an hour later.

    Raises:
        CheckFailed: ``stage.hardlinks``.
    """
    one, two = cache / f".link-probe-{os.getpid()}", cache / f".link-probe-{os.getpid()}.second"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        one.write_bytes(b"")
        os.link(one, two)
        same = one.stat().st_ino == two.stat().st_ino
    except OSError as error:
        raise CheckFailed(
            "stage.hardlinks",
            f"{cache} has no hard links ({error.strerror}); on Modal this takes a volume of version 2",
            where=str(cache),
        ) from None  # fmt: skip
    finally:
        one.unlink(missing_ok=True)
        two.unlink(missing_ok=True)
    if not same:
        raise CheckFailed("stage.hardlinks", f"a hard link in {cache} is a file of its own", where=str(cache))


def _build(request: Request, emit: Emit) -> BuildResult:
    return build(Path(request.spec), Path(request.out), BuildOptions(Path(request.cache), jobs(request)), emit)


def _record(request: Request, emit: Emit) -> tuple[str, ...]:
    if not request.key:
        return ("not recorded as a release: that takes a key",)
    folder = ReleaseFolder(Path(request.release))
    key, policy = load_key(Path(request.key)), None
    if request.options.get("trust"):
        policy = Rules.load(Path(request.spec), request.path("trust")).policy
    wanted = RecordRequest(
        Path(request.out), folder, Path(request.spec), key, allowed(request), jobs(request), policy=policy
    )
    done = record(wanted, emit)
    note = f"the release {'was' if done.again else 'is'} recorded in {done.folder}"
    unjudged = "without a trust policy nobody looked whether the key's receipts will count"
    return (note,) if policy is not None else (note, unjudged)


def _local(request: Request) -> Path:
    """Where the archives are read from once they are verified: the copies on local disk, else where they are."""
    return Path(request.work) if request.scratch else Path(request.out)


def _verified(request: Request, emit: Emit) -> tuple[Report, dict[str, str]]:
    """The strict verification of both image archives, and all archives' digests: read, compared with the records."""
    subjects = recorded(request)
    local = Path(request.work) if request.scratch else None
    for name in (OCI, DOCKER):
        # Verifying hashes as it goes; without a copy to make, a first read would be one too many.
        if local is not None:
            checked_copy(Path(request.out) / name, subjects[name], local, emit)
    checked_copy(Path(request.out) / PORTABLE, subjects[PORTABLE], None, emit)
    place = _local(request)
    report = verify_archives((place / OCI, place / DOCKER), VerifyOptions(profile="strict", emit=emit))
    names = {"oci-archive": OCI, "docker-archive": DOCKER}
    seen = {
        names[str(s.get("kind"))]: str(s.get("sha256")).removeprefix("sha256:")
        for s in report.subjects
        if str(s.get("kind")) in names and s.get("sha256")
    }
    if report.ok:
        require_one_build(request, layer_facts(report)[0])
    return report, merged(subjects, seen)


def require_one_build(request: Request, diff_ids: Sequence[str]) -> None:
    """The portable archive was made of the image's own layers, or a receipt may not name both.

    Raises:
        IntegrityError: ``layer.diff_id``.
    """
    portable = ReleaseFolder(Path(request.out)).document("portable.json")
    held = portable.get("diff_ids") if isinstance(portable, dict) else None
    if not isinstance(held, list) or not held or list(diff_ids)[-len(held) :] != held:
        raise IntegrityError(
            "layer.diff_id", "portable.json does not give the image's layers: these archives are of two builds",
            where=request.out, expected=held, actual=list(diff_ids),
        )  # fmt: skip


def _gates_of(report: Report) -> tuple[Mapping[str, Any], ...]:
    """The two gates that need no run."""
    return tuple(check.model_dump(mode="json") for check in by_findings(report))


def _wanted(spec: Spec, stage_name: str) -> set[str]:
    return {check for gate in parse_gates(spec.gates) if stage_name in gate.stages for check in gate.checks}


def _readiness(archive: Path, emit: Emit) -> dict[str, Any]:
    report = readiness(archive, emit=emit)
    errors = [f for f in report.findings() if f.severity == "error"]
    reason = "; ".join(f"[{f.code}] {f.where}: {f.message}" for f in errors[:10])
    return {"outcome": "fail" if errors else "pass", "reason": reason[:4000], "details": {"errors": len(errors)}}


def _timed(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    start = time.monotonic()
    found = run()
    return {"name": name, **found, "seconds": round(time.monotonic() - start, 3)}


__all__ = ["build_stage", "check_stage", "container_stage", "package_stage", "stage_tree"]
