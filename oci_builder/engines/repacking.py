"""``repack`` put together, for the command and for the stage: the build, the checks and the record are other verbs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oci_builder.build import BuildOptions, build
from oci_builder.engines.stages_build import allowed, check_stage, jobs
from oci_builder.engines.stages_request import Request
from oci_builder.model.errors import SpecError
from oci_builder.model.events import Emit
from oci_builder.model.receipts import Check
from oci_builder.model.spec import load_spec
from oci_builder.qualification import Rules
from oci_builder.record import RecordRequest, record
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.host import utc_now
from oci_builder.release.receipts import RECORD_STAGE, require_signer
from oci_builder.release.signing import load_key
from oci_builder.repack import Repacked, RepackRequest, repack
from oci_builder.transports.layerfiles import read_definitions

MARKER = "runtime.json"


def run_repack(request: Request, emit: Emit) -> Repacked:
    """Repack with the real build as rebuild and the checks of ``container-check`` as preflight; then record the result.

    Args:
        request: its ``release``, ``key`` and the option ``trust`` are given; ``marker``, ``checks``, ``isolation``,
            ``jobs`` and ``allow`` may be.

    Raises:
        SpecError: ``spec.files``: the spec ships no packaging files; ``repack.checks``; ``stage.option``.
        PolicyError: ``key.trust``: nobody would believe what the key signs. What ``repack`` and ``record`` raise.
    """
    path = Path(request.spec)
    spec = load_spec(path)
    if spec.files is None:
        raise SpecError("spec.files", "the spec ships no packaging files, so there is nothing to repack")
    rules, signer = Rules.load(path, request.path("trust")), load_key(Path(request.key))
    for stage in ("repack", RECORD_STAGE):
        require_signer(rules.policy, signer, stage, utc_now())
    prefix = _place_in_archive(Path(request.out), spec.prefix)
    marker = prefix + b"/" + str(request.options.get("marker") or MARKER).encode()
    definitions = read_definitions(path.absolute().parent / spec.files)
    wanted = RepackRequest(
        dist=Path(request.out), folder=ReleaseFolder(Path(request.release)), gates=rules.gates, policy=rules.policy,
        marker=marker, layers=frozenset(definitions), key=signer,
        packaging=frozenset(prefix + b"/" + name for files in definitions.values() for name in files) - {marker},
        needed=frozenset() if request.options.get("checks") else frozenset({prefix + b"/checks.json"}),
    )  # fmt: skip
    again = RecordRequest(
        wanted.dist, wanted.folder, path, signer, allowed(request), jobs(request), policy=rules.policy
    )

    def rebuild(out: Path) -> None:
        build(path, out, BuildOptions(Path(request.cache), jobs(request)), emit)

    def preflight(out: Path) -> Sequence[Check]:
        found = check_stage(replace(request, out=str(out), release=""), emit)
        return tuple(Check.model_validate(value) for value in found.checks)

    return repack(wanted, rebuild, preflight, utc_now(), emit, lambda: _recorded(again, emit))


def _place_in_archive(out: Path, prefix: str) -> bytes:
    """Where the runtime lies in the portable archive: links of the base may have led the prefix elsewhere."""
    portable = ReleaseFolder(out).document("portable.json")
    said = portable.get("prefix") if isinstance(portable, dict) else None
    return (said if isinstance(said, str) else prefix).strip("/").encode()


def _recorded(request: RecordRequest, emit: Emit) -> None:
    record(request, emit)
