"""What a whiteout entry hides (image-spec layer.md, "Whiteouts")."""

from __future__ import annotations

from oci_builder.model.errors import PolicyError, show
from oci_builder.wire.tar import Kind, TarEntry

PREFIX = b".wh."
OPAQUE = b""

_RESERVED = b".wh..wh."
_OPAQUE_NAME = b".wh..wh..opq"


def hidden_by(entry: TarEntry, where: str) -> tuple[bytes, bytes] | None:
    """The folder and the name in it that a whiteout hides; the name is ``OPAQUE`` for all that is in it.

    ``None`` for an entry that is no whiteout.

    Raises:
        PolicyError: ``entry.whiteout`` for one that hides nothing or the folder itself, has a reserved name, is not an
            empty file, or has something below it.
    """
    if PREFIX not in entry.name:
        return None
    folder, _, name = entry.name.rpartition(b"/")
    if any(part.startswith(PREFIX) for part in folder.split(b"/")):
        raise _refuse(entry, "an entry below a whiteout", where)
    if not name.startswith(PREFIX):
        return None
    target = name[len(PREFIX) :]
    if name != _OPAQUE_NAME and (target in (b"", b".", b"..") or name.startswith(_RESERVED)):
        raise _refuse(entry, "a whiteout of nothing, of the folder itself, or with a reserved name", where)
    if entry.kind is not Kind.FILE or entry.size:
        raise _refuse(entry, "a whiteout that is not an empty file", where)
    return folder, OPAQUE if name == _OPAQUE_NAME else target


def _refuse(entry: TarEntry, what: str, where: str) -> PolicyError:
    place = f"{where}: {show(entry.name)}"
    return PolicyError("entry.whiteout", f"{place}: {what}", where=place, actual=what)
