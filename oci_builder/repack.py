"""``oci-builder repack``: repair packaging files of a candidate. Nothing is compiled; qualification starts again."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from oci_builder.model.errors import CheckFailed, ConflictError, IntegrityError, SpecError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.gates import Gate, TrustPolicy, parse_gates
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.receipts import PORTABLE, Check, Receipt, format_time
from oci_builder.model.spec import load_spec
from oci_builder.release.files import io_error, read_file
from oci_builder.release.folder import ReleaseFolder, spec_sha256
from oci_builder.release.host import engine_name, new_attempt, stamp, this_host, tool_versions, utc_now
from oci_builder.release.parts import hash_parts, plan_parts
from oci_builder.release.receipts import make_statement, receipt_name
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
from oci_builder.release.replacing import BUILD, STAGING, Journal, Replacing, left_behind
from oci_builder.release.signing import SigningKey
from oci_builder.store.locks import alone_in
from oci_builder.store.removal import clear_folder, remove_folder

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
        needed: paths that the new build must have, for it to be tried: said before it is built.
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
    needed: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Repacked:
    """The new portable digest, what changed (in the receipt too), where the old build is kept, and the receipt."""

    sha256: str
    changes: Changes
    previous: Path
    receipt: Path


def repack(
    request: RepackRequest, rebuild: Rebuild, preflight: Preflight, now: datetime, emit: Emit = silent,
    after: Callable[[], None] = lambda: None,
) -> Repacked:  # fmt: skip
    """Check the original, build beside it, prove that only packaging differs, try it, and only then put it in place.

    Args:
        rebuild: writes the three archives and their records into an empty folder, from the staged tiers and the
            changed packaging files.
        preflight: runs the offline CPU checks on that folder's archives; every one must pass (or be deferred).
        now: the moment of judging.
        after: records the new build, once it is in its place.

    A run that was killed is finished, or begun anew, by the next one.

    Raises:
        IntegrityError: ``blob.digest``, ``repack.marker``: the original is not what its records say.
        ConflictError: ``release.qualified``, ``release.superseded``; ``repack.busy``: another run is at work.
        PolicyError: ``repack.scope``; SpecError: ``repack.nothing``, ``repack.records``, ``repack.checks``.
        CheckFailed: ``repack.preflight``; the new build is kept beside, for diagnosis.
        TransportError: ``io.*``; whatever ``rebuild`` raises. The original stays as it is after any of these.
    """
    left = left_behind(request.dist, request.folder)
    if left is not None:
        emit(Event("warning", "repack", message="an earlier run was interrupted; this one finishes what it began"))
        return _finish(request, left, after, now, Changes((), (), ()))
    started = stamp()
    _require_candidate(request, now)
    original = _read(request, request.dist, request.folder.subjects()[PORTABLE], emit)
    _require_needed(request, original[1])
    with _staging(request.dist) as staging:
        changed = _rebuilt(request, original, rebuild, staging, emit)
        checks = _checked(preflight(staging), staging)
        _require_candidate(request, now)  # building and trying took a while
        journal = _journal(request, staging, _receipt(request, original[0], changed, checks, started), original[0], now)
        replacing = Replacing(request.dist, request.folder, journal)
        replacing.begin()
        return _finish(request, replacing, after, now, changed)


def _require_needed(request: RepackRequest, original: Listing) -> None:
    """What the checks want is in the packaging files, or comes from what stays as it is."""
    kept = original.items.keys() - request.packaging
    missing = sorted(request.needed - request.packaging - kept)
    if missing:
        raise SpecError(
            "repack.checks",
            f"neither the packaging files nor the rest of the archive have {show(missing[0])}, and the new build would"
            " not be tried without; ship it, or name a file with --checks",
            where=show(missing[0]),
        )  # fmt: skip


def _rebuilt(
    request: RepackRequest, original: tuple[str, Listing], rebuild: Rebuild, staging: Path, emit: Emit
) -> Changes:
    """Make the new build: what it changes. Of one that changes more than it may, nothing is left."""
    try:
        rebuild(staging)
        return _compared(request, original, staging, emit)
    except BaseException:
        clear_folder(staging.parent)
        raise


def _compared(request: RepackRequest, original: tuple[str, Listing], staging: Path, emit: Emit) -> Changes:
    """What the new build changes, which is packaging only."""
    _, new = _read(request, staging, None, emit)
    changes = compare(original[1].items, new.items)
    check_scope(changes, request.packaging, {request.marker})
    old_record, new_record = (_document(place / "container.json") for place in (request.dist, staging))
    check_layers(old_record, new_record, request.layers)
    return changes


def _finish(
    request: RepackRequest, replacing: Replacing, after: Callable[[], None], now: datetime, changes: Changes
) -> Repacked:
    """Put everything in its place, and judge both candidates: the old one is superseded, the new one begins."""
    replacing.finish(after)
    for folder in (replacing.superseded, request.folder):
        gates, spec = request.gates, None
        if (folder.root / "spec.json").is_file():
            kept = load_spec(folder.root / "spec.json")
            gates, spec = parse_gates(kept.gates), spec_sha256(kept)
        with folder.lock():
            folder.record(folder.evaluate(gates, request.policy, max(now, utc_now()), spec))
    replacing.end()
    return Repacked(replacing.journal.new, changes, replacing.previous, replacing.receipt)


@contextmanager
def _staging(dist: Path) -> Iterator[Path]:
    """A folder beside ``dist`` for the new build; those that earlier runs left are removed.

    Raises:
        ConflictError: ``repack.busy``: another run is at work. TransportError: ``io.*``.
    """
    mark = f".{dist.name}{STAGING}"
    try:
        for path in [p for p in dist.absolute().parent.iterdir() if p.name.startswith(mark) and p.is_dir()]:
            with _held(path):
                remove_folder(path)
        staging = dist.with_name(mark + secrets.token_hex(4))
        (staging / BUILD).mkdir(parents=True)
    except OSError as error:
        raise io_error(error, dist) from None
    with _held(staging):
        # Not the locked folder itself: a build locks the one that it writes to.
        yield staging / BUILD
        with suppress(OSError):
            staging.rmdir()


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    try:
        with alone_in(folder, wait=False):
            yield
    except BlockingIOError:
        raise ConflictError("repack.busy", f"another repack works in {show(str(folder))}", where=str(folder)) from None


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
    container = _document(place / "container.json")
    # The marker names the prefix, portable.json where links of the base led it.
    named = {"prefix": container["prefix"]} if isinstance(container, dict) and "prefix" in container else {}
    check_marker(listing.marker, {**portable, **named}, str(place / PORTABLE))
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
            "repack.preflight",
            f"the new archive did not pass: {what}. It is kept in {show(str(staging))} until the next repack",
            where=str(staging),
        )  # fmt: skip
    return checks


def _receipt(
    request: RepackRequest, old_sha: str, changes: Changes, checks: Sequence[Check], started: str
) -> Receipt:  # fmt: skip
    return Receipt.model_validate(
        {
            "release": request.folder.release, "stage": "repack", "attempt": new_attempt(), "engine": engine_name(),
            "tools": tool_versions(), "host": this_host(), "started": started, "finished": stamp(),
            "checks": tuple(checks), "details": {"from": old_sha, **changes.to_json()},
        }
    )  # fmt: skip


def _journal(request: RepackRequest, staging: Path, receipt: Receipt, old: str, now: datetime) -> Journal:
    """All that another run needs to finish this one: the signed receipt is in it."""
    subjects = ReleaseFolder(staging).subjects()
    envelope = request.key.sign(make_statement(receipt, subjects))
    return Journal(
        old=old, new=subjects[PORTABLE], staging=staging.parent.name, at=format_time(now),
        name=receipt_name(receipt, envelope), envelope=envelope.decode(),
    )  # fmt: skip


__all__ = ["Preflight", "Rebuild", "RepackRequest", "Repacked", "repack"]
