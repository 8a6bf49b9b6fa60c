"""What a signed document says. Whether its signature is good is another question: other programs read it like this."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def statement_of(path: Path) -> dict[str, Any]:
    """The statement in an envelope's file (DSSE, in-toto)."""
    found: dict[str, Any] = json.loads(base64.b64decode(json.loads(path.read_bytes())["payload"]))
    return found
