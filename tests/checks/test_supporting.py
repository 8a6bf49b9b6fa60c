"""Signed supporting receipts are whole: each verifies with the key beside it, and no gate trusts that key."""

from __future__ import annotations

import base64
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.gates import TrustPolicy, parse_gates
from oci_builder.release.gates import _wrong_hardware
from oci_builder.release.receipts import Answer, judge, read_envelope
from oci_builder.release.signing import load_public
from tests.lab.envelopes import statement_of

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
    return {s["name"]: s["digest"]["sha256"] for s in statement_of(receipt)["subject"]}


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


CHECKS = RELEASES / "supporting/checks-h200-x2"


def details(receipt: str) -> dict[str, dict[str, Any]]:
    """Check -> what it measured, of a signed receipt; only those that ran and said something."""
    said = statement_of(CHECKS / f"{receipt}.receipt.json")["predicate"]
    ran = ((c["name"], c["details"].get("details")) for c in said["checks"])
    return {name: said["details"] for name, said in ran if said and said["details"]}


def generation(run: str, found: dict[str, Any]) -> list[str]:
    """The rows of the table of generation."""
    rows = []
    for mode in ("eager", "compiled"):
        engine, value = found["engine"][mode], found[mode]
        control = "{:.1f}, {:.2f}".format(*value["control"])
        rows.append(f"| `{run}`, {mode} | {engine['attention']} | {engine['compilation']} | {value['mean']:.4f} "
                    f"| {value['largest']:.3f} | {control} | {found['seconds'][mode]} |")  # fmt: skip
    return rows


def test_the_page_says_what_the_receipts_say() -> None:
    alone, text = details("alone"), (CHECKS / "README.md").read_text()
    flashinfer = json.loads((CHECKS / "flashinfer.json").read_bytes())["checks"][0]["details"]
    rows = [*generation("alone", alone["generation"]), *generation("flashinfer", flashinfer)]
    names = {"sdpa": "sdpa", "flash_attention_2": "flash_attention_2", "nemo_automodel": "NeMo Automodel's loader"}
    for key, name in names.items():
        value = alone["training"][key]
        rows.append(f"| {name} | {value['first']:.4f} | {value['last']:.4f} | {value['token_off']:.3f} "
                    f"| {value['gradient_off']:.3f} |")  # fmt: skip
    assert [row for row in rows if row not in text] == []
    assert f"(float32 on the CPU: {alone['training']['sdpa']['cpu_float32']:.4f})" in text


@pytest.mark.parametrize(("tier", "pattern"), [("automodel", r"flash_attn: at most ([\d.e-]+\d)"),
                                               ("vllm", r"own copy\): at most ([\d.e-]+\d)")])  # fmt: skip
def test_no_operator_was_further_off_than_the_page_says(tier: str, pattern: str) -> None:
    said = re.search(pattern, (CHECKS / "README.md").read_text())
    both = [details(receipt)[f"operators:{tier}"] for receipt in ("root", "rootless")]
    errors = [e for found in both for o in found.values() if isinstance(o, dict) for e in o.get("errors", {}).values()]
    assert said is not None and len(errors) > 4
    assert max(errors) <= float(said[1])


def test_the_page_says_what_the_exchange_gave() -> None:
    text = " ".join((CHECKS / "README.md").read_text().split())
    root, rootless = (details(receipt)["nccl"] for receipt in ("root", "rootless"))
    assert f"{root['bus_gb_s']} GB/s as root, {rootless['bus_gb_s']} GB/s as an ordinary user" in text
    assert "{:.4f} to {:.4f} on both".format(*root["fully_shard"]) in text
    assert root["fully_shard"] == rootless["fully_shard"] and f"NCCL {root['nccl'][0]}" in text
