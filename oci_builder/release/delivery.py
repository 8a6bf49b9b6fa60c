"""What every publication does, wherever it goes: nothing secret leaves, and what arrived is signed for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from oci_builder.model.errors import SpecError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.gates import Gate, TrustPolicy
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.model.receipts import Check, Receipt
from oci_builder.release.files import create_exclusively, read_file
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.host import engine_name, new_attempt, stamp, this_host, tool_versions
from oci_builder.release.parts import MAX_FILE, PART_SIZE
from oci_builder.release.receipts import make_statement, receipt_name, require_signer
from oci_builder.release.scan import scan_archives, scan_files
from oci_builder.release.secrets import ScanOptions
from oci_builder.release.signing import SigningKey
from oci_builder.release.sweep import Scan
from oci_builder.release.walk import Walk


@dataclass(frozen=True, slots=True)
class Judge:
    """What a release is judged by, where its verdict is to be kept up with a publication."""

    gates: tuple[Gate, ...]
    policy: TrustPolicy
    spec: str | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """What is to be published.

    Attributes:
        folder: the release folder (records, receipts, SBOMs); its name is the release id.
        archives: folder with the archives that its records name.
        helper: ``ensure_runtime.sh``; its digest is in the delivery receipt.
        key: signs the delivery receipt.
        max_file, part_size: bytes; larger files are split.
        notes: what was not tested, beside what the verdict says.
        allow: secrets and weights that are let through, each with its reason.
        judge: to record the verdict anew once the delivery receipt is there.
    """

    folder: ReleaseFolder
    archives: Path
    helper: Path
    key: SigningKey
    max_file: int = MAX_FILE
    part_size: int = PART_SIZE
    notes: Sequence[str] = ()
    allow: ScanOptions = field(default_factory=ScanOptions)
    judge: Judge | None = None

    def __post_init__(self) -> None:
        """Refuse what would only be missed after hours of work.

        Raises:
            SpecError: ``publish.helper``.
        """
        if not self.helper.is_file():
            raise SpecError("publish.helper", f"{show(str(self.helper))} is no file", where=str(self.helper))

    def archive(self, name: str) -> Path:
        """An archive on disk.

        Raises:
            SpecError: ``publish.archive``: it is not there.
        """
        path = self.archives / name
        if not path.is_file():
            raise SpecError("publish.archive", f"{show(str(path))} is not there; the records name it", where=str(path))
        return path


def require_trusted(what: Publication, now: datetime, emit: Emit = silent) -> None:
    """Where a verdict is kept: the folder is as it was recorded, and the key's receipt will count.

    A folder of records alone, which ``record`` did not make, is sent with a warning.

    Raises:
        PolicyError: ``key.trust``. CheckFailed: ``release.rewritten``, ``release.unproven``.
    """
    if what.judge is not None:
        require_signer(what.judge.policy, what.key, "publish", now)
        what.folder.check_files(what.judge.policy, now)
        what.folder.require_proven(what.judge.policy, now)
        if not what.folder.protected(what.judge.policy, now):
            message = "nothing protects the release's files: no record receipt of a trusted key has their digests"
            emit(Event("warning", "publish", message=message))


def refuse_secrets(what: Publication, names: Sequence[str], files: Sequence[Path], emit: Emit = silent) -> Check:
    """Scan the archives and small files that are about to be sent; the check for the delivery receipt.

    Raises:
        PolicyError: ``policy.secret``, ``policy.weights``; OciBuilderError: an archive that cannot be read.
    """
    found = scan_archives([what.archive(name) for name in names], what.allow, Walk(emit=emit))
    records = scan_files(files, what.allow)
    whole = Scan(found.findings + records.findings, found.files + records.files, found.size + records.size)
    whole.require()
    whole.warn(emit, "publish")
    emit(Event("note", "publish", message=f"{whole.files} files scanned for secrets and weights: none"))
    return Check(name="secrets", outcome="pass", details=whole.looked_at())


def delivery_receipt(
    what: Publication, subjects: Mapping[str, str], checks: Sequence[Check], details: Mapping[str, Any], started: str
) -> tuple[str, bytes]:
    """(file name, envelope) of the receipt for one delivery; the helper's digest is always in it."""
    helper = hashlib.sha256(read_file(what.helper, DEFAULT_LIMITS.document)).hexdigest()
    receipt = Receipt.model_validate(
        {
            "release": what.folder.release, "stage": "publish", "attempt": new_attempt(), "engine": engine_name(),
            "tools": tool_versions("huggingface_hub", "oras"), "host": this_host(), "started": started,
            "finished": stamp(), "checks": tuple(checks),
            "details": {**details, "helper": {"name": what.helper.name, "sha256": helper}},
        }
    )  # fmt: skip
    envelope = what.key.sign(make_statement(receipt, subjects))
    return receipt_name(receipt, envelope), envelope


def keep(what: Publication, name: str, envelope: bytes, now: datetime) -> Path:
    """The receipt into the release folder, and the verdict after it; nothing else there changes.

    Raises:
        ConflictError: ``release.exists``. TransportError: ``io.*``. FormatError: unreadable records.
    """
    path = what.folder.receipts / name
    create_exclusively(path, envelope)
    if what.judge is not None:
        judge = what.judge
        with what.folder.lock():
            what.folder.record(what.folder.evaluate(judge.gates, judge.policy, now, judge.spec))
    return path
