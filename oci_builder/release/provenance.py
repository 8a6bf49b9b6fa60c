"""SLSA provenance v1 (slsa.dev/spec/v1.0/provenance): what went in, what came out, and what built it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.errors import OciBuilderError, SpecError, show
from oci_builder.model.gates import TrustPolicy
from oci_builder.model.jsontext import dump_json, load_json
from oci_builder.model.receipts import STATEMENT_TYPE, Envelope, parse_closed, parse_time, refuse_folded
from oci_builder.model.redact import redact_url
from oci_builder.model.spec import RegistryBase, Spec
from oci_builder.release.files import hide
from oci_builder.release.receipts import (
    CLOCK_SKEW,
    RECORD_STAGE,
    Answer,
    Verdict,
    compare_subjects,
    key_problem,
    open_envelope,
)
from oci_builder.release.signing import decode64

PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:oci-builder:build:1"
BUILDER_ID = "urn:oci-builder"


@dataclass(frozen=True, slots=True)
class Material:
    """One input of a build.

    Attributes:
        uri: where it came from; credentials and queries are removed.
        digest: algorithm -> hex digits: ``sha256``, or ``gitCommit`` for a commit.
        name: short name for people.
    """

    uri: str
    digest: Mapping[str, str]
    name: str = ""

    def to_json(self) -> dict[str, Any]:
        """A ResourceDescriptor (in-toto/attestation spec/v1/resource_descriptor.md)."""
        out: dict[str, Any] = {"uri": redact_url(self.uri), "digest": dict(sorted(self.digest.items()))}
        return {**out, "name": self.name} if self.name else out


@dataclass(frozen=True, slots=True)
class BuildRun:
    """One run of the builder: an id, and when it ran (receipt times)."""

    invocation: str
    started: str
    finished: str
    tools: Mapping[str, str]


def base_material(spec: Spec) -> Material | None:
    """The base image as a material, when it comes from a registry; other bases are named by the caller."""
    base = spec.base
    if not isinstance(base, RegistryBase):
        return None
    name = base.registry.partition("@")[0]
    return Material(f"pkg:oci/{name}", {"sha256": base.digest.removeprefix("sha256:")}, "base image")


def provenance(
    spec: Spec, subjects: Mapping[str, str], materials: Sequence[Material], run: BuildRun, unpinned: Sequence[str] = ()
) -> bytes:
    """The statement, to be signed like a receipt. Deterministic.

    Args:
        spec: what was asked for; it goes in whole, as the external parameters, its URLs redacted.
        subjects: archive name -> sha256 hex.
        materials: base, locks, source checkouts, in any order.
        run: the run.
        unpinned: inputs that have no digest of their own, in words.

    Raises:
        SpecError: ``provenance.material``: an input without a digest, or no subject.
    """
    if not subjects:
        raise SpecError("provenance.material", "provenance of nothing: no archive was named")
    for material in materials:
        if not material.digest:
            raise SpecError("provenance.material", f"{show(material.uri)} has no digest", where=material.uri)
    value = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": n, "digest": {"sha256": s}} for n, s in sorted(subjects.items())],
        "predicateType": PREDICATE_TYPE,
        "predicate": hide({"buildDefinition": _definition(spec, materials, unpinned), "runDetails": _details(run)}),
    }
    return dump_json(value)


def _definition(spec: Spec, materials: Sequence[Material], unpinned: Sequence[str]) -> dict[str, Any]:
    parameters = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"gates"})
    return {
        "buildType": BUILD_TYPE,
        "externalParameters": {"spec": parameters},
        "internalParameters": {"unpinned": sorted(unpinned)} if unpinned else {},
        "resolvedDependencies": [m.to_json() for m in sorted(materials, key=lambda m: (m.uri, m.name))],
    }


def _details(run: BuildRun) -> dict[str, Any]:
    return {
        "builder": {"id": BUILDER_ID, "version": dict(sorted(run.tools.items()))},
        "metadata": {"invocationId": run.invocation, "startedOn": run.started, "finishedOn": run.finished},
    }


def is_provenance(data: bytes) -> bool:
    """Whether an envelope's payload says that it is a provenance; believes nothing else of it."""
    try:
        value = load_json(decode64(parse_closed(Envelope, data, "envelope").payload, "payload"), "payload")
    except OciBuilderError:
        return False
    return isinstance(value, dict) and value.get("predicateType") == PREDICATE_TYPE


def judge_provenance(
    data: bytes, policy: TrustPolicy, *, now: datetime, subjects: Mapping[str, str] | None = None, where: str = ""
) -> Verdict:
    """Judge a signed provenance as ``judge`` does a receipt: signature, the key's validity, time, subjects.

    Its key must be one that may sign for stage ``record``. No input makes it raise.
    """
    try:
        opened = open_envelope(data, policy, where)
        if isinstance(opened, Verdict):
            return opened
        value = load_json(opened.payload, where)
        refuse_folded(value, where)
        named, finished = _said(value)
    except OciBuilderError as error:
        return Verdict(Answer.FAILED, (error.message,), code=error.code)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Verdict(Answer.CANNOT_TELL, (f"no provenance that can be read: {error}",), code="json.field")
    problems = {key.name: key_problem(key, RECORD_STAGE, finished) for key in opened.keys}
    good = tuple(name for name, problem in problems.items() if not problem)
    if not good:
        reasons = tuple(f"key {show(name)}: {problem}" for name, problem in problems.items())
        return Verdict(Answer.FAILED, reasons, code="receipt.key", named=named)
    if parse_time(finished) > now + CLOCK_SKEW:
        return Verdict(Answer.FAILED, (f"finished in the future: {finished}",), None, good, "receipt.time", named)
    answer, why = compare_subjects(named, subjects)
    return Verdict(answer, why, None, good, "receipt.subject" if why else "", named)


def _said(value: Any) -> tuple[dict[str, str], str]:
    """(subject -> sha256, when the build finished) of a provenance statement."""
    if value["_type"] != STATEMENT_TYPE or value["predicateType"] != PREDICATE_TYPE:
        raise ValueError("it is another kind of statement")
    pairs = [(str(s["name"]), Digest.parse(f"sha256:{s['digest']['sha256']}", "subject").hex) for s in value["subject"]]
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a subject name stands twice")
    finished = str(value["predicate"]["runDetails"]["metadata"]["finishedOn"])
    parse_time(finished)
    return dict(pairs), finished
