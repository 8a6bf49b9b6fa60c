"""Where a verb may answer otherwise than the catalogue says, and what is not right yet.

``OTHERWISE``: the verb's own code, or None where it accepts, each with the reason. ``OPEN``: faults that are known; a
case that is listed here and behaves turns the tests red, so that the line goes.
"""

from __future__ import annotations

Key = tuple[str, str]

OTHERWISE: dict[Key, tuple[str | None, str]] = {}

OPEN: dict[Key, str] = {}
