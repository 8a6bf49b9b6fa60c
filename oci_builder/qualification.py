"""``oci-builder qualification``: recompute what a release folder says, and compare or record it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from oci_builder.model.errors import SpecError, show
from oci_builder.model.gates import Gate, TrustPolicy, parse_gates
from oci_builder.model.receipts import parse_time
from oci_builder.model.spec import load_spec
from oci_builder.release.folder import ReleaseFolder, read_trust, spec_sha256


@dataclass(frozen=True, slots=True)
class Rules:
    """What a release folder is judged by.

    Attributes:
        gates: of the spec.
        policy: trusted keys.
        spec: sha256 of the canonical spec, compared with the receipts' one; None: not compared.
    """

    gates: tuple[Gate, ...]
    policy: TrustPolicy
    spec: str | None = None

    @classmethod
    def load(cls, spec_path: Path, trust_path: Path) -> Rules:
        """The rules of a spec file and a trust policy.

        Raises:
            SpecError: ``spec.*``, ``trust.key``; FormatError: ``json.*``; TransportError: ``io.*``.
        """
        spec = load_spec(spec_path)
        return cls(parse_gates(spec.gates), read_trust(trust_path), spec_sha256(spec))


def check_release(folder: Path, rules: Rules) -> dict[str, Any]:
    """Recompute ``qualification.json`` at its own time and compare.

    Returns: the recorded qualification.

    Raises:
        CheckFailed: ``qualification.missing``, ``qualification.differs``, ``release.rewritten``, ``release.unproven``.
        SpecError: ``release.folder``; FormatError, TransportError: unreadable files.
    """
    release = _open(folder)
    recorded = release.compare(rules.gates, rules.policy, rules.spec)
    then = parse_time(recorded["evaluated_at"])
    release.check_files(rules.policy, then)
    release.require_proven(rules.policy, then)
    return recorded


def update_release(folder: Path, rules: Rules, now: datetime) -> dict[str, Any]:
    """Judge the folder now and record it; the qualification before stays under a number. Idempotent.

    Returns: the qualification that stands in the folder afterwards.

    Raises:
        CheckFailed: ``release.rewritten``; ``release.unproven``: the verdict was recorded all the same, unless it
            would have been ``pass``: a key that was revoked must show.
        SpecError: ``release.folder``; FormatError, TransportError: unreadable or unwritable files.
    """
    release = _open(folder)
    release.check_files(rules.policy, now)
    with release.lock():
        fresh = release.evaluate(rules.gates, rules.policy, now, rules.spec)
        if fresh.state == "pass":
            release.require_proven(rules.policy, now)
        release.record(fresh)
    release.require_proven(rules.policy, now)
    recorded = release.recorded()
    assert recorded is not None  # written just now
    return recorded


def unprotected(folder: Path, rules: Rules, now: datetime) -> str:
    """A line for people where nothing would tell that somebody changed the folder's files; else empty."""
    if _open(folder).protected(rules.policy, now):
        return ""
    return f"nothing protects the files of {show(str(folder))}: no record receipt of a trusted key has their digests"


def summary(qualification: dict[str, Any]) -> Sequence[str]:
    """Lines for people: the state, each gate, and the reason where it is not met."""
    lines = [f"{qualification['release']}: {qualification['state']}"]
    if not qualification["gates"]:
        lines.append("  its spec has no gates: nothing is asked of it, and nothing can qualify it")
    for gate in qualification["gates"]:
        need = "" if gate["required"] else " (not required)"
        lines.append(f"  {gate['state']:<6} {gate['name']}{need}")
        lines += [f"         {reason}" for reason in gate["reasons"]]
    lines += [f"  refused {r['receipt']}: {'; '.join(r['reasons'])}" for r in qualification["refused"]]
    return lines + [f"  not tested: {line}" for line in qualification["not_tested"]]


def _open(folder: Path) -> ReleaseFolder:
    if not folder.is_dir():
        raise SpecError("release.folder", f"{show(str(folder))} is no release folder", where=str(folder))
    return ReleaseFolder(folder)


__all__ = ["Rules", "check_release", "spec_sha256", "summary", "unprotected", "update_release"]
