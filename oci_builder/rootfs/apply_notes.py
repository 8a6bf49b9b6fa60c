"""What an unpacking noticed, counted by kind: one warning a kind, with the first few names."""

from __future__ import annotations

from oci_builder.model.errors import show
from oci_builder.model.report import Finding

_NAMED = 5

_KINDS = {
    "entry.device": "device nodes left out",
    "entry.link_target": "hard links to entries that were left out",
    "entry.owner": "files whose owner cannot be set; they belong to the user who unpacks",
    "entry.parent": "entries below something that was no folder; it was replaced by one",
    "entry.xattr": "extended attributes that this file system or user cannot set",
    "entry.xattr_policy": "extended attributes of the machine that the image was made on, left out",
}


class Notes:
    """Counts of what was noticed, by code."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._counts: dict[str, int] = {}
        self._names: dict[str, list[str]] = {}

    def add(self, code: str, name: bytes | str) -> None:
        """Count one; ``name`` is an entry's name, or a whole sentence for codes of the tar reader."""
        self._counts[code] = self._counts.get(code, 0) + 1
        names = self._names.setdefault(code, [])
        if len(names) < _NAMED:
            names.append(show(name[:200]) if isinstance(name, bytes) else name)

    def count(self, code: str) -> int:
        """How many there were."""
        return self._counts.get(code, 0)

    def findings(self) -> tuple[Finding, ...]:
        """One warning a code."""
        return tuple(self._finding(code, count) for code, count in sorted(self._counts.items()))

    def _finding(self, code: str, count: int) -> Finding:
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        text = ", ".join(self._names[code]) + more
        message = f"{_KINDS[code]}: {text}" if code in _KINDS else text
        return Finding(code, "warning", self._where, actual=str(count), message=message, exit_status=0)
