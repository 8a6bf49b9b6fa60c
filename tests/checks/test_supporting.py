"""Signed supporting receipts are whole: each verifies with the key beside it, and no gate trusts that key."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from oci_builder.model.gates import TrustPolicy, parse_gates
from oci_builder.release.gates import _wrong_hardware
from oci_builder.release.receipts import Answer, judge, read_envelope
from oci_builder.release.signing import load_public

RELEASES = Path(__file__).resolve().parents[2] / "releases"
NOW = datetime(2027, 1, 1, tzinfo=UTC)
RECEIPTS = sorted((RELEASES / "supporting").rglob("*.receipt.json"))


def policy(receipt: Path) -> TrustPolicy:
    """Trust in the key that lies beside a receipt."""
    public = load_public(receipt.with_name(receipt.name.replace(".receipt.json", ".pub")))
    key = {"name": "the run's own", "public": base64.b64encode(public).decode(),
           "not_before": "2026-11-01T00:00:00Z", "not_after": "2027-11-01T00:00:00Z"}  # fmt: skip
    return TrustPolicy.model_validate({"keys": [key]})


def subjects(receipt: Path) -> dict[str, str]:
    """The archives that a receipt says it is about; they were not kept."""
    statement = json.loads(base64.b64decode(json.loads(receipt.read_bytes())["payload"]))
    return {s["name"]: s["digest"]["sha256"] for s in statement["subject"]}


def test_there_are_some() -> None:
    assert len(RECEIPTS) >= 2


@pytest.mark.parametrize("receipt", RECEIPTS, ids=lambda p: p.name)
def test_a_receipt_verifies_with_its_own_key_and_with_no_other(receipt: Path) -> None:
    envelope, about = read_envelope(receipt), subjects(receipt)
    assert judge(envelope, policy(receipt), now=NOW, subjects=about).answer is Answer.VERIFIED
    # One run may sign several receipts.
    others = [other for other in map(policy, RECEIPTS) if other.keys[0].id != policy(receipt).keys[0].id]
    assert others
    assert all(judge(envelope, other, now=NOW, subjects=about).answer is not Answer.VERIFIED for other in others)


@pytest.mark.parametrize("receipt", RECEIPTS, ids=lambda p: p.name)
def test_no_release_trusts_it(receipt: Path) -> None:
    trusted = TrustPolicy.model_validate_json((RELEASES / "trust.json").read_bytes())
    assert not {key.id for key in trusted.keys} & {key.id for key in policy(receipt).keys}


@pytest.mark.parametrize("receipt", RECEIPTS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_even_with_its_key_trusted_no_b200_gate_takes_its_hardware(receipt: Path) -> None:
    verdict = judge(read_envelope(receipt), policy(receipt), now=NOW, subjects=subjects(receipt))
    spec = json.loads((RELEASES.parent / "spec.json").read_bytes())
    wanted = [gate.hardware for gate in parse_gates(spec["gates"]) if gate.hardware]
    assert verdict.statement is not None
    assert len(wanted) >= 3
    assert all(_wrong_hardware(hardware, verdict.statement.predicate.host) for hardware in wanted)
