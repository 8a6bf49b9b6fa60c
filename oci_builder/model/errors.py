"""Every way in which oci-builder says no.

The ``code`` of an error is an API: programs and tests assert codes, never message text. A message says what, where,
expected, actual, and what to do next. Library code never prints and never exits; only ``cli`` maps an error to an
exit status.
"""

from __future__ import annotations

import errno
from typing import ClassVar

_DISK_CODES = {
    errno.ENOSPC: "io.space",
    errno.EDQUOT: "io.space",
    errno.EROFS: "io.readonly",
    errno.EACCES: "io.readonly",
    errno.EPERM: "io.readonly",
}


def show(name: bytes | str) -> str:
    """Render an archive path or other untrusted text for a message: quoted, control characters escaped, reversible.

    Bytes that are not UTF-8 become ``\\xNN`` escapes; ``ast.literal_eval`` of the result of a ``str`` gives it back.
    """
    text = name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name
    return ascii(text) if not text.isprintable() else repr(text)


class OciBuilderError(Exception):
    """Base of all errors that a user or an input can cause.

    Args:
        code: stable dotted code, e.g. ``blob.digest``.
        message: one paragraph for people.
        fields: JSON-able details, such as ``where``, ``expected`` and ``actual``.
    """

    exit_status: ClassVar[int] = 1

    def __init__(self, code: str, message: str, **fields: object) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        # A place may be an object that renders itself only when it is needed (wire.tar.names.Place).
        self.fields = {key: str(value) if key == "where" else value for key, value in fields.items()}

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword fields must survive a process boundary (engines, worker processes).
        return (_rebuild, (type(self), self.code, self.message, self.fields))


def _rebuild(cls: type[OciBuilderError], code: str, message: str, fields: dict[str, object]) -> OciBuilderError:
    return cls(code, message, **fields)


class CheckFailed(OciBuilderError):
    """A check ran and said no (``check.*``, ``archive.twin``)."""

    exit_status = 1


class SpecError(OciBuilderError):
    """Our inputs are wrong (``spec.*``, ``layers.*``, ``scan.*``)."""

    exit_status = 2


class FormatError(OciBuilderError):
    """Bytes are not what they claim (``tar.*``, ``gzip.*``, ``zstd.*``, ``json.*``, ``media.*``, ``archive.*``)."""

    exit_status = 3


class IntegrityError(OciBuilderError):
    """Digest, size or diff_id differ (``blob.digest``, ``blob.size``, ``layer.diff_id``)."""

    exit_status = 3


class PolicyError(OciBuilderError):
    """Well formed, but refused (``limit.*``, ``path.*``, ``entry.*``)."""

    exit_status = 4


class TransportError(OciBuilderError):
    """Registry, daemon, hub or disk (``http.*``, ``auth``, ``daemon.*``, ``io.*``)."""

    exit_status = 5


class ConflictError(OciBuilderError):
    """Would overwrite, or differs (``release.exists``, ``install.differs``, ``unpack.not_empty``)."""

    exit_status = 6


def disk_code(error: OSError) -> str:
    """The code of a failed disk operation: ``io.space``, ``io.readonly`` or ``io.error``."""
    return _DISK_CODES.get(error.errno or 0, "io.error")


def disk_error(error: OSError, doing: str) -> TransportError:
    """The error for a failed disk operation, with what to do about it.

    Codes: ``io.space`` (disk or quota full), ``io.readonly`` (no permission, read-only), ``io.error`` (all others).
    """
    name = error.filename
    place = "" if name is None else f" {show(name if isinstance(name, bytes) else str(name))}"
    code = disk_code(error)
    if code == "io.space":
        return TransportError(code, f"{doing}{place}: the disk is full; free space, then run again", where=doing)
    if code == "io.readonly":
        return TransportError(code, f"{doing}{place}: {error.strerror}; choose a writable place", where=doing)
    return TransportError(code, f"{doing}{place}: {error.strerror or error}", where=doing)


def read_error(error: OSError, doing: str) -> TransportError:
    """As ``disk_error`` for what was only to be read: no writable place would help, and the code is ``io.error``."""
    known = disk_error(error, doing)
    if known.code != "io.readonly":
        return known
    name = error.filename
    place = "" if name is None else f" {show(name if isinstance(name, bytes) else str(name))}"
    return TransportError("io.error", f"{doing}{place}: {error.strerror}; let us read it", where=doing)
