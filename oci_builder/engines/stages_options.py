"""Options of stages as they are typed: ``NAME=VALUE``, each with its kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oci_builder.engines.stages import Stage
from oci_builder.model.errors import SpecError, show

# Paths of the sender: a relative one is the sender's.
FILES = ("trust", "checks", "helper", "allow", "root", "root24")
_NUMBERS = ("jobs",)
_LISTS = ("tiers",)


def parse_options(stage: Stage, given: Sequence[str]) -> dict[str, Any]:
    """The options of one stage.

    Raises:
        SpecError: ``stage.option``: unknown, twice, no ``=``, or a number that is none.
    """
    out: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or name not in stage.options or name in out:
            known = ", ".join(stage.options) or "none"
            raise SpecError("stage.option", f"{show(item)}: {stage.name} takes NAME=VALUE, once each, of: {known}")
        out[name] = _value(name, value)
    return out


def _value(name: str, text: str) -> Any:
    if name in FILES:
        return str(Path(text).absolute())
    if name in _LISTS:
        return [part.strip() for part in text.split(",") if part.strip()]
    if name not in _NUMBERS:
        return text
    if not text.isdecimal():
        raise SpecError("stage.option", f"{name} is a number, not {show(text)}")
    return int(text)
