"""The gates of v070-r1 as they stand: what they let through, and what they never do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oci_builder.model.gates import Gate, parse_gates, parse_trust
from oci_builder.model.receipts import Check, Host, Receipt
from oci_builder.release.gates import Candidate, Qualification, qualify
from tests.release.helpers import NOW, SUBJECTS, gpus, new_key, policy, receipt, signed, trusted

ROOT = Path(__file__).parents[2]
KEY = new_key()


def shipped() -> tuple[Gate, ...]:
    spec = ROOT / "spec.json"
    data = json.loads(spec.read_text()) if spec.exists() else {}
    return parse_gates(data.get("gates") or json.loads((ROOT / "releases/gates.json").read_text())["gates"])


GATES = shipped()


def passing(gates: tuple[Gate, ...]) -> dict[str, Receipt]:
    """One receipt for each gate's stage and system, that passes everything asked of it."""
    out: dict[str, Receipt] = {}
    for gate in gates:
        for os in gate.os or ("ubuntu 22.04",):
            names = {c for g in gates if g.stage == gate.stage for c in g.checks}
            names |= {c for cleared in gate.clears for g in gates if g.name == cleared for c in g.deferrable}
            need = gate.hardware
            host = Host(os=os, driver="580.95", gpus=gpus(need.count) if need else ())
            made = receipt(gate.stage, host=host, checks=tuple(Check(name=n, outcome="pass") for n in sorted(names)))
            out[f"{gate.stage}-{os}.json"] = made
    return out


def judge(receipts: dict[str, Receipt]) -> Qualification:
    envelopes = {name: signed(KEY, r) for name, r in receipts.items()}
    return qualify(Candidate("v1-r1", SUBJECTS), GATES, envelopes, policy(trusted(KEY)), NOW)


def test_everything_passed_is_a_pass() -> None:
    assert judge(passing(GATES)).state == "pass"


@pytest.mark.parametrize("gate", [g.name for g in GATES])
def test_every_gate_is_needed(gate: str) -> None:
    stage = next(g.stage for g in GATES if g.name == gate)
    found = judge({n: r for n, r in passing(GATES).items() if r.stage != stage})
    assert (found.state, next(s.state for s in found.gates if s.gate.name == gate)) == ("candidate", "open")


def test_h200_receipts_satisfy_no_gpu_gate() -> None:
    swapped = {
        n: r.model_copy(update={"host": r.host.model_copy(update={"gpus": gpus(8, "NVIDIA H200", "9.0")})})
        if r.host.gpus
        else r
        for n, r in passing(GATES).items()
    }
    found = judge(swapped)
    assert {s.gate.name for s in found.gates if s.state != "met"} == {"single", "nccl8", "nccl8-u24"}
    assert found.state == "candidate"


def test_the_second_ubuntu_may_come_from_the_first_stage() -> None:
    """``nccl8`` runs on both in turn; ``nccl8-u24`` exists for the case where only the second is missing."""
    receipts = passing(GATES)
    receipts["nccl8-u24-ubuntu 24.04.json"] = receipts["nccl8-u24-ubuntu 24.04.json"].model_copy(
        update={"stage": "nccl8"}
    )
    assert judge(receipts).state == "pass"


def test_the_same_ubuntu_twice_is_not_both() -> None:
    receipts = passing(GATES)
    second = receipts["nccl8-u24-ubuntu 24.04.json"]
    receipts["nccl8-u24-ubuntu 24.04.json"] = second.model_copy(
        update={"host": second.host.model_copy(update={"os": "ubuntu 22.04"})}
    )
    assert judge(receipts).state == "candidate"


def test_what_was_not_tested_is_said() -> None:
    assert "full 8B training" in judge({}).to_json()["not_tested"]


def test_the_trust_policy_in_the_repository_parses() -> None:
    written = (ROOT / "releases/trust.json").read_bytes()
    assert len(parse_trust(written).keys) == len(json.loads(written)["keys"])
