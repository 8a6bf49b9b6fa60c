"""Readiness as data: rows, worst first, and the forms they are shown in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from oci_builder.model.errors import CheckFailed, show
from oci_builder.model.report import Finding

ERROR, WARNING, NOTE = "error", "warning", "note"
_RANK = {ERROR: 0, WARNING: 1, NOTE: 2}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that readiness has to say.

    Attributes:
        severity: ``error`` (not ready), ``warning``, or ``note``.
        code: stable, such as ``gpu.none`` or ``lib.missing``.
        where: path in the tree, empty for the whole.
        package: name and version of the package that the file belongs to, where known.
        message: one sentence, with what to do.
        expected, actual: short texts.
        allowed: the reason of the allow-list entry that turned an error or warning into a note.
    """

    severity: str
    code: str
    where: str
    message: str
    package: str = ""
    expected: str = ""
    actual: str = ""
    allowed: str = ""

    def to_json(self) -> dict[str, str]:
        """All fields by name."""
        return {f: getattr(self, f) for f in self.__slots__}

    def key(self) -> tuple[object, ...]:
        """Worst first, then by code, package and place."""
        return (_RANK[self.severity], self.code, self.package, self.where, self.actual)


@dataclass(frozen=True, slots=True)
class GpuFile:
    """How the target runs the GPU code of one file, or of a package's loose kernels.

    Attributes:
        verdict: ``native``, ``ptx``, ``partial``, ``none`` or ``unreadable``.
        native, ptx, other: modules that run natively, through PTX, or not at all.
        archs: the architectures, such as ``sass 80 90a 100, ptx 120``.
        files: how many files it stands for.
        allowed: the reason of the allow-list entry that covers it; it does not count against its package.
    """

    where: str
    package: str
    verdict: str
    native: int
    ptx: int
    other: int
    archs: str
    files: int = 1
    allowed: str = ""

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {f: getattr(self, f) for f in self.__slots__}


@dataclass(frozen=True, slots=True)
class ReadinessReport:
    """What readiness found.

    Attributes:
        subject: the archive or folder.
        target, driver, glibc: what it was judged against.
        complete: the tree has a C library of its own; else it is judged as a guest of the host's.
        facts: totals for people: files read, ELF files, packages, highest versions required.
        gpu: every file with GPU code, worst first.
        rows: everything to say, worst first.
    """

    subject: str
    target: str
    driver: str
    glibc: str
    complete: bool
    facts: dict[str, Any] = field(default_factory=dict)
    gpu: tuple[GpuFile, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def ok(self) -> bool:
        """True when no row is an error."""
        return not any(r.severity == ERROR for r in self.rows)

    @property
    def exit_status(self) -> int:
        """0 when ready, 1 (a check said no) when not."""
        return 0 if self.ok else CheckFailed.exit_status

    def packages(self) -> dict[str, str]:
        """The worst verdict of each package with GPU code; ``allowed`` where all of it is for other GPUs on purpose."""
        order = ("unreadable", "none", "partial", "ptx", "native", "allowed")
        worst: dict[str, str] = {}
        for file in self.gpu:
            name, verdict = file.package or file.where, "allowed" if file.allowed else file.verdict
            worst[name] = min(worst.get(name, verdict), verdict, key=order.index)
        return dict(sorted(worst.items(), key=lambda item: (order.index(item[1]), item[0])))

    def findings(self) -> tuple[Finding, ...]:
        """The errors and warnings as findings of a verification."""
        return tuple(
            Finding(
                r.code, r.severity, r.where, r.expected, r.actual, r.message,
                CheckFailed.exit_status if r.severity == ERROR else 0,
            )
            for r in self.rows
            if r.severity != NOTE
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form; ``ok`` is false exactly when the exit status is not 0."""
        return {
            "ok": self.ok,
            "subject": self.subject,
            "target": self.target,
            "driver": self.driver,
            "glibc": self.glibc,
            "complete": self.complete,
            "facts": self.facts,
            "packages": self.packages(),
            "rows": [r.to_json() for r in self.rows],
            "gpu": [g.to_json() for g in self.gpu],
        }

    def table(self, *, notes: bool = False) -> list[tuple[str, str, str, str]]:
        """(severity, code, place, message) of each row for a terminal, worst first; notes only when asked for."""
        return [
            (r.severity, r.code, _place(r), r.message + (f" (allowed: {r.allowed})" if r.allowed else ""))
            for r in self.rows
            if notes or r.severity != NOTE
        ]

    def to_text(self, *, notes: bool = False) -> str:
        """The table as plain text, with a verdict as the last line."""
        lines = _columns(self.table(notes=notes))
        counts = [sum(r.severity == s for r in self.rows) for s in (ERROR, WARNING, NOTE)]
        verdict = "ready" if self.ok else "NOT READY"
        # An image without any of it is ready as well, and whoever expected some must see that.
        found = f"{len(self.gpu) or 'no'} file{'s' * (len(self.gpu) != 1)} with GPU code"
        summary = f"{found}, {counts[0]} errors, {counts[1]} warnings, {counts[2]} notes"
        return "\n".join([*lines, f"{verdict} for {self.target}, driver {self.driver}, glibc {self.glibc}: {summary}"])


def _place(row: Row) -> str:
    where = show(row.where)[1:-1]
    return f"{row.package}: {where}" if row.package and where else row.package or where


def _columns(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max((len(r[i]) for r in table), default=0) for i in range(2)]
    return [f"{r[0]:<{widths[0]}}  {r[1]:<{widths[1]}}  {r[2]}\n{'':{sum(widths) + 4}}{r[3]}" for r in table]
