"""A result of a check, and what is known of the installation that it belongs to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def row(name: str, good: bool | None, reason: str, **details: Any) -> Row:
    """A result: ``good`` None means deferred, and the reason says to when."""
    outcome = "deferred" if good is None else "pass" if good else "fail"
    return {"name": name, "outcome": outcome, "reason": reason, "details": details}


def installed(prefix: Path) -> Mapping[str, Any]:
    """ensure_runtime.sh's record; empty in an image."""
    try:
        found = json.loads((prefix / ".nrl-install/installed.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def at_home(prefix: Path) -> Path:
    """The prefix as it was named when it was installed, where a link leads to the same folder."""
    named = installed(prefix).get("prefix")
    if isinstance(named, str) and os.path.isabs(named) and os.path.realpath(named) == os.path.realpath(prefix):
        return Path(named)
    return prefix
