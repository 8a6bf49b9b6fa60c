"""Names of archive entries: bytes, relative, bounded."""

from __future__ import annotations

from collections.abc import Callable

from oci_builder.model.errors import FormatError, OciBuilderError, PolicyError, show
from oci_builder.model.limits import DEFAULT_LIMITS, Limits

# Called with a code and a sentence for what is legal and merely unusual.
Warn = Callable[[str, str], None]

# PATH_MAX with its NUL: no file system holds a longer target.
_LINK_MAX = 4095


def ignore(_code: str, _message: str) -> None:
    """A ``Warn`` that drops everything."""


class Place:
    """Where something stands, rendered only when somebody asks: that costs as much as reading an entry."""

    __slots__ = ("archive", "at")

    def __init__(self, archive: str, at: bytes | int) -> None:
        self.archive, self.at = archive, at

    def __str__(self) -> str:
        return (
            f"{self.archive} at byte {self.at}"
            if isinstance(self.at, int)
            else f"{self.archive}: {show(self.at[:200])}"
        )


Where = str | Place


def clean_name(raw: bytes, limits: Limits = DEFAULT_LIMITS, where: Where = "", *, strict: bool = False) -> bytes:
    """The clean form of an entry's name; ``b""`` for the root.

    A leading ``/`` is dropped (old images have it), refused under ``strict``. Backslashes and drive letters are
    ordinary bytes on Linux.

    Raises:
        PolicyError: ``path.escape`` (a ``..`` component), ``path.nul``, ``path.absolute``, ``limit.name``,
            ``limit.depth``.
        FormatError: ``path.empty``.
    """
    if not raw:
        raise FormatError("path.empty", f"{where}: an entry without a name", where=where)
    if 0 in raw:
        raise _refuse("path.nul", "a NUL byte in a name", raw, where)
    if len(raw) > limits.name:
        raise _refuse("limit.name", f"a name of {len(raw)} bytes, the limit is {limits.name}", raw, where)
    if raw[0] == 0x2F and strict:
        raise _refuse("path.absolute", "an absolute name", raw, where)
    if b"/" not in raw:
        parts = [raw] if raw != b"." else []
    else:
        parts = [part for part in raw.split(b"/") if part and part != b"."]
    if b".." in parts:
        raise _refuse("path.escape", "a name with a .. component", raw, where)
    if len(parts) > limits.depth:
        raise _refuse("limit.depth", f"{len(parts)} components, the limit is {limits.depth}", raw, where)
    if len(raw) > limits.component and any(len(part) > limits.component for part in parts):
        raise _refuse("limit.name", f"a component of over {limits.component} bytes", raw, where)
    return b"/".join(parts)


def check_link(target: bytes, limits: Limits, where: Where) -> bytes:
    """A symlink's target, verbatim.

    Raises:
        PolicyError: ``path.nul``, ``limit.name``, ``limit.depth``.
        FormatError: ``path.empty``.
    """
    if not target:
        raise FormatError("path.empty", f"{where}: a symbolic link without a target", where=where)
    if 0 in target:
        raise _refuse("path.nul", "a NUL byte in a link target", target, where)
    if len(target) > min(limits.name, _LINK_MAX):
        raise _refuse("limit.name", f"a link target of {len(target)} bytes, the limit is {limits.name}", target, where)
    if leads_deep(target, limits):
        raise _refuse("limit.depth", f"a link target of more than {limits.depth} components", target, where)
    return target


def leads_deep(target: bytes, limits: Limits) -> bool:
    """Whether a link's target has more parts than a path may: whatever passes through the link walks them all."""
    if target.count(b"/") < limits.depth:
        return False
    return sum(part not in (b"", b".") for part in target.split(b"/")) > limits.depth


def _refuse(code: str, what: str, raw: bytes, where: Where) -> OciBuilderError:
    return PolicyError(code, f"{where}: {what}: {show(raw[:300])}", where=f"{where}: {show(raw[:300])}", actual=what)
