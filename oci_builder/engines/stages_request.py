"""What goes into a stage and what comes out: plain values that are JSON on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from oci_builder.engines.needs import Needs
from oci_builder.model.errors import SpecError, show
from oci_builder.model.events import Emit


@dataclass(frozen=True, slots=True)
class Request:
    """What a stage is asked to do. Paths are those of the machine that runs the stage.

    Attributes:
        spec: spec file.
        out: folder of the finished archives and their records.
        cache: store, build records and environments.
        release: the release folder; empty where the stage needs none.
        scratch: folder on local disk, where archives are copied to before they are read more than once; empty:
            ``out`` and ``cache`` are local themselves.
        work: the run's own folder for logs and copies, set by ``run_stage``.
        key: file of the private key that signs the stage's receipt; empty: the receipt is left unsigned.
        options: of the stage itself (``Stage.options``).
        version: oci-builder of the sender; empty is not compared.
        attempt: the same for all runs of one request: a preempted stage runs again with it.
    """

    spec: str
    out: str
    cache: str
    release: str = ""
    scratch: str = ""
    work: str = ""
    key: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    attempt: str = ""

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Request:
        """The request in a JSON object.

        Raises:
            SpecError: ``stage.request``: an unknown or missing key, or a value of another type.
        """
        known = {f.name for f in fields(cls)}
        extra = sorted(set(value) - known)
        if extra:
            names = ", ".join(sorted(known))
            raise SpecError("stage.request", f"a request has no {show(str(extra[0]))}; it has {names}")
        for name in ("spec", "out", "cache"):
            if not value.get(name):
                raise SpecError("stage.request", f"a request needs {name!r}")
        for name, item in value.items():
            wanted = Mapping if name == "options" else str
            if not isinstance(item, wanted):
                raise SpecError("stage.request", f"{name!r} of a request cannot be {show(repr(item)[:80])}")
        return cls(**{**value, "options": dict(value.get("options", {}))})

    def to_json(self) -> dict[str, Any]:
        """The request as JSON."""
        return {**asdict(self), "options": dict(self.options)}

    def path(self, name: str) -> Path:
        """An option that is a path.

        Raises:
            SpecError: ``stage.option``: it is not given.
        """
        return Path(self.text(name))

    def text(self, name: str) -> str:
        """An option that must be given.

        Raises:
            SpecError: ``stage.option``.
        """
        value = self.options.get(name)
        if not isinstance(value, str) or not value:
            raise SpecError("stage.option", f"the stage needs the option {name!r}", where=f"options.{name}")
        return value


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stage made and found.

    Attributes:
        outputs: name -> sha256, hex.
        subjects: archive name -> sha256, hex: what the receipt is about; empty: the stage has no receipt of its own.
        checks: as a receipt has them (name, outcome, reason, seconds, details).
        host: of the receipt, where the checks saw another root than this process or GPUs; else None.
        details: of the receipt.
        notes: for people.
    """

    outputs: Mapping[str, str] = field(default_factory=dict)
    subjects: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Mapping[str, Any], ...] = ()
    host: Mapping[str, Any] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        name: as on the command line.
        needs: what its machine must have.
        run: does it; idempotent.
        summary: one line for people.
        options: names of ``Request.options`` that it knows.
        then: stage that follows when this one passed, under the same name for people; empty for none.
    """

    name: str
    needs: Needs
    run: Callable[[Request, Emit], Outcome]
    summary: str
    options: tuple[str, ...] = ()
    then: str = ""
