"""From receipts to a qualification: every way of not meeting a gate, each with its reason (C12-08)."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from oci_builder.model.errors import SpecError
from oci_builder.model.gates import Gate, parse_gates
from oci_builder.model.receipts import Host, Receipt
from oci_builder.release.gates import Candidate, Qualification, qualify, version_at_least
from tests.release.helpers import (
    B200,
    NOW,
    PORTABLE,
    SUBJECTS,
    checks,
    gpus,
    new_key,
    policy,
    receipt,
    signed,
    trusted,
)

KEY = new_key()
POLICY = policy(trusted(KEY))
CANDIDATE = Candidate("v1-r1", SUBJECTS)

ARCHIVE = {"name": "container-archive", "stage": "container", "checks": ["ok"], "subjects": list(SUBJECTS)}
IMPORTS = {"name": "imports-cpu", "stage": "imports", "checks": ["torch", "deep-ep"], "deferrable": ["deep-ep"]}
SINGLE = {
    "name": "single", "stage": "single", "checks": ["ok"], "clears": ["imports-cpu"],
    "hardware": {"name": "B200", "capability": "10.0"},
}  # fmt: skip
ALONE = {**SINGLE, "clears": []}
NCCL = {
    "name": "nccl8", "stage": "nccl8", "checks": ["ok"], "os": ["ubuntu 22.04", "ubuntu 24.04"],
    "hardware": {"name": "B200", "capability": "10.0", "count": 8, "driver": "580"},
}  # fmt: skip


def on_gpu(stage: str, count: int = 1, os: str = "ubuntu 22.04", **changes: Any) -> Receipt:
    host = Host(os=os, driver="580.95.05", gpus=changes.pop("gpus", gpus(count)))
    return receipt(stage, host=host, **changes)


def run(gates: list[dict[str, Any]], *receipts: Receipt, candidate: Candidate = CANDIDATE, **kw: Any) -> Qualification:
    envelopes = {f"r{i}.json": signed(KEY, r) for i, r in enumerate(receipts)} | kw.pop("envelopes", {})
    arguments = {"policy": POLICY, "now": NOW, **kw}
    return qualify(candidate, parse_gates(gates), envelopes, arguments["policy"], arguments["now"])


def only(found: Qualification) -> tuple[str, str]:
    """State of the release, and all reasons of its first gate in one line."""
    return found.state, " | ".join(found.gates[0].reasons)


def test_pass_needs_every_required_gate() -> None:
    assert run([ARCHIVE], receipt()).state == "pass"
    assert run([ARCHIVE, ALONE], receipt()).state == "candidate"
    assert run([ARCHIVE, {**ALONE, "required": False}], receipt()).state == "pass"


def test_no_gates_and_no_receipts_prove_nothing() -> None:
    assert run([], receipt()).state == "candidate"
    assert only(run([ARCHIVE])) == ("candidate", "no valid receipt of stage container")


def test_it_is_deterministic_and_independent_of_the_order() -> None:
    envelopes = {f"{i}.json": signed(KEY, receipt(attempt=f"a{i}")) for i in range(5)}
    forth, back = (qualify(CANDIDATE, parse_gates([ARCHIVE]), dict(order), POLICY, NOW).to_json()
                   for order in (sorted(envelopes.items()), sorted(envelopes.items(), reverse=True)))  # fmt: skip
    assert json.dumps(forth) == json.dumps(back)


def test_an_h200_never_satisfies_a_b200_gate_and_is_kept() -> None:
    found = run([ALONE], on_gpu("single", gpus=gpus(1, "NVIDIA H200", "9.0")))
    assert found.state == "candidate"
    assert "NVIDIA H200 (9.0), wanted B200" in found.gates[0].reasons[0]
    assert found.supporting[0]["gpus"] == ["NVIDIA H200"]


def test_a_failing_h200_does_not_fail_a_b200_gate() -> None:
    bad = on_gpu("single", gpus=gpus(1, "NVIDIA H200", "9.0"), checks=checks(ok="fail"))
    assert run([ALONE], bad).state == "candidate"


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        ((), "no GPU was seen"),
        (gpus(7), "7 distinct GPUs"),
        (gpus(1) * 8, "1 distinct GPUs"),
        ((*gpus(7), *gpus(1)), "listed twice"),
        ((*gpus(8), *gpus(1, "NVIDIA H200", "9.0")), "H200"),
        (gpus(8, B200, "9.0"), "wanted B200 (10.0)"),
        (gpus(8, "NVIDIA GB300", "10.0"), "wanted B200"),
    ],
)
def test_the_wrong_machine_meets_no_gate(seen: tuple[Any, ...], word: str) -> None:
    gate = {**NCCL, "os": []}
    state, reasons = only(run([gate], on_gpu("nccl8", gpus=seen)))
    assert (state, word in reasons) == ("candidate", True)


@pytest.mark.parametrize(("driver", "state"), [("580.95.05", "pass"), ("570.86", "candidate"), ("", "candidate")])
def test_an_old_driver_meets_no_gate(driver: str, state: str) -> None:
    gate = {**NCCL, "os": []}
    made = receipt("nccl8", host=Host(driver=driver, gpus=gpus(8)))
    assert run([gate], made).state == state


def test_both_systems_need_a_receipt_of_their_own() -> None:
    first, second = on_gpu("nccl8", 8), on_gpu("nccl8", 8, "ubuntu 24.04")
    state, reasons = only(run([NCCL], first))
    assert state == "candidate"
    assert reasons.startswith("ubuntu 24.04: ")
    assert run([NCCL], first, second).state == "pass"


def test_mixed_archives_are_refused() -> None:
    other = signed(KEY, receipt(), {**SUBJECTS, PORTABLE: "d" * 64})
    found = run([ARCHIVE], envelopes={"other.json": other})
    assert found.state == "candidate"
    assert (found.refused[0]["answer"], PORTABLE in found.refused[0]["reasons"][0]) == ("failed", True)


def test_a_receipt_that_does_not_name_the_portable_archive_is_refused() -> None:
    rest = {k: v for k, v in SUBJECTS.items() if k != PORTABLE}
    found = run([ARCHIVE], envelopes={"r.json": signed(KEY, receipt(), rest)})
    assert PORTABLE in found.refused[0]["reasons"][0]


def test_a_receipt_must_name_every_archive_that_the_gate_wants() -> None:
    found = run([ARCHIVE], envelopes={"r.json": signed(KEY, receipt(), {PORTABLE: "a" * 64})})
    assert "does not name runtime.oci.tar" in found.gates[0].reasons[0]


def test_a_receipt_of_another_release_is_refused() -> None:
    found = run([ARCHIVE], receipt(release="v1-r0"))
    assert (found.state, found.refused[0]["reasons"]) == (
        "candidate", ["it belongs to release v1-r0, not to v1-r1"],
    )  # fmt: skip


def test_a_receipt_for_another_spec_is_refused() -> None:
    found = run([ARCHIVE], receipt(spec="e" * 64), candidate=Candidate("v1-r1", SUBJECTS, spec="f" * 64))
    assert "another spec" in found.refused[0]["reasons"][0]


def test_an_unknown_an_expired_and_a_revoked_key_are_refused() -> None:
    made = {"r.json": signed(KEY, receipt())}
    for keys, word in (
        ((), "unknown keys"),
        ((trusted(KEY, not_after="2026-02-01T00:00:00Z"),), "valid 2026"),
        ((trusted(KEY, revoked="lost"),), "revoked: lost"),
    ):
        found = run([ARCHIVE], envelopes=made, policy=policy(*keys))
        assert (found.state, word in found.refused[0]["reasons"][0]) == ("candidate", True)


def test_a_fake_engine_meets_no_gate() -> None:
    assert "engine fake" in only(run([ARCHIVE], receipt(engine="fake")))[1]


@pytest.mark.parametrize(
    ("tool", "ok"),
    [("0.1.0", False), ("0.2", True), ("0.10.0", True), ("0.2.0.dev3", False), ("", False), ("x", False)],
)
def test_an_older_tool_is_refused(tool: str, ok: bool) -> None:
    found = run([{**ARCHIVE, "min_tool": "0.2.0"}], receipt(tools={"oci-builder": tool}))
    assert found.state == ("pass" if ok else "candidate")
    assert version_at_least(tool, "0.2.0") is ok


@pytest.mark.parametrize("tools", [{}, {"python": "3.11"}, {"oci-builder": ""}])
def test_a_receipt_that_does_not_say_what_made_it_meets_no_gate(tools: dict[str, str]) -> None:
    state, reasons = only(run([ARCHIVE], receipt(tools=tools)))
    assert (state, "does not say which oci-builder" in reasons) == ("candidate", True)


def test_an_old_receipt_is_refused() -> None:
    gate = {**ARCHIVE, "max_age_days": 30}
    assert only(run([gate], receipt()))[1].startswith("r0.json: older than 30 days")
    assert run([gate], receipt(), now=NOW - timedelta(days=20)).state == "pass"


@pytest.mark.parametrize("outcome", ["skipped", "deferred"])
def test_only_a_pass_is_a_pass(outcome: str) -> None:
    state, reasons = only(run([ARCHIVE], receipt(checks=checks(ok=outcome))))
    assert (state, "is no pass" in reasons) == ("candidate", True)


def test_a_check_that_was_not_run_is_named() -> None:
    assert "check ok was not run" in only(run([ARCHIVE], receipt(checks=())))[1]


@pytest.mark.parametrize("outcome", ["fail", "error"])
def test_a_run_that_said_no_fails_the_release(outcome: str) -> None:
    state, reasons = only(run([ARCHIVE], receipt(checks=checks(ok=outcome))))
    assert (state, f"check ok: {outcome}" in reasons) == ("failed", True)


def test_a_failure_that_no_gate_asks_about_counts() -> None:
    assert run([ARCHIVE], receipt(checks=checks(ok="pass", extra="fail"))).state == "failed"


def test_archive_and_execution_are_separate_gates() -> None:
    gates = [ARCHIVE, {**ARCHIVE, "name": "container-exec", "checks": ["exec"]}]
    found = run(gates, receipt(checks=checks(ok="pass", exec="fail")))
    assert [(g.gate.name, g.state) for g in found.gates] == [("container-archive", "met"), ("container-exec", "failed")]


def test_the_newest_run_decides_and_the_earlier_failure_stays_visible() -> None:
    early = receipt(checks=checks(ok="fail"))
    late = receipt(checks=checks(ok="pass"), finished="2026-05-02T00:00:00Z")
    good = run([ARCHIVE], early, late)
    assert (good.state, good.gates[0].history) == ("pass", ("r0.json: check ok: fail: because",))
    swapped = receipt(checks=checks(ok="pass")), receipt(checks=checks(ok="fail"), finished="2026-05-02T00:00:00Z")
    assert run([ARCHIVE], *swapped).state == "failed"


class TestDeferrals:
    early = receipt("imports", checks=checks(torch="pass", deep_ep="deferred"))

    def test_a_deferral_that_is_not_cleared_keeps_the_release_a_candidate(self) -> None:
        found = run([IMPORTS, SINGLE], self.early, on_gpu("single"))
        assert (found.state, found.gates[1].reasons) == (
            "candidate", ("imports-cpu deferred, not cleared here: deep-ep",),
        )  # fmt: skip

    def test_the_single_gpu_gate_clears_it(self) -> None:
        cleared = on_gpu("single", checks=checks(ok="pass", deep_ep="pass"))
        assert run([IMPORTS, SINGLE], self.early, cleared).state == "pass"

    def test_deferring_again_clears_nothing(self) -> None:
        again = on_gpu("single", checks=checks(ok="pass", deep_ep="deferred"))
        assert run([IMPORTS, SINGLE], self.early, again).state == "candidate"

    def test_a_deferral_that_nobody_clears_is_no_pass(self) -> None:
        state, reasons = only(run([IMPORTS], self.early))
        assert (state, reasons) == ("candidate", "deferred, and no gate clears it: deep-ep")

    def test_a_deferral_does_not_hold_up_another_gate_of_the_same_receipt(self) -> None:
        other = {**IMPORTS, "name": "other", "checks": ["torch"], "deferrable": []}
        found = run([other, IMPORTS, SINGLE], self.early)
        assert [g.state for g in found.gates] == ["met", "met", "open"]

    def test_a_deferral_that_no_gate_asks_about_must_be_passed_somewhere(self) -> None:
        early = receipt("imports", checks=checks(torch="pass", deep_ep="pass", extra="deferred"))
        assert "extra" in only(run([IMPORTS, SINGLE], early, on_gpu("single")))[1]
        cleared = on_gpu("single", checks=checks(ok="pass", extra="pass"))
        assert run([IMPORTS, SINGLE], early, cleared).state == "pass"

    def test_what_may_not_be_deferred_is_no_pass(self) -> None:
        bad = receipt("imports", checks=checks(torch="deferred", deep_ep="pass"))
        cleared = on_gpu("single", checks=checks(ok="pass", torch="pass"))
        assert run([IMPORTS, SINGLE], bad, cleared).state == "candidate"


def test_a_superseded_candidate_says_so_whatever_it_has() -> None:
    assert run([ARCHIVE], receipt(), candidate=Candidate("v1-r1", SUBJECTS, None, "9" * 64)).state == "superseded"


def test_what_was_not_tested_is_said() -> None:
    found = run([{**ARCHIVE, "not_tested": ["full 8B training"]}], receipt())
    assert found.to_json()["not_tested"] == ["full 8B training"]


def test_a_receipt_from_the_future_is_refused() -> None:
    assert run([ARCHIVE], receipt(), now=datetime(2026, 1, 2, tzinfo=UTC)).refused[0]["answer"] == "failed"


@pytest.mark.parametrize(
    "change",
    [
        {"engines": ["fake"]},
        {"clears": ["nothing"]},
        {"clears": ["container-archive"]},
        {"deferrable": ["other"]},
        {"checks": []},
        {"hardware": {"name": "(", "capability": "10.0"}},
        {"typo": 1},
    ],
)
def test_a_gate_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_gates([{**ARCHIVE, **change}])
    assert caught.value.code == "spec.gate"


def test_two_gates_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError):
        parse_gates([ARCHIVE, ARCHIVE])
    assert isinstance(parse_gates([ARCHIVE])[0], Gate)
