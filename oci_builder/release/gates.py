"""From gates and receipts to a qualification. Pure: no clock, no files; the same arguments give the same bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from oci_builder.model.gates import Gate, Hardware, TrustPolicy
from oci_builder.model.receipts import PORTABLE, Host, Receipt, Statement, format_time, parse_time
from oci_builder.release.receipts import Answer, Verdict, judge

TOOL = "oci-builder"


@dataclass(frozen=True, slots=True)
class Candidate:
    """The release that is judged.

    Attributes:
        release: its id, e.g. ``v070-r1``.
        subjects: archive name -> sha256 hex; the portable archive's identifies the release.
        spec: sha256 of the canonical spec; None where it is not known, and then not compared.
        superseded_by: sha256 of the portable archive that replaced this one.
    """

    release: str
    subjects: Mapping[str, str]
    spec: str | None = None
    superseded_by: str | None = None


@dataclass(frozen=True, slots=True)
class GateState:
    """One gate: ``met``, ``failed`` (a fitting run said no) or ``open`` (nothing fitting has said yes).

    ``evidence`` are the receipts that met it, ``reasons`` why it is not met, ``history`` earlier fitting runs that
    said no: a later pass does not erase them.
    """

    gate: Gate
    state: str
    evidence: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    history: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The gate in ``qualification.json``."""
        return {
            "name": self.gate.name, "title": self.gate.title, "stage": self.gate.stage, "state": self.state,
            "required": self.gate.required, "receipts": list(self.evidence), "reasons": list(self.reasons),
            "history": list(self.history),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Qualification:
    """State of a release and the reason for it: ``candidate``, ``pass``, ``failed`` or ``superseded``."""

    candidate: Candidate
    state: str
    gates: tuple[GateState, ...]
    supporting: tuple[dict[str, Any], ...]
    refused: tuple[dict[str, Any], ...]
    evaluated_at: str

    def to_json(self) -> dict[str, Any]:
        """The content of ``qualification.json``."""
        return {
            "schema": 1, "release": self.candidate.release, "state": self.state, "evaluated_at": self.evaluated_at,
            "subjects": dict(self.candidate.subjects), "spec": self.candidate.spec,
            "superseded_by": self.candidate.superseded_by, "gates": [g.to_json() for g in self.gates],
            "supporting": list(self.supporting), "refused": list(self.refused),
            "not_tested": sorted({line for g in self.gates for line in g.gate.not_tested}),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Run:
    """A receipt that is verified and is about this candidate."""

    name: str
    statement: Statement

    @property
    def receipt(self) -> Receipt:
        return self.statement.predicate


@dataclass(frozen=True, slots=True)
class _Part:
    """What one (gate, os) pair found."""

    best: _Run | None = None
    says_no: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    history: tuple[str, ...] = ()


def qualify(
    candidate: Candidate, gates: Sequence[Gate], envelopes: Mapping[str, bytes], policy: TrustPolicy, now: datetime
) -> Qualification:
    """Judge every receipt, then every gate.

    Args:
        candidate: what is judged.
        gates: of the spec.
        envelopes: receipt file name -> its bytes.
        policy: whose signatures count.
        now: the moment of judging, for ages and for receipts from the future.
    """
    runs: list[_Run] = []
    refused: list[dict[str, Any]] = []
    for name, data in sorted(envelopes.items()):
        verdict = judge(data, policy, now=now, subjects=candidate.subjects, where=name)
        reasons = _not_ours(verdict, candidate)
        if verdict.statement is not None and not reasons:
            runs.append(_Run(name, verdict.statement))
        else:
            refused.append({"receipt": name, "answer": verdict.answer.value, "reasons": reasons})
    judged = [_judge_gate(g, candidate, [r for r in runs if r.receipt.stage in g.stages], now, gates) for g in gates]
    states = _settle_deferrals(judged, runs)
    used = {name for s in states for name in s.evidence}
    supporting = tuple(_supporting(run, gates, candidate, now) for run in runs if run.name not in used)
    state = _overall(states, candidate)
    return Qualification(candidate, state, tuple(states), supporting, tuple(refused), format_time(now))


def _overall(states: Iterable[GateState], candidate: Candidate) -> str:
    needed = [s.state for s in states if s.gate.required]
    if candidate.superseded_by is not None:
        return "superseded"
    if "failed" in needed:
        return "failed"
    # No gates at all prove nothing.
    return "pass" if needed and all(s == "met" for s in needed) else "candidate"


def _not_ours(verdict: Verdict, candidate: Candidate) -> list[str]:
    if verdict.answer is not Answer.VERIFIED or verdict.statement is None:
        return list(verdict.reasons)
    receipt = verdict.statement.predicate
    reasons = []
    if receipt.release != candidate.release:
        reasons.append(f"it belongs to release {receipt.release}, not to {candidate.release}")
    if PORTABLE in candidate.subjects and PORTABLE not in verdict.statement.digests:
        reasons.append(f"it does not name {PORTABLE}, by which a release is known")
    if candidate.spec and receipt.spec and receipt.spec != candidate.spec:
        reasons.append(f"it was made for another spec ({receipt.spec[:12]}…)")
    return reasons


def _judge_gate(
    gate: Gate, candidate: Candidate, about: Sequence[_Run], now: datetime, gates: Sequence[Gate]
) -> GateState:
    # A failure that no gate of the stage asks about counts against all of them: a run that said no is no proof.
    others = {c for g in gates if g.stages & gate.stages for c in g.checks} - set(gate.checks)
    parts = []
    for os in gate.os or ("",):
        misfits = {run.name: _misfits(gate, os, candidate, run, now) for run in about}
        parts.append((os, _judge_part(gate, about, misfits, others)))
    evidence = tuple(dict.fromkeys(p.best.name for _, p in parts if p.best))
    history = tuple(line for _, p in parts for line in p.history)
    reasons = tuple((f"{os}: " if os else "") + r for os, p in parts for r in (*p.says_no, *p.reasons))
    if any(p.says_no for _, p in parts):
        return GateState(gate, "failed", evidence, reasons, history)
    met = all(p.best is not None for _, p in parts)
    return GateState(gate, "met" if met else "open", evidence, () if met else reasons, history)


def _judge_part(gate: Gate, about: Sequence[_Run], misfits: Mapping[str, list[str]], others: set[str]) -> _Part:
    """The newest run that fits decides. Runs that do not fit (other hardware, other system) never say no."""
    if not about:
        return _Part(reasons=(f"no valid receipt of stage {' or '.join(sorted(gate.stages))}",))
    fitting = sorted((r for r in about if not misfits[r.name]), key=lambda r: (r.receipt.finished, r.name))
    if not fitting:
        return _Part(reasons=tuple(f"{name}: {'; '.join(why)}" for name, why in misfits.items()))
    answers = [(run, *_answers(gate, run.receipt, others)) for run in fitting]
    newest, no, silent = answers[-1]
    history = tuple(f"{run.name}: {line}" for run, lines, _ in answers[:-1] for line in lines)
    if no:
        return _Part(says_no=tuple(f"{newest.name}: {line}" for line in no), history=history)
    if silent:
        return _Part(reasons=tuple(f"{newest.name}: {line}" for line in silent), history=history)
    return _Part(best=newest, history=history)


def _answers(gate: Gate, receipt: Receipt, others: set[str]) -> tuple[list[str], list[str]]:
    """(checks that said no, checks that did not say yes)."""
    said_no = [c for c in receipt.checks if c.outcome in ("fail", "error") and c.name not in others]
    no = [f"check {c.name}: {c.outcome}: {c.reason}" for c in said_no]
    silent: list[str] = []
    for name in gate.checks:
        check = receipt.check(name)
        if check is None:
            silent.append(f"check {name} was not run")
        elif check.outcome == "skipped" or (check.outcome == "deferred" and name not in gate.deferrable):
            silent.append(f"check {name} is {check.outcome}, which is no pass: {check.reason}")
    return no, silent


def _misfits(gate: Gate, os: str, candidate: Candidate, run: _Run, now: datetime) -> list[str]:
    """Why a run says nothing about a gate."""
    receipt, digests = run.receipt, run.statement.digests
    out = [f"does not name {s}" for s in gate.subjects if s not in digests]
    out += [f"the candidate has no {s}" for s in gate.subjects if s in digests and s not in candidate.subjects]
    if receipt.engine not in gate.engines:
        out.append(f"engine {receipt.engine}, wanted {' or '.join(gate.engines)}")
    if os and receipt.host.os != os:
        out.append(f"ran on {receipt.host.os or 'an unnamed system'}, wanted {os}")
    if not receipt.tools.get(TOOL):
        out.append(f"does not say which {TOOL} made it")
    elif gate.min_tool and not version_at_least(receipt.tools[TOOL], gate.min_tool):
        out.append(f"made by {TOOL} {receipt.tools[TOOL]}, wanted {gate.min_tool} or newer")
    if gate.max_age_days and now - parse_time(receipt.finished) > timedelta(days=gate.max_age_days):
        out.append(f"older than {gate.max_age_days} days: {receipt.finished}")
    return out + (_wrong_hardware(gate.hardware, receipt.host) if gate.hardware else [])


def _wrong_hardware(want: Hardware, host: Host) -> list[str]:
    if not host.gpus:
        return ["no GPU was seen"]
    out = []
    foreign = sorted({f"{g.name} ({g.capability})" for g in host.gpus if not _fits(want, g.name, g.capability)})
    if foreign:
        out.append(f"ran on {', '.join(foreign)}, wanted {want.name} ({want.capability})")
    distinct = len({g.uuid for g in host.gpus})
    if distinct < want.count:
        out.append(f"{distinct} distinct GPUs, wanted {want.count}")
    if distinct != len(host.gpus):
        out.append("one GPU is listed twice")
    if want.driver and not version_at_least(host.driver, want.driver):
        out.append(f"driver {host.driver or 'unknown'}, wanted {want.driver} or newer")
    return out


def _fits(want: Hardware, name: str, capability: str) -> bool:
    return re.search(want.name, name) is not None and capability == want.capability


def version_at_least(actual: str, wanted: str) -> bool:
    """Whether the dotted number at the start of ``actual`` is at least ``wanted``; a development version of the wanted
    number (``0.2.0.dev1``, ``0.2.0rc1``) is older than it."""
    match = re.match(r"(\d+(?:\.\d+)*)(.*)", actual)
    if not match:
        return False
    have, want = ([int(part) for part in text.split(".")] for text in (match[1], wanted))
    size = max(len(have), len(want))
    have += [0] * (size - len(have))
    want += [0] * (size - len(want))
    early = re.match(r"[.-]?(dev|a|b|rc|alpha|beta|pre)", match[2]) is not None
    return have > want or (have == want and not early)


def _settle_deferrals(states: list[GateState], runs: Sequence[_Run]) -> list[GateState]:
    """A deferral is a debt: a gate that clears the deferring one must show a pass of the same check.

    A deferred check that no gate of its stage asks about is a debt of all of them, payable by any clearing gate.
    """
    by_name = {run.name: run for run in runs}
    claimed = {c for s in states for c in s.gate.checks}
    deferred = {s.gate.name: _outcomes(s, by_name, "deferred") for s in states}
    paid = {s.gate.name: _outcomes(s, by_name, "pass") if s.state == "met" else set() for s in states}
    out = []
    for state in states:
        gate, owed = state.gate, deferred[state.gate.name]
        payers = [s.gate for s in states if gate.name in s.gate.clears]
        lines = [] if payers else _debts("deferred, and no gate clears it", owed & set(gate.checks))
        anybody = {c for s in states if s.gate.clears for c in paid[s.gate.name]}
        lines += _debts("deferred, and passed nowhere", owed - claimed - anybody)
        for creditor in gate.clears:
            wanted = {c for s in states if s.gate.name == creditor for c in deferred[creditor] & set(s.gate.checks)}
            lines += _debts(f"{creditor} deferred, not cleared here", wanted - paid[gate.name])
        met = state.state == "met" and not lines
        out.append(state if met or state.state != "met" else replace(state, state="open", reasons=tuple(lines)))
    return out


def _debts(text: str, checks: set[str]) -> list[str]:
    return [f"{text}: {', '.join(sorted(checks))}"] if checks else []


def _outcomes(state: GateState, runs: Mapping[str, _Run], outcome: str) -> set[str]:
    return {c.name for e in state.evidence for c in runs[e].receipt.checks if c.outcome == outcome}


def _supporting(run: _Run, gates: Sequence[Gate], candidate: Candidate, now: datetime) -> dict[str, Any]:
    why: list[str] = []
    for gate in gates:
        if run.receipt.stage in gate.stages:
            misfits = _misfits(gate, "", candidate, run, now)
            why.append(f"{gate.name}: {'; '.join(misfits) or 'another receipt decides'}")
    return {
        "receipt": run.name, "stage": run.receipt.stage, "engine": run.receipt.engine,
        "gpus": sorted({g.name for g in run.receipt.host.gpus}), "why": why or ["no gate asks for this stage"],
    }  # fmt: skip
