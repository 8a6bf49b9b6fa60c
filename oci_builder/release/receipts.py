"""Making receipts and judging them. Three answers: verified, failed, cannot tell; only the first exits 0."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path

from oci_builder.model.errors import CheckFailed, IntegrityError, OciBuilderError, PolicyError, show
from oci_builder.model.gates import TrustedKey, TrustPolicy
from oci_builder.model.jsontext import dump_json
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.model.receipts import (
    PAYLOAD_TYPE,
    DigestSet,
    Envelope,
    Receipt,
    Statement,
    Subject,
    format_time,
    parse_closed,
    parse_statement,
    parse_time,
)
from oci_builder.model.redact import secret_values
from oci_builder.release.files import create_exclusively, read_file
from oci_builder.release.signing import SigningKey, check_signatures, decode64

RECORD_STAGE = "record"
CLOCK_SKEW = timedelta(minutes=10)


class Answer(StrEnum):
    """What can be said about a receipt."""

    VERIFIED = "verified"
    FAILED = "failed"
    CANNOT_TELL = "cannot tell"

    @property
    def exit_status(self) -> int:
        """0 verified; 3 failed (bytes are not what they claim); 1 cannot tell (a check ran and could not say yes)."""
        return {"verified": 0, "failed": IntegrityError.exit_status}.get(self.value, CheckFailed.exit_status)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, why, and the receipt where it could be read.

    ``statement`` is set also when the answer is not ``verified``, for showing only: its words are then hearsay.
    ``named`` are the subjects of a statement of another kind, a provenance.
    """

    answer: Answer
    reasons: tuple[str, ...] = ()
    statement: Statement | None = None
    signers: tuple[str, ...] = ()
    code: str = ""
    named: Mapping[str, str] = field(default_factory=dict)

    @property
    def digests(self) -> dict[str, str]:
        """Subject name -> sha256 hex, as the document says."""
        return self.statement.digests if self.statement else dict(self.named)

    def to_json(self) -> dict[str, object]:
        """The verdict as JSON."""
        return {
            "answer": self.answer.value, "code": self.code, "reasons": list(self.reasons),
            "signers": list(self.signers), "subjects": self.digests,
        }  # fmt: skip


def make_statement(receipt: Receipt, subjects: Mapping[str, str]) -> bytes:
    """The statement's bytes: what is signed and stored, without this machine's secrets and what looks like one.

    Args:
        subjects: archive name -> sha256, hex.
    """
    receipt = receipt.redacted(secret_values(os.environ))
    subject = tuple(Subject(name=n, digest=DigestSet(sha256=s)) for n, s in sorted(subjects.items()))
    data = dump_json(Statement(subject=subject, predicate=receipt).model_dump(mode="json", by_alias=True))
    parse_statement(data, "receipt")  # whatever is written can be read
    return data


def receipt_name(receipt: Receipt, envelope: bytes) -> str:
    """File name of a receipt: stage, end, and the first digits of the envelope's digest, so that it is unique."""
    stage = "".join(c if c.isalnum() or c in "-_" else "-" for c in receipt.stage)
    moment = receipt.finished.replace("-", "").replace(":", "")
    return f"{stage}-{moment}-{hashlib.sha256(envelope).hexdigest()[:12]}.json"


def write_receipt(folder: Path, receipt: Receipt, subjects: Mapping[str, str], key: SigningKey) -> Path:
    """Sign a receipt and create its file in ``folder``. Not idempotent: every attempt has a receipt of its own.

    Raises:
        FormatError: ``receipt.*``, ``json.*``: the receipt would not be readable.
        ConflictError: ``release.exists``.
        TransportError: ``io.*``.
    """
    envelope = key.sign(make_statement(receipt, subjects))
    path = folder / receipt_name(receipt, envelope)
    create_exclusively(path, envelope)
    return path


def recorded_files(data: bytes, where: str) -> dict[str, str] | None:
    """File name -> sha256 as a receipt of stage ``record`` says; None for any other document. Believes no signature."""
    try:
        envelope = parse_closed(Envelope, data, where)
        receipt = parse_statement(decode64(envelope.payload, where), where).predicate
    except OciBuilderError:
        return None
    files = receipt.details.get("files")
    if receipt.stage != RECORD_STAGE or not isinstance(files, dict):
        return None
    return {str(name): str(sha256) for name, sha256 in files.items() if "/" not in str(name)}


def read_envelope(path: Path) -> bytes:
    """The bytes of a receipt file, bounded by the document limit.

    Raises:
        TransportError: ``io.*``.
    """
    return read_file(path, DEFAULT_LIMITS.document)


def judge(
    data: bytes,
    policy: TrustPolicy,
    *,
    now: datetime,
    subjects: Mapping[str, str] | None = None,
    where: str = "receipt",
) -> Verdict:
    """Judge one envelope. Pure: the same arguments give the same verdict, and no input makes it raise.

    A key's validity is compared with the time at which the receipt says that it finished: there is no time stamping
    authority, so a key that may have been stolen must be marked revoked, which refuses all its receipts.

    Args:
        data: the envelope file.
        policy: the trusted keys.
        now: the moment of judging; a receipt from the future is refused.
        subjects: archive name -> sha256 that the receipt should be about. A name that it has with another digest is a
            failure; none of the names: cannot tell.
    """
    try:
        opened = open_envelope(data, policy, where)
        if isinstance(opened, Verdict):
            return opened
        statement = parse_statement(opened.payload, where)
    except OciBuilderError as error:
        return _unreadable(error)
    return _judge_statement(statement, opened.keys, now, subjects)


@dataclass(frozen=True, slots=True)
class Opened:
    """An envelope's payload, and the trusted keys that signed it; whether they were valid then is not judged yet."""

    payload: bytes
    keys: tuple[TrustedKey, ...]


def open_envelope(data: bytes, policy: TrustPolicy, where: str) -> Opened | Verdict:
    """The payload with its signers, or why it has none that count.

    Raises:
        FormatError: ``json.*``, ``receipt.base64``. PolicyError: ``limit.document``.
    """
    envelope = parse_closed(Envelope, data, where)
    payload = decode64(envelope.payload, f"{where}: payload")
    if envelope.payload_type != PAYLOAD_TYPE:
        return _unknown("receipt.kind", f"payload type {show(envelope.payload_type)}, expected {PAYLOAD_TYPE}")
    checked = check_signatures(envelope, payload, policy, where)
    if checked.broken:
        names = ", ".join(show(k.name) for k in checked.broken)
        reason = f"the signature of {names} does not fit these bytes"
        return Verdict(Answer.FAILED, (reason,), code="receipt.signature")
    if not checked.valid:
        return _unsigned(envelope, checked.unknown, payload, where)
    return Opened(payload, checked.valid)


def _judge_statement(
    statement: Statement, keys: tuple[TrustedKey, ...], now: datetime, subjects: Mapping[str, str] | None
) -> Verdict:
    receipt = statement.predicate
    problems = {key.name: key_problem(key, receipt.stage, receipt.finished) for key in keys}
    good = tuple(name for name, problem in problems.items() if not problem)
    if not good:
        reasons = tuple(f"key {show(name)}: {problem}" for name, problem in problems.items())
        return Verdict(Answer.FAILED, reasons, statement, code="receipt.key")
    if parse_time(receipt.finished) > now + CLOCK_SKEW:
        return Verdict(Answer.FAILED, (f"finished in the future: {receipt.finished}",), statement, good, "receipt.time")
    answer, reasons = compare_subjects(statement.digests, subjects)
    return Verdict(answer, reasons, statement, good, "receipt.subject" if reasons else "")


def compare_subjects(named: Mapping[str, str], subjects: Mapping[str, str] | None) -> tuple[Answer, tuple[str, ...]]:
    """Whether a statement's subjects are those that are asked about: a name with another digest is a failure."""
    wrong = tuple(
        f"{name} is {digest[:12]}…, this archive is {subjects[name][:12]}…"
        for name, digest in named.items()
        if subjects and name in subjects and subjects[name] != digest
    )
    if wrong:
        return Answer.FAILED, wrong
    if not named or (subjects and not named.keys() & subjects.keys()):
        return Answer.CANNOT_TELL, ("it names no archive" if not named else "it names none of these archives",)
    return Answer.VERIFIED, ()


def key_problem(key: TrustedKey, stage: str, finished: str) -> str:
    """Why a key's word does not count for what it signed at a time; empty when it does."""
    if key.revoked is not None:
        return f"revoked: {key.revoked}"
    if not parse_time(key.not_before) <= parse_time(finished) <= parse_time(key.not_after):
        return f"valid {key.not_before} to {key.not_after}, the receipt is of {finished}"
    if key.stages and stage not in key.stages:
        return f"may not sign for stage {stage}"
    return ""


def require_signer(policy: TrustPolicy, key: SigningKey, stage: str, now: datetime) -> None:
    """Refuse a key whose word would not count, before there is anything to sign.

    Raises:
        PolicyError: ``key.trust``.
    """
    known = policy.by_id().get(key.id)
    problem = key_problem(known, stage, format_time(now)) if known else "the trust policy does not list it"
    if problem:
        raise PolicyError(
            "key.trust", f"a receipt of stage {stage} signed by {key.id} would be refused: {problem}", where=key.id
        )


def _unsigned(envelope: Envelope, unknown: tuple[str, ...], payload: bytes, where: str) -> Verdict:
    try:
        statement = parse_statement(payload, where)
    except OciBuilderError as error:
        return _unreadable(error)
    reason = f"signed by unknown keys only: {', '.join(unknown)}" if envelope.signatures else "not signed"
    return Verdict(Answer.CANNOT_TELL, (reason,), statement, code="receipt.key")


def _unreadable(error: OciBuilderError) -> Verdict:
    # JSON of another kind, or an older form, is not a broken receipt: nothing can be said about it (json.field).
    # Whatever has two readings, or no reading, is refused.
    answer = Answer.CANNOT_TELL if error.code == "json.field" else Answer.FAILED
    return Verdict(answer, (error.message,), code=error.code)


def _unknown(code: str, reason: str) -> Verdict:
    return Verdict(Answer.CANNOT_TELL, (reason,), code=code)
