"""``repack`` put together: the build and the checks are other verbs, which only the command line may join."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from oci_builder.build import BuildOptions, build
from oci_builder.cli.common import default_jobs
from oci_builder.cli.running import stage_archive
from oci_builder.execution.gates import verify_exec
from oci_builder.execution.run import ExecOptions, load_checks
from oci_builder.model.errors import SpecError
from oci_builder.model.events import Emit
from oci_builder.model.receipts import Check
from oci_builder.model.spec import load_spec
from oci_builder.qualification import Rules
from oci_builder.record import RecordRequest, record
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.receipts import RECORD_STAGE, require_signer
from oci_builder.release.scan import read_allowed
from oci_builder.release.signing import load_key
from oci_builder.repack import Repacked, RepackRequest, repack
from oci_builder.transports.layerfiles import read_definitions
from oci_builder.verify import VerifyOptions, verify_archives

MARKER = "runtime.json"


@dataclass(frozen=True, slots=True)
class RepackInputs:
    """The paths of one repack."""

    dist: Path
    release: Path
    spec: Path
    trust: Path
    key: Path
    checks: Path
    marker: str | None
    cache: Path
    allow: Path | None = None


def run_repack(inputs: RepackInputs, now: datetime, emit: Emit) -> Repacked:
    """Repack with the real build as rebuild and a sandbox as preflight; then record what the new build holds.

    Raises:
        SpecError: ``spec.files`` when the spec ships no packaging files; else as ``repack``.
    """
    spec = load_spec(inputs.spec)
    if spec.files is None:
        raise SpecError("spec.files", "the spec ships no packaging files, so there is nothing to repack")
    rules, signer = Rules.load(inputs.spec, inputs.trust), load_key(inputs.key)
    for stage in ("repack", RECORD_STAGE):
        require_signer(rules.policy, signer, stage, now)
    prefix = spec.prefix.lstrip("/").encode()
    marker = prefix + b"/" + (inputs.marker or MARKER).encode()
    definitions = read_definitions(inputs.spec.absolute().parent / spec.files)
    packaging = frozenset(prefix + b"/" + path for files in definitions.values() for path in files) - {marker}
    checks = load_checks(inputs.checks)

    def rebuild(out: Path) -> None:
        build(inputs.spec, out, BuildOptions(inputs.cache, default_jobs()), emit)

    def preflight(out: Path) -> tuple[Check, ...]:
        archives = (out / "runtime.oci.tar", out / "runtime.docker.tar.gz")
        report = verify_archives(archives, VerifyOptions(profile="strict", emit=emit))
        statement = verify_exec(
            report, lambda: stage_archive(archives[0], inputs.cache, emit), lambda _staged: checks, ExecOptions()
        )
        return statement.predicate.checks

    request = RepackRequest(
        dist=inputs.dist, folder=ReleaseFolder(inputs.release), gates=rules.gates, policy=rules.policy, marker=marker,
        packaging=packaging, layers=frozenset(definitions), key=signer,
    )  # fmt: skip
    done = repack(request, rebuild, preflight, now, emit)
    allowed = read_allowed(inputs.allow)
    again = RecordRequest(inputs.dist, request.folder, inputs.spec, request.key, allowed, policy=rules.policy)
    record(again, emit)
    return done
