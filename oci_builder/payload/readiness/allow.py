"""What readiness is told beforehand, as data with reasons: ``allow.toml`` beside this file, and a project's own."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from oci_builder.model.errors import SpecError
from oci_builder.model.specvalues import read_input
from oci_builder.payload.readiness.report import NOTE, Row


@dataclass(frozen=True, slots=True)
class Allow:
    """A row that is expected: it becomes a note with this reason.

    Attributes:
        code: of the row.
        path: glob over the row's place (``*`` crosses slashes).
        actual: glob over the row's ``actual`` (a library's name, an architecture list).
        targets: GPUs that it holds for; empty for all.
    """

    code: str
    reason: str
    path: str = "*"
    package: str = "*"
    actual: str = "*"
    targets: tuple[str, ...] = ()

    def covers(self, row: Row, target: str) -> bool:
        """Whether this entry is about ``row``."""
        return (
            row.code == self.code
            and fnmatchcase(row.where, self.path)
            and fnmatchcase(row.package, self.package)
            and fnmatchcase(row.actual, self.actual)
            and (not self.targets or target in self.targets)
        )


@dataclass(frozen=True, slots=True)
class Preload:
    """Libraries that Python code has loaded before an extension asks for them by soname."""

    path: str
    libraries: str
    reason: str


@dataclass(frozen=True, slots=True)
class Library:
    """Sonames (globs) that the driver or the host's C library provides."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Jit:
    """A package that calls compilers at run time, and what it needs.

    Attributes:
        needs: names of tools.
        severity: of a missing tool in a tree that has a system of its own: ``error``, or ``warning`` where few uses
            of the package compile.
        gcc: the oldest host GCC that builds its kernels; empty for any.
    """

    package: str
    needs: tuple[str, ...]
    reason: str
    severity: str = "error"
    gcc: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """Where a tool or header may stand: globs over paths of the tree."""

    name: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Equal:
    """Packages that must have the same version where more than one is installed (local parts are ignored)."""

    packages: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything of one or more rule files."""

    allow: tuple[Allow, ...] = ()
    preload: tuple[Preload, ...] = ()
    driver: tuple[Library, ...] = ()
    host: tuple[Library, ...] = ()
    jit: tuple[Jit, ...] = ()
    tool: tuple[Tool, ...] = ()
    equal: tuple[Equal, ...] = ()

    @classmethod
    def load(cls, own: Path | None = None) -> Rules:
        """The rules that ship with the project, and a project's own after them.

        Raises:
            SpecError: ``spec.allow`` when a file cannot be read, or has an unknown or missing key.
        """
        shipped = resources.files(__package__).joinpath("allow.toml").read_text("utf-8")
        rules = cls.parse(shipped, "allow.toml")
        if own is None:
            return rules
        try:
            text = read_input(own, "list of rules").decode()
        except SpecError as error:
            raise SpecError("spec.allow", error.message, where=str(own)) from None
        except UnicodeDecodeError as error:
            raise SpecError("spec.allow", f"{own}: {error}", where=str(own)) from None
        return rules.joined(cls.parse(text, str(own)))

    @classmethod
    def parse(cls, text: str, where: str) -> Rules:
        """Parse one rule file; raises as ``load``."""
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # the second: nested deeper than Python goes
            raise SpecError("spec.allow", f"{where}: {error}", where=where) from None
        kinds = {
            "allow": Allow, "preload": Preload, "driver": Library, "host": Library, "jit": Jit, "tool": Tool,
            "equal": Equal,
        }  # fmt: skip
        unknown = data.keys() - kinds.keys()
        if unknown:
            raise SpecError("spec.allow", f"{where}: unknown tables {sorted(unknown)}", where=where)
        return cls(**{k: _items(t, data.get(k, []), f"{where}: {k}") for k, t in kinds.items()})

    def joined(self, other: Rules) -> Rules:
        """These rules and ``other`` after them."""
        return Rules(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def apply(self, rows: Iterable[Row], target: str) -> list[Row]:
        """The rows, with those that an allow entry covers turned into notes that carry the reason."""
        return [self._applied(row, target) for row in rows]

    def _applied(self, row: Row, target: str) -> Row:
        entry = next((a for a in self.allow if row.severity != NOTE and a.covers(row, target)), None)
        return replace(row, severity=NOTE, allowed=entry.reason) if entry else row


T = TypeVar("T")


def _items(kind: type[T], values: Any, where: str) -> tuple[T, ...]:
    if not isinstance(values, list) or not all(isinstance(v, dict) for v in values):
        raise SpecError("spec.allow", f"{where}: write [[tables]]", where=where)
    return tuple(_item(kind, value, where) for value in values)


def _item(kind: type[T], value: dict[str, Any], where: str) -> T:
    lists = {f.name for f in fields(kind) if f.type == "tuple[str, ...]"}  # type: ignore[arg-type]
    for key, given in value.items():
        texts = given if key in lists else [given]
        if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            raise SpecError("spec.allow", f"{where}: {key} must be {'a list of texts' if key in lists else 'a text'}")
    try:
        return kind(**{k: tuple(v) if k in lists else v for k, v in value.items()})
    except TypeError as error:
        raise SpecError("spec.allow", f"{where}: {error}", where=where) from None


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether any of ``globs`` matches."""
    return any(fnmatchcase(name, g) for g in globs)
