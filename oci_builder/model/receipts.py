"""Receipts: what a stage did, to which bytes, where, and with what outcome.

A receipt is an in-toto Statement v1 (in-toto/attestation spec/v1/statement.md). It travels inside a DSSE envelope, and
the envelope's payload bytes are what was signed; nothing is ever serialised a second time to be compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError

from oci_builder.model.documents import field_error
from oci_builder.model.errors import FormatError, show
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.redact import redact, redact_value

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
RECEIPT_TYPE: Final = "urn:oci-builder:receipt:1"

PORTABLE = "runtime.tar.gz"
OCI = "runtime.oci.tar"
DOCKER = "runtime.docker.tar.gz"

_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z\Z")


def parse_time(text: str) -> datetime:
    """``2026-01-31T12:00:00Z`` as an aware datetime: UTC, whole seconds, one spelling only.

    Raises:
        ValueError: any other form.
    """
    if not _TIME.match(text):
        raise ValueError("a time is YYYY-MM-DDTHH:MM:SSZ")
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def format_time(at: datetime) -> str:
    """The inverse of ``parse_time``; fractions of a second are dropped."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _time(text: str) -> str:
    parse_time(text)
    return text


Time = Annotated[StrictStr, AfterValidator(_time)]
Sha256 = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
_SHORT = 4096
ShortText = Annotated[StrictStr, Field(max_length=_SHORT)]
Word = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:+/@\[\]-]{0,199}$")]
Seconds = Annotated[StrictInt | StrictFloat, Field(ge=0, allow_inf_nan=False)]

Outcome = Literal["pass", "fail", "skipped", "deferred", "error"]
Engine = Literal["local", "modal", "fake"]


class Closed(BaseModel):
    """Base of our own documents: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class DigestSet(Closed):
    """The digests of a subject; sha256 is the only one that counts here."""

    sha256: Sha256


class Subject(Closed):
    """One archive that the receipt is about."""

    name: Word
    digest: DigestSet


class Gpu(Closed):
    """One GPU as the driver names it."""

    name: ShortText
    uuid: ShortText
    capability: Annotated[StrictStr, Field(pattern=r"^\d{1,3}\.\d{1,2}$", description="compute capability, e.g. 10.0")]
    memory: Annotated[StrictInt, Field(ge=0, description="bytes")] = 0


class Host(Closed):
    """Where a stage ran. ``os`` is that of the root file system the checks saw."""

    name: ShortText = ""
    os: ShortText = Field(default="", description="ID and VERSION_ID of os-release, e.g. 'ubuntu 22.04'")
    kernel: ShortText = ""
    machine: ShortText = ""
    sandbox: ShortText = Field(default="", description="gvisor, chroot, user namespace, ...")
    driver: ShortText = ""
    gpus: tuple[Gpu, ...] = Field(default=(), max_length=256)


class Check(Closed):
    """One check. Only ``pass`` is a pass; every other outcome has a reason."""

    name: Word
    outcome: Outcome
    reason: ShortText = ""
    seconds: Seconds = 0
    log: Sha256 | None = Field(default=None, description="sha256 of the log kept beside the receipt")
    details: dict[StrictStr, Any] = Field(default_factory=dict)


class Receipt(Closed):
    """The predicate: one attempt of one stage."""

    release: Word
    stage: Word
    attempt: Word = Field(description="unique for every run, also when a preempted stage runs again")
    engine: Engine
    spec: Sha256 | None = Field(default=None, description="sha256 of the canonical spec")
    tools: dict[Word, ShortText] = Field(description="name -> version; oci-builder is always there", max_length=512)
    host: Host = Host()
    started: Time
    finished: Time
    checks: tuple[Check, ...] = Field(default=(), max_length=10_000)
    details: dict[StrictStr, Any] = Field(default_factory=dict)

    def check(self, name: str) -> Check | None:
        """The check of that name, or None."""
        return next((c for c in self.checks if c.name == name), None)

    def redacted(self, secrets: Iterable[str] = ()) -> Receipt:
        """The receipt without what looks like a credential, or is one of ``secrets``, in its checks and details."""
        known = tuple(secrets)
        checks = tuple(
            c.model_copy(update={"reason": redact(c.reason, known)[:_SHORT], "details": redact_value(c.details, known)})
            for c in self.checks
        )
        return self.model_copy(update={"checks": checks, "details": redact_value(self.details, known)})


class Statement(Closed):
    """An in-toto statement with our predicate."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(default=STATEMENT_TYPE, alias="_type")
    subject: tuple[Subject, ...] = Field(max_length=256)
    predicate_type: Literal["urn:oci-builder:receipt:1"] = Field(default=RECEIPT_TYPE, alias="predicateType")
    predicate: Receipt

    @property
    def digests(self) -> dict[str, str]:
        """Subject name -> sha256, hex."""
        return {s.name: s.digest.sha256 for s in self.subject}


class Signature(BaseModel):
    """One signature; ``keyid`` is a hint that nothing relies on (DSSE protocol.md)."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    keyid: StrictStr = Field(default="", max_length=200)
    sig: StrictStr = Field(max_length=1000)


class Envelope(BaseModel):
    """A DSSE envelope (secure-systems-lab/dsse envelope.md): readers ignore unknown keys."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    payload: StrictStr
    payload_type: StrictStr = Field(alias="payloadType", max_length=200)
    signatures: tuple[Signature, ...] = Field(max_length=16)


M = TypeVar("M", bound=BaseModel)


def parse_closed(model: type[M], data: bytes, where: str, limits: Limits = DEFAULT_LIMITS) -> M:
    """Parse one of the documents above, or any other of our own closed documents.

    Raises:
        FormatError: ``json.*``; ``json.ambiguous`` for keys that differ in case only, at any depth: a reader that
            folds case would see another document under the same signature (in-toto/specification#74).
        PolicyError: ``limit.document``.
    """
    value = load_json(data, where, limits)
    if not isinstance(value, dict):
        raise FormatError("json.field", f"{where}: expected a JSON object, got {type(value).__name__}", where=where)
    refuse_folded(value, where)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise field_error(error, where) from None


def parse_statement(data: bytes, where: str, limits: Limits = DEFAULT_LIMITS) -> Statement:
    """Parse the payload of an envelope as one of our receipts.

    Raises:
        FormatError: as ``parse_closed``; ``receipt.subject`` for a name that stands twice, ``receipt.check`` for a
            check that stands twice or an outcome other than pass without a reason, ``receipt.time`` when it finished
            before it started.
    """
    statement = parse_closed(Statement, data, where, limits)
    receipt = statement.predicate
    if len(statement.digests) != len(statement.subject):
        raise FormatError("receipt.subject", f"{where}: a subject name stands twice", where=where)
    if len({c.name for c in receipt.checks}) != len(receipt.checks):
        raise FormatError("receipt.check", f"{where}: a check stands twice", where=where)
    for check in receipt.checks:
        if check.outcome != "pass" and not check.reason:
            raise FormatError(
                "receipt.check", f"{where}: {show(check.name)} is {check.outcome} without a reason", where=where
            )
    if parse_time(receipt.finished) < parse_time(receipt.started):
        raise FormatError("receipt.time", f"{where}: finished {receipt.finished} before it started", where=where)
    return statement


def refuse_folded(value: Any, where: str) -> None:
    """Refuse an object, at any depth, that has two keys equal but for case.

    Raises:
        FormatError: ``json.ambiguous``.
    """
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        if not isinstance(item, dict):
            continue
        seen: dict[str, str] = {}
        for key in item:
            other = seen.setdefault(key.casefold(), key)
            if other != key:
                pair = f"{show(other)} and {show(key)}"
                raise FormatError("json.ambiguous", f"{where}: keys that differ in case only: {pair}", where=where)
        stack += item.values()
