"""How to verify, and where findings go."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from oci_builder.model.errors import (
    CheckFailed,
    ConflictError,
    FormatError,
    IntegrityError,
    OciBuilderError,
    PolicyError,
    SpecError,
    TransportError,
)
from oci_builder.model.events import Emit, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.platform import check_platform_name
from oci_builder.model.report import Finding, Report
from oci_builder.wire.tar import TarEntry, TarReader

OnEntry = Callable[[str, TarEntry, TarReader], None]

_KINDS: dict[int, type[OciBuilderError]] = {
    kind.exit_status: kind for kind in (CheckFailed, SpecError, FormatError, PolicyError, TransportError, ConflictError)
}
# Of one code, in one archive: an archive must not be able to fill a report.
_MOST_OF_A_CODE = 100


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """How to verify.

    Attributes:
        profile: ``foreign`` accepts what is legal and merely unusual, with warnings; ``strict`` holds archives to the
            rules of our own.
        platform: ``os/architecture`` (or ``os/architecture/variant``) of the image that is asked for.
        image: name or digest of the image that is asked for, where an archive holds several.
        limits: bounds on what an archive may ask of us.
        threads: decoding threads; 0 takes the number of CPUs.
        emit: takes progress.
        shortcut: prove layers of the second archive by comparing bytes with the first, where they are the same.
        task: what progress is called, before the archive's name; of a folder there is none.
        entries: told each entry of each member that is read as a layer, with the member's name.

    Raises:
        SpecError: ``spec.platform``.
    """

    profile: str = "foreign"
    platform: str = "linux/amd64"
    image: str = ""
    limits: Limits = DEFAULT_LIMITS
    threads: int = 0
    emit: Emit = silent
    shortcut: bool = True
    task: str = "verify"
    entries: OnEntry | None = None

    def __post_init__(self) -> None:
        check_platform_name(self.platform)

    @property
    def strict(self) -> bool:
        """True under the profile ``strict``."""
        return self.profile == "strict"

    @property
    def workers(self) -> int:
        """Decoding threads."""
        return self.threads or min(16, len(os.sched_getaffinity(0)))


def finding_error(finding: Finding) -> OciBuilderError:
    """The error that a finding stands for."""
    integrity = finding.code.startswith("blob.") or finding.code == "layer.diff_id"
    kind = IntegrityError if integrity else _KINDS.get(finding.exit_status, FormatError)
    shown = finding.message if finding.where in finding.message else f"{finding.where}: {finding.message}"
    return kind(finding.code, shown, where=finding.where, expected=finding.expected, actual=finding.actual)


class Findings:
    """Collects what is wrong with one archive."""

    __slots__ = ("_counts", "found", "where")

    def __init__(self, where: str) -> None:
        self.where = where
        self.found: list[Finding] = []
        self._counts: Counter[str] = Counter()

    @property
    def failed(self) -> bool:
        """Whether an error was found."""
        return any(finding.severity == "error" for finding in self.found)

    def add(self, finding: Finding) -> None:
        """Take one finding; beyond a hundred of one code they are dropped, the first says enough."""
        self._counts[finding.code + finding.severity] += 1
        if self._counts[finding.code + finding.severity] <= _MOST_OF_A_CODE and finding not in self.found:
            self.found.append(finding)

    def error(
        self, code: str, where: str, message: str, *, expected: object = "", actual: object = "", status: int = 3
    ) -> None:
        """Something is wrong; ``where`` is inside the archive."""
        place = f"{self.where}: {where}" if where else self.where
        self.add(Finding(code, "error", place, str(expected), str(actual), message, status))

    def warn(self, code: str, where: str, message: str, *, expected: object = "", actual: object = "") -> None:
        """Something is unusual."""
        place = f"{self.where}: {where}" if where else self.where
        self.add(Finding(code, "warning", place, str(expected), str(actual), message, 0))

    def drop(self, *codes: str) -> None:
        """Forget what only follows from an archive not being read to its end; that has a finding of its own."""
        self.found = [finding for finding in self.found if finding.code not in codes]

    def take(self, error: OciBuilderError) -> None:
        """A raised error as a finding."""
        own = str(error.fields.get("where", ""))
        place = own if own.startswith(self.where) else f"{self.where}: {own}" if own else self.where
        expected, actual = (str(error.fields.get(k, "")) for k in ("expected", "actual"))
        self.add(Finding(error.code, "error", place, expected, actual, error.message, error.exit_status))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Errors raised inside become findings."""
        try:
            yield
        except OciBuilderError as error:
            self.take(error)

    def require(self) -> None:
        """Raise the most telling error that was found, as ``verify`` would answer with its exit status.

        Raises:
            OciBuilderError: of the kind of the finding.
        """
        report = Report((), tuple(self.found))
        for finding in report.errors:
            if finding.exit_status == report.exit_status:
                raise finding_error(finding)

    def judge(self, strict: bool) -> Callable[..., None]:
        """``error`` when strict, else ``warn``."""
        return self.error if strict else self.warn
