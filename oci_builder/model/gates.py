"""Gates and keys: what a release must prove, and whose word counts. Data only; ``release.gates`` judges."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StrictInt, StrictStr, ValidationError

from oci_builder.model.documents import field_error
from oci_builder.model.errors import FormatError, PolicyError, SpecError, show
from oci_builder.model.receipts import PORTABLE, Closed, Engine, ShortText, Time, Word, parse_closed, parse_time
from oci_builder.model.specerrors import no_such_key


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


class Hardware(Closed):
    """GPUs that a gate wants. Every GPU of the receipt must fit: a mixed machine proves nothing about the right one."""

    name: Annotated[StrictStr, AfterValidator(_pattern)] = Field(description="regular expression, found in the name")
    capability: StrictStr = Field(pattern=r"^\d{1,3}\.\d{1,2}$", description="compute capability, exactly")
    count: Annotated[StrictInt, Field(ge=1, le=4096)] = Field(default=1, description="at least so many, by UUID")
    driver: StrictStr | None = Field(default=None, pattern=r"^\d+(\.\d+)*$", description="oldest driver, e.g. 580")


class Gate(Closed):
    """One thing that a release must prove."""

    name: Word
    stage: Word = Field(description="stage whose receipts answer this gate")
    also: tuple[Word, ...] = Field(default=(), description="further stages whose receipts answer it")
    title: ShortText = ""
    subjects: tuple[Word, ...] = Field(default=(PORTABLE,), min_length=1, description="archives a receipt must name")
    checks: tuple[Word, ...] = Field(min_length=1, description="checks that must pass")
    deferrable: tuple[Word, ...] = Field(
        default=(), description="checks that may say deferred here, once a gate that clears this one has passed them"
    )
    clears: tuple[Word, ...] = Field(default=(), description="gates whose deferred checks must pass here")
    engines: tuple[Engine, ...] = Field(default=("local", "modal"), description="fake never counts")
    hardware: Hardware | None = None
    os: tuple[ShortText, ...] = Field(default=(), description="each needs a receipt of its own, e.g. 'ubuntu 22.04'")
    min_tool: StrictStr | None = Field(default=None, pattern=r"^\d+(\.\d+)*$", description="oldest oci-builder")
    max_age_days: Annotated[StrictInt, Field(ge=1)] | None = None
    required: bool = True
    not_tested: tuple[ShortText, ...] = Field(default=(), description="what this gate does not show, for people")

    @property
    def stages(self) -> frozenset[str]:
        """All stages whose receipts answer this gate."""
        return frozenset({self.stage, *self.also})


def parse_gates(values: Iterable[Mapping[str, Any]], where: str = "spec: gates") -> tuple[Gate, ...]:
    """The gates of a spec.

    Raises:
        SpecError: ``spec.gate``: a field is wrong, a name stands twice, ``clears`` names no gate, or ``fake`` is
            among the engines.
    """
    gates = tuple(_gate(v, f"{where}[{i}]") for i, v in enumerate(values))
    names = [g.name for g in gates]
    for gate in gates:
        problem = _problem(gate, names)
        if problem:
            raise SpecError("spec.gate", f"{where}: {gate.name}: {problem}", where=f"{where}: {gate.name}")
    return gates


def _gate(value: Mapping[str, Any], where: str) -> Gate:
    try:
        return Gate.model_validate(dict(value))
    except ValidationError as error:
        said = field_error(error, where).message
        places = [p["loc"] for p in error.errors(include_url=False) if p["type"] == "extra_forbidden"]
        for (key,) in (place for place in places[:1] if len(place) == 1):
            # A key that is missing may be this one, misspelt.
            said = f"{where}: {show(str(key))}: {no_such_key(str(key), Gate.model_fields)}"
        raise SpecError("spec.gate", said, where=where) from None


def _problem(gate: Gate, names: list[str]) -> str:
    if names.count(gate.name) > 1:
        return "the name stands twice"
    if "fake" in gate.engines:
        return "the fake engine can satisfy no gate"
    unknown = sorted(set(gate.clears) - set(names))
    if unknown:
        return f"clears {unknown[0]}, which is no gate"
    if gate.name in gate.clears:
        return "clears itself"
    extra = sorted(set(gate.deferrable) - set(gate.checks))
    return f"{extra[0]} is deferrable but no check" if extra else ""


# What stands before an Ed25519 key's 32 bytes in DER (RFC 8410, section 4).
_DER = bytes.fromhex("302a300506032b6570032100")


def _public(text: str) -> str:
    bare = "".join(line for line in text.split("\n") if not line.startswith("-----"))
    try:
        raw = base64.b64decode(bare, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("not base64") from None
    if raw.startswith(_DER):
        raw_key = base64.b64encode(raw[len(_DER) :]).decode()
        raise ValueError(f"this is what stands in the .pub file; write its 32 bytes alone: {raw_key}")
    if bare != text:
        raise ValueError("not base64")
    if len(raw) != 32:
        raise ValueError(f"an Ed25519 public key has 32 bytes, this has {len(raw)}")
    return text


def key_id(public: bytes) -> str:
    """Name of a key: the sha256 of its 32 raw bytes."""
    return "sha256:" + hashlib.sha256(public).hexdigest()


class TrustedKey(Closed):
    """One key and when its word counts. A stolen key is ``revoked``: its receipts can be dated at will."""

    name: ShortText
    public: Annotated[StrictStr, AfterValidator(_public)] = Field(description="32 raw bytes, base64")
    not_before: Time
    not_after: Time
    revoked: ShortText | None = Field(default=None, description="reason; no receipt of this key counts any more")
    stages: tuple[Word, ...] = Field(default=(), description="stages it may sign for; empty: all")

    @property
    def raw(self) -> bytes:
        """The public key, 32 bytes."""
        return base64.b64decode(self.public)

    @property
    def id(self) -> str:
        """``key_id`` of this key."""
        return key_id(self.raw)


class TrustPolicy(Closed):
    """The keys whose receipts count (``trust.json``)."""

    keys: tuple[TrustedKey, ...] = Field(default=(), max_length=1000)

    def by_id(self) -> dict[str, TrustedKey]:
        """Key id -> key."""
        return {k.id: k for k in self.keys}


def parse_trust(data: bytes, where: str = "trust.json") -> TrustPolicy:
    """Parse a trust policy.

    Raises:
        SpecError: ``trust.policy``: it is no such document. The policy is ours: what is wrong with it says nothing
            about what it was to judge. ``trust.key``: a key stands twice, or its validity ends before it begins.
    """
    try:
        policy = parse_closed(TrustPolicy, data, where)
    except (FormatError, PolicyError) as error:
        raise SpecError("trust.policy", error.message, where=where) from None
    if len(policy.by_id()) != len(policy.keys):
        raise SpecError("trust.key", f"{where}: a key stands twice", where=where)
    for key in policy.keys:
        if parse_time(key.not_after) <= parse_time(key.not_before):
            raise SpecError("trust.key", f"{where}: {key.name}: validity ends before it begins", where=where)
    return policy
