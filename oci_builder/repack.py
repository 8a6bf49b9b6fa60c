"""``oci-builder repack``: repair packaging files of a candidate. Nothing is compiled; qualification starts again."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from oci_builder.model.errors import CheckFailed, ConflictError, IntegrityError, SpecError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.gates import Gate, TrustPolicy
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.receipts import PORTABLE, Check, Receipt, format_time
from oci_builder.release.files import io_error, read_file
from oci_builder.release.folder import SUPERSEDED, ReleaseFolder, pretty
from oci_builder.release.host import engine_name, new_attempt, stamp, this_host, tool_versions
from oci_builder.release.parts import hash_parts, plan_parts
from oci_builder.release.receipts import write_receipt
from oci_builder.release.repack import (
    Changes,
    Listing,
    check_layers,
    check_marker,
    check_scope,
    compare,
    read_listing,
    refuse_states,
)
from oci_builder.release.signing import SigningKey

RECORDS = ("portable.json", "container.json")
Rebuild = Callable[[Path], None]
Preflight = Callable[[Path], Sequence[Check]]


@dataclass(frozen=True, slots=True)
class RepackRequest:
    """What is repacked.

    Attributes:
        dist: folder of a finished build: the archives and their records.
        folder: the release folder of that build.
        gates, policy: what the release is judged by.
        marker: path of the marker file in the portable archive.
        packaging: paths in the archive that come from ``layers/files``.
        layers: names of the layers that hold them.
        key: signs the repack receipt.
    """

    dist: Path
    folder: ReleaseFolder
    gates: tuple[Gate, ...]
    policy: TrustPolicy
    marker: bytes
    packaging: frozenset[bytes]
    layers: frozenset[str]
    key: SigningKey
    limits: Limits = DEFAULT_LIMITS
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Repacked:
    """The new portable digest, what changed, where the old build is kept, and the receipt."""

    sha256: str
    changes: Changes
    previous: Path
    receipt: Path


def repack(
    request: RepackRequest, rebuild: Rebuild, preflight: Preflight, now: datetime, emit: Emit = silent
) -> Repacked:
    """Check the original, build beside it, prove that only packaging differs, try it, and only then put it in place.

    Args:
        rebuild: writes the three archives and their records into an empty folder, from the staged tiers and the
            changed packaging files.
        preflight: runs the offline CPU checks on that folder's archives; every one must pass (or be deferred).
        now: the moment of judging.

    Raises:
        IntegrityError: ``blob.digest``, ``repack.marker``: the original is not what its records say.
        ConflictError: ``release.qualified``, ``release.superseded``.
        PolicyError: ``repack.scope``; SpecError: ``repack.nothing``, ``repack.records``.
        CheckFailed: ``repack.preflight``; the new build is kept beside, for diagnosis.
        TransportError: ``io.*``; whatever ``rebuild`` raises. The original stays as it is after any of these.
    """
    started = stamp()
    _require_candidate(request, now)
    old_sha, old = _read(request, request.dist, request.folder.subjects()[PORTABLE], emit)
    staging = request.dist.with_name(f".{request.dist.name}.repack-{secrets.token_hex(4)}")
    try:
        staging.mkdir()
    except OSError as error:
        raise io_error(error, staging) from None
    try:
        rebuild(staging)
        new_sha, new = _read(request, staging, None, emit)
        changes = compare(old.items, new.items)
        check_scope(changes, request.packaging, {request.marker})
        before, after = (_document(place / "container.json") for place in (request.dist, staging))
        check_layers(before, after, request.layers)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    checks = _checked(preflight(staging), staging)
    _require_candidate(request, now)  # building and trying took a while
    previous = _swap(request.dist, staging, old_sha)
    try:
        _supersede(request.folder, new_sha, now)
    except BaseException:
        # Builds and records must tell of the same archives.
        request.dist.rename(staging)
        previous.rename(request.dist)
        raise
    subjects = _adopt(request.folder, request.dist)
    receipt = _receipt(request, subjects, old_sha, changes, checks, started)
    return Repacked(new_sha, changes, previous, receipt)


def _require_candidate(request: RepackRequest, now: datetime) -> None:
    """Neither today's rules nor any verdict that was recorded say ``pass``."""
    folder = request.folder
    state = "pass" if folder.was_qualified() else folder.evaluate(request.gates, request.policy, now, None).state
    refuse_states(state, folder.release)


def _read(request: RepackRequest, place: Path, expected: str | None, emit: Emit) -> tuple[str, Listing]:
    """(sha256, listing) of a build's portable archive, after its records were found to agree."""
    portable = _document(place / "portable.json")
    recorded = str(portable.get("sha256")) if isinstance(portable, dict) else ""
    if expected is not None and recorded != expected:
        raise IntegrityError(
            "blob.digest", f"{show(str(place))} is another build than the release folder's", where=str(place),
            expected=expected, actual=recorded,
        )  # fmt: skip
    emit(Event("note", "repack", message=f"reading {place.name}/{PORTABLE}"))
    sha, _ = hash_parts(plan_parts(PORTABLE, place / PORTABLE, max_file=1 << 62), recorded)
    listing = read_listing(place / PORTABLE, request.marker, request.limits, request.threads)
    check_marker(listing.marker, portable, str(place / PORTABLE))
    return sha, listing


def _document(path: Path) -> Any:
    if not path.is_file():
        raise SpecError("repack.records", f"{show(str(path))} is not there; is this a finished build?", where=str(path))
    return load_json(read_file(path, DEFAULT_LIMITS.document), str(path))


def _checked(checks: Sequence[Check], staging: Path) -> Sequence[Check]:
    bad = [c for c in checks if c.outcome not in ("pass", "deferred")]
    if bad or not checks:
        what = "; ".join(f"{c.name}: {c.outcome}: {c.reason}" for c in bad) or "no check was run"
        raise CheckFailed(
            "repack.preflight", f"the new archive did not pass: {what}. It is kept in {show(str(staging))}",
            where=str(staging),
        )  # fmt: skip
    return checks


def _swap(dist: Path, staging: Path, old_sha: str) -> Path:
    """Put the new build in the old one's place; the old one is kept under its digest."""
    previous = dist.with_name(f"{dist.name}.{old_sha[:12]}")
    if os.path.lexists(previous):
        raise ConflictError("release.exists", f"{show(str(previous))} exists; move it away", where=str(previous))
    try:
        dist.rename(previous)
        try:
            staging.rename(dist)
        except OSError:
            previous.rename(dist)
            raise
    except OSError as error:
        raise io_error(error, dist) from None
    return previous


def _supersede(folder: ReleaseFolder, new_sha: str, now: datetime) -> None:
    """Move the release folder's content under ``superseded/<digest>``, say by what, and begin anew."""
    old_sha = folder.subjects()[PORTABLE]
    value = {"by": new_sha, "at": format_time(now), "why": "repack"}
    folder.add(SUPERSEDED, pretty(value))
    fresh = folder.root.with_name(f".{folder.root.name}.{secrets.token_hex(4)}")
    kept = fresh / "superseded"
    try:
        fresh.mkdir()
        earlier = folder.root / "superseded"
        if earlier.is_dir():
            earlier.rename(kept)
        kept.mkdir(exist_ok=True)
        folder.root.rename(kept / old_sha[:12])
        fresh.rename(folder.root)
    except OSError as error:
        raise io_error(error, folder.root) from None
    folder.create()


def _adopt(folder: ReleaseFolder, dist: Path) -> dict[str, str]:
    for name in RECORDS:
        folder.add(name, read_file(dist / name, DEFAULT_LIMITS.document))
    return folder.subjects()


def _receipt(
    request: RepackRequest,
    subjects: dict[str, str],
    old_sha: str,
    changes: Changes,
    checks: Sequence[Check],
    started: str,
) -> Path:
    receipt = Receipt.model_validate(
        {
            "release": request.folder.release, "stage": "repack", "attempt": new_attempt(), "engine": engine_name(),
            "tools": tool_versions(), "host": this_host(), "started": started, "finished": stamp(),
            "checks": tuple(checks), "details": {"from": old_sha, **changes.to_json()},
        }
    )  # fmt: skip
    return write_receipt(request.folder.receipts, receipt, subjects, request.key)


__all__ = ["Preflight", "Rebuild", "RepackRequest", "Repacked", "repack"]
