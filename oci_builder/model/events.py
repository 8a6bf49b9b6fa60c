"""Progress as values: verbs emit events, ``progress`` renders them, nobody else prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a task.

    Attributes:
        kind: ``start`` (total known or 0), ``advance`` (amount more done), ``done``, ``note`` or ``warning``.
        task: what is being worked on, e.g. ``layer base`` or ``pull sha256:ab…``; unique within a verb.
        amount: bytes (or items, see unit) for ``advance``.
        total: bytes or items for ``start``; 0 when unknown.
        unit: ``B`` or ``items``.
        message: text for ``note`` and ``warning``.
    """

    kind: str
    task: str
    amount: int = 0
    total: int = 0
    unit: str = "B"
    message: str = ""


Emit = Callable[[Event], None]


def silent(_event: Event) -> None:
    """An ``Emit`` that drops everything."""
