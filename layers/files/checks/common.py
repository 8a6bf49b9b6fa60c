"""Results, and how a check ends."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

# The chroot runner keeps the end of standard output; a result must fit in there whole.
MOST_REASON = 3000


class CheckFailed(Exception):
    """A check that says no; the text is its reason."""


@dataclass
class Result:
    """What a check found. It passes only when nothing spoke against it and it was not put off."""

    reasons: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    deferred: str = ""
    skipped: str = ""

    def expect(self, good: bool, reason: str) -> bool:
        """Note the reason unless it is good; returns ``good``."""
        if not good:
            self.reasons.append(reason)
        return bool(good)

    def add(self, reasons: Iterable[str]) -> None:
        """Note reasons against a pass."""
        self.reasons.extend(reasons)

    @property
    def outcome(self) -> str:
        """pass, fail, deferred or skipped; a failure is never hidden by the last two."""
        if self.reasons:
            return "fail"
        return "deferred" if self.deferred else "skipped" if self.skipped else "pass"

    def to_json(self) -> dict[str, Any]:
        """The line that the runners read."""
        reason = "; ".join(self.reasons) or self.deferred or self.skipped
        return {"outcome": self.outcome, "reason": reason[:MOST_REASON], "details": finite(self.details)}


def finite(value: Any) -> Any:
    """The same with words for what JSON has no number for: a strict reader would refuse the result and its reason."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def scratch_folder(prefix: str, place: str | None = None) -> str:
    """A folder of this process's own that goes with it; in ``place``, else in the temporary folder."""
    folder, owner = tempfile.mkdtemp(prefix=prefix, dir=place), os.getpid()
    # A child that was forked ends with this handler as well, and must leave its parent's folder.
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return folder


def absent(error: ImportError) -> str:
    """Why an import failed, for a reason."""
    name = getattr(error, "name", None) or "a module"
    kind = "is absent" if isinstance(error, ModuleNotFoundError) else "cannot be imported"
    return f"{name} {kind}: {error}"


def guarded(check: Callable[[], Result]) -> Result:
    """Run a check; whatever it raises is a failure with a reason, and the traceback goes to standard error."""
    try:
        return check()
    except CheckFailed as error:
        return Result([str(error)])
    except ImportError as error:
        traceback.print_exc()
        return Result([absent(error)])
    except Exception as error:
        traceback.print_exc()
        return Result([f"{type(error).__name__}: {error}"])


def finish(result: Result) -> int:
    """Print the result as the last line and return the exit status."""
    sys.stdout.flush()
    print("\n" + json.dumps(result.to_json(), sort_keys=True), flush=True)
    return 0 if result.outcome in ("pass", "deferred") else 1


def say(text: str, stream: TextIO | None) -> None:
    """Write text for people; where nobody reads any more, or letters are missing, what was found must not be lost."""
    if stream is None:  # closed before this program began
        return
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # what is buffered would fail again at this program's end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def last_json(text: str) -> Mapping[str, Any] | None:
    """The object on the last line of a program's output, if it is one."""
    lines = text.rstrip().splitlines() or [""]
    try:
        value = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
