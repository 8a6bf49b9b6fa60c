"""What a verification found, as data. Text, JSON, exit status and gates render it; none of them is here."""

from __future__ import annotations

from dataclasses import dataclass, field

from oci_builder.model.errors import CheckFailed, OciBuilderError


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        code: stable code of the error taxonomy.
        severity: ``error`` or ``warning``; only errors make a report not ok.
        where: archive, layer and entry, for people.
        expected, actual: short texts, empty where they make no sense.
        message: one sentence, with what to do next.
        exit_status: exit status of an error of this kind (0 for a warning).
    """

    code: str
    severity: str
    where: str
    expected: str = ""
    actual: str = ""
    message: str = ""
    exit_status: int = 3

    @classmethod
    def of_error(cls, error: OciBuilderError, where: str = "") -> Finding:
        """The finding for a raised error; the error's own ``where`` is appended to ``where``."""
        own = str(error.fields.get("where", ""))
        place = ": ".join(p for p in (where, own) if p)
        expected, actual = (str(error.fields.get(k, "")) for k in ("expected", "actual"))
        return cls(error.code, "error", place, expected, actual, error.message, error.exit_status)

    def to_json(self) -> dict[str, object]:
        """The JSON form of requirements section 12."""
        out: dict[str, object] = {k: getattr(self, k) for k in ("code", "severity", "where", "expected", "actual")}
        out["message"] = self.message
        return out


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one or two archives.

    ``subjects`` are JSON objects (path, kind, sha256, size, image identity), one an archive, in the order given.
    ``checks``: what ran in the image (name, outcome, reason); None when nothing was asked to.
    """

    subjects: tuple[dict[str, object], ...] = ()
    findings: tuple[Finding, ...] = field(default=())
    checks: tuple[dict[str, object], ...] | None = None

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make the report not ok."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def ok(self) -> bool:
        """True when no finding is an error."""
        return not self.errors

    @property
    def exit_status(self) -> int:
        """0 when ok; else the most telling kind: bytes that lie (3) before policy (4), i/o (5), then a plain no (1)."""
        kinds = {f.exit_status for f in self.errors}
        return next((k for k in (3, 4, 2, 6, 5, CheckFailed.exit_status) if k in kinds), 0)

    def to_json(self) -> dict[str, object]:
        """The JSON form of requirements section 12."""
        ran = {} if self.checks is None else {"checks": list(self.checks)}
        findings = [f.to_json() for f in self.findings]
        return {"ok": self.ok, "subjects": list(self.subjects), "findings": findings, **ran}
