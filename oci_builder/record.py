"""``oci-builder record``: a finished build becomes ``releases/<release>/``: records, inventories, SBOMs, provenance.

What goes in was read from the archives themselves, after their digests were compared and their files scanned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.errors import ConflictError, SpecError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.gates import TrustPolicy
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.model.receipts import DOCKER, OCI, PORTABLE, Check, Receipt
from oci_builder.model.spec import Spec, load_spec
from oci_builder.release.bills import Naming, bills, file_name
from oci_builder.release.files import hide, read_file, remove_leftovers, replace_file
from oci_builder.release.folder import ReleaseFolder, spec_sha256
from oci_builder.release.host import engine_name, new_attempt, stamp, this_host, tool_versions, utc_now
from oci_builder.release.materials import materials
from oci_builder.release.packages import Contents, inventory_bytes, read_packages
from oci_builder.release.parts import hash_parts, plan_parts
from oci_builder.release.provenance import BuildRun, provenance
from oci_builder.release.receipts import RECORD_STAGE, Answer, judge, recorded_files, require_signer, write_receipt
from oci_builder.release.scan import scan_archives, scan_files
from oci_builder.release.secrets import ScanOptions
from oci_builder.release.signing import SigningKey
from oci_builder.release.sweep import Scan
from oci_builder.release.walk import Walk

RECORDS = ("container.json", "portable.json")
PROVENANCE = "provenance.json"
SPEC = "spec.json"


@dataclass(frozen=True, slots=True)
class RecordRequest:
    """What is recorded.

    Attributes:
        dist: folder of a finished build.
        folder: the release folder to make; its name is the release id.
        spec: the spec that was built.
        key: signs the provenance and the receipt.
        allow: secrets and weights that are let through, each with its reason.
        policy: whose receipts count, the key's among them; None where that is judged elsewhere.
    """

    dist: Path
    folder: ReleaseFolder
    spec: Path
    key: SigningKey
    allow: ScanOptions = field(default_factory=ScanOptions)
    threads: int = 2
    policy: TrustPolicy | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The files of the folder with their sha256, and the receipt; ``again`` when they all were there already."""

    folder: Path
    files: Mapping[str, str]
    receipt: Path | None
    again: bool = False


def record(request: RecordRequest, emit: Emit = silent) -> Recorded:
    """Make a release folder. The receipt comes last and makes it whole. Idempotent.

    Raises:
        SpecError: ``record.build``: no finished build, or one of another spec; ``release.name``; ``spec.*``.
        IntegrityError: ``blob.digest``: an archive is not what its record says.
        PolicyError: ``policy.secret``, ``policy.weights``; ``key.trust``: nobody would believe the receipt.
        ConflictError: ``release.exists``: the folder holds another build.
        FormatError, TransportError: unreadable archives or files.
    """
    started = stamp()
    if request.policy is not None:
        require_signer(request.policy, request.key, RECORD_STAGE, utc_now())
    spec = load_spec(request.spec)
    container, subjects = _read_build(request, spec)
    files = {name: read_file(request.dist / name, DEFAULT_LIMITS.document) for name in RECORDS}
    known = _known(request, files)
    if known is not None:
        return known
    how = Walk(spec.platform, spec.effective_limits, request.threads, emit)
    scan = _scan(request, subjects, how)
    scan.require()
    scan.warn(emit, "record")
    emit(Event("note", "record", message=f"{scan.files} files scanned, nothing found"))
    files |= _spec_file(request.spec, emit)
    files |= _described(spec, read_packages(request.dist / OCI, replace(how, seen=set())))
    files[PROVENANCE] = _provenance(request, spec, container, subjects, started)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    receipt = _receipt(request, spec, subjects, scan, digests, started)
    return _put(request, files, digests, receipt, subjects)


def _read_build(request: RecordRequest, spec: Spec) -> tuple[dict[str, Any], dict[str, str]]:
    """(``container.json``, archive -> sha256), after every archive was hashed."""
    if spec.release not in (None, request.folder.release):
        raise SpecError(
            "release.name", f"the spec's release is {spec.release}, the folder is {show(str(request.folder.root))}",
            expected=spec.release, actual=request.folder.release,
        )  # fmt: skip
    source = ReleaseFolder(request.dist)
    container, portable = (source.document(name) for name in ("container.json", "portable.json"))
    if not isinstance(container, dict) or not isinstance(portable, dict):
        raise SpecError("record.build", f"{show(str(request.dist))} holds no finished build", where=str(request.dist))
    wanted = {"name": spec.name, "tag": spec.tag, "prefix": spec.prefix, "epoch": spec.epoch, "release": spec.release}
    wrong = [key for key, value in wanted.items() if container.get(key) != value]
    if wrong:
        raise SpecError(
            "record.build", f"{show(str(request.dist))} is a build of another spec: its {wrong[0]} differs",
            where=str(request.dist), expected=wanted[wrong[0]], actual=container.get(wrong[0]),
        )  # fmt: skip
    subjects = source.subjects()
    missing = sorted({PORTABLE, OCI, DOCKER} - subjects.keys())
    if missing:
        raise SpecError("record.build", f"container.json does not name {missing[0]}", where=str(request.dist))
    for name, sha256 in subjects.items():
        if not (request.dist / name).is_file():
            raise SpecError("record.build", f"{show(str(request.dist / name))} is not there", where=str(request.dist))
        hash_parts(plan_parts(name, request.dist / name, max_file=1 << 62), sha256)
    return container, subjects


def _scan(request: RecordRequest, subjects: Mapping[str, str], walk: Walk) -> Scan:
    found = scan_archives([request.dist / name for name in sorted(subjects)], request.allow, walk)
    records = scan_files([*(request.dist / name for name in RECORDS), request.spec], request.allow)
    return Scan(found.findings + records.findings, found.files + records.files, found.size + records.size)


def _spec_file(path: Path, emit: Emit) -> dict[str, bytes]:
    """The spec as it was built, unless it holds what may be a credential: then it stays where it is."""
    data = read_file(path, DEFAULT_LIMITS.document)
    text = data.decode("utf-8", "replace")
    if hide(text) != text:
        emit(Event("note", "record", message=f"{path.name} may hold a credential and is not kept with the release"))
        return {}
    return {SPEC: data}


def _described(spec: Spec, contents: Contents) -> dict[str, bytes]:
    """Inventories of the tiers, and bills of the tiers and the image."""
    missing = sorted(spec.tiers.keys() - contents.tiers.keys())
    tiers = {**contents.tiers, **{name: {"tier": name, "packages": [], "omitted": {}} for name in missing}}
    out = {f"inventory-{name}.json": inventory_bytes(tier) for name, tier in sorted(tiers.items())}
    contents.tiers = tiers
    made = bills(contents, Naming(spec.name, spec.release or spec.tag, spec.epoch))
    return out | {file_name(name): data for name, data in made.items()}


def _provenance(
    request: RecordRequest, spec: Spec, container: Mapping[str, Any], subjects: Mapping[str, str], started: str
) -> bytes:
    made_of, unpinned = materials(spec, request.spec, container)
    tools = {**tool_versions(), **_libraries(container)}
    manifest = str(_object(container, "manifest").get("digest") or "")
    named = {**subjects, spec.full_reference: Digest.parse(manifest, "container.json: manifest").hex}
    run = BuildRun(new_attempt(), started, stamp(), tools)
    return request.key.sign(provenance(spec, named, made_of, run, unpinned))


def _libraries(container: Mapping[str, Any]) -> dict[str, str]:
    libraries = _object(_object(_object(container, "tools"), "compression"), "libraries")
    return {str(name): str(version) for name, version in libraries.items()}


def _object(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _receipt(
    request: RecordRequest, spec: Spec, subjects: Mapping[str, str], scan: Scan, digests: Mapping[str, str], start: str
) -> Receipt:
    checks = (
        Check(name="archives", outcome="pass", details=dict(subjects)),
        Check(name="secrets", outcome="pass", details={**scan.looked_at(), "allowed": dict(request.allow.allow_paths)}),
    )  # fmt: skip
    return Receipt.model_validate(
        {
            "release": request.folder.release, "stage": "record", "attempt": new_attempt(), "engine": engine_name(),
            "spec": spec_sha256(spec), "tools": tool_versions("cyclonedx-python-lib"), "host": this_host(),
            "started": start, "finished": stamp(), "checks": checks, "details": {"files": dict(digests)},
        }
    )  # fmt: skip


def _put(
    request: RecordRequest, files: Mapping[str, bytes], digests: Mapping[str, str], receipt: Receipt,
    subjects: Mapping[str, str],
) -> Recorded:  # fmt: skip
    """Everything into the folder, the receipt last: without it, what is there is left from a run that broke off.

    Receipts of stages that ran before, and the records that a repack left, stay as they are.
    """
    folder = request.folder.create()
    with folder.lock():
        # Of a run that was killed: only who holds the lock writes these.
        remove_leftovers(folder.root, tuple(files))
        remove_leftovers(folder.receipts, (f"{RECORD_STAGE}-",))
        known = _known(request, {name: files[name] for name in RECORDS})
        if known is not None:
            return known
        for name in sorted(files.keys() - set(RECORDS)):
            replace_file(folder.root / name, files[name])
        for name in RECORDS:
            if not (folder.root / name).exists():
                folder.add(name, files[name])
        path = write_receipt(folder.receipts, receipt, subjects, request.key)
    return Recorded(folder.root, digests, path)


def _known(request: RecordRequest, records: Mapping[str, bytes]) -> Recorded | None:
    """The folder, when it is whole and of this build; None when there is something to do.

    Raises:
        ConflictError: ``release.exists``: it is of another build, or not what was recorded.
    """
    folder, policy = request.folder, request.policy
    for name, data in records.items():
        path = folder.root / name
        if path.exists() and read_file(path, len(data)) != data:
            raise ConflictError(
                "release.exists", f"{show(str(path))} is of another build; a release is never rewritten",
                where=str(path),
            )  # fmt: skip
    for name, envelope in folder.envelopes().items():
        said = recorded_files(envelope, name) or {}
        if said.get("portable.json") != hashlib.sha256(records["portable.json"]).hexdigest():
            continue
        if policy is not None and judge(envelope, policy, now=utc_now(), where=name).answer is not Answer.VERIFIED:
            continue
        wrong = folder.differing(said)
        if wrong:
            raise ConflictError(
                "release.exists", f"{show(str(folder.root))} was recorded, and has changed since: {', '.join(wrong)}",
                where=str(folder.root),
            )  # fmt: skip
        return Recorded(folder.root, said, folder.receipts / name, again=True)
    return None


__all__ = ["RecordRequest", "Recorded", "record"]
