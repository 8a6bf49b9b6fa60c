"""Files that are created once: whole or not at all, and never over another."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from oci_builder.model.errors import ConflictError, OciBuilderError, SpecError, TransportError, disk_code, show
from oci_builder.model.redact import redact_value, secret_values
from oci_builder.store.locks import alone_in
from oci_builder.store.writeback import sync

_TEMP = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")


def hide(value: Any) -> Any:
    """A JSON-able value for a document that others will read: without what looks like a credential, or is one in this
    process's environment, whatever it looks like.
    """
    return redact_value(value, secret_values(os.environ))


def io_error(error: OSError, path: Path | str) -> TransportError:
    """An operating system error at a path as ours: ``io.space``, ``io.readonly`` or ``io.error``."""
    return TransportError(disk_code(error), f"{show(str(path))}: {error.strerror or error}", where=str(path))


def input_error(error: OSError, path: Path | str) -> OciBuilderError:
    """As ``io_error`` where somebody named the path: a wrong name (``spec.path``) is no fault of a disk."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG):
        return SpecError("spec.path", f"{show(str(path))}: {error.strerror}; name a file", where=str(path))
    if disk_code(error) == "io.readonly":  # it was only to be read
        return TransportError("io.error", f"{show(str(path))}: {error.strerror}", where=str(path))
    return io_error(error, path)


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; a pipe or device is refused and not waited for.

    Raises:
        SpecError: ``spec.path``. OSError: as ``open``, also for a folder.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise SpecError("spec.path", f"{show(str(path))} is a pipe or device; name a file", where=str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_file(path: Path, limit: int) -> bytes:
    """At most ``limit`` + 1 bytes of a file: a caller's size check then sees that it is too large.

    Raises:
        SpecError: ``spec.path``: not there, a folder, a pipe or device. TransportError: ``io.*``.
    """
    try:
        with open_file(path) as file:
            return file.read(limit + 1)
    except OSError as error:
        raise input_error(error, path) from None


def create_exclusively(path: Path, data: bytes, *, mode: int = 0o644, code: str = "release.exists") -> None:
    """Create ``path`` with ``data``. Two processes may try: one wins, and nobody ever sees a part.

    Raises:
        ConflictError: ``code``: something has that name, a dangling link included.
        TransportError: ``io.*``; nothing is left behind.
    """
    temp = _write_temp(path, data, mode)
    try:
        # link(2) fails where the name exists; rename(2) would replace it.
        os.link(temp, path)
        sync(path.parent)
    except FileExistsError:
        raise ConflictError(code, f"{show(str(path))} exists and is never rewritten", where=str(path)) from None
    except OSError as error:
        raise io_error(error, path) from None
    finally:
        _remove(temp)


def replace_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write ``path`` anew: readers see the old bytes or the new ones.

    Raises:
        TransportError: ``io.*``.
    """
    temp = _write_temp(path, data, mode)
    try:
        temp.replace(path)
        sync(path.parent)
    except OSError as error:
        _remove(temp)
        raise io_error(error, path) from None


def write_result(path: Path, data: bytes) -> None:
    """A result where the caller wants it: a file is replaced whole, a pipe, a device or a link (``/dev/stdout`` is one)
    is written to and stays what it is.

    Raises:
        TransportError: ``io.*``. BrokenPipeError: nobody reads the pipe any more.
    """
    try:
        through = path.is_symlink() or (path.exists() and not path.is_file())
        if through:
            path.write_bytes(data)
    except BrokenPipeError:
        raise  # the reader went away: no fault, and the command line knows what to do
    except OSError as error:
        raise io_error(error, path) from None
    if not through:
        replace_file(path, data)


def require_writable(folder: Path) -> None:
    """Find out that a folder cannot be written to before hours of work have a result that belongs there.

    Raises:
        TransportError: ``io.*``.
    """
    _remove(_write_temp(folder / "probe", b"", 0o600))


def require_file_place(path: Path) -> None:
    """Find out that a result could not be written to ``path`` before there is one. Writes nothing.

    Raises:
        SpecError: ``spec.path``: a folder, or below one that is not there. TransportError: ``io.readonly``.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise SpecError("spec.path", f"{show(str(path))} is no place for a file; name one in a folder", where=str(path))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise TransportError("io.readonly", f"{show(str(path))} cannot be written", where=str(path))


def require_report_place(path: Path, begin: bytes = b"{") -> None:
    """As ``require_file_place``; a file that is there already must be such a report, as the one before was: a word in
    the wrong place would cost an archive. A pipe or device will do.

    Args:
        begin: how such a report begins.

    Raises:
        ConflictError: ``report.exists``; else as ``require_file_place``.
    """
    require_file_place(path)
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            begins = file.read(64).lstrip()
    except OSError as error:
        raise io_error(error, path) from None
    if begins and not begins.startswith(begin):
        raise ConflictError(
            "report.exists", f"{show(str(path))} is there and is no report: it would be replaced by one; name another "
            "file", where=str(path),
        )  # fmt: skip


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer at a time in a folder; the lock ends with its process. Not to be nested.

    Raises:
        TransportError: ``io.*``.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(alone_in(folder))
        except OSError as error:
            raise io_error(error, folder) from None
        yield


def _write_temp(path: Path, data: bytes, mode: int) -> Path:
    temp = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}.tmp")
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(fd, mode)
            os.fsync(fd)
    except OSError as error:
        _remove(temp)
        raise io_error(error, path) from None
    return temp


def remove_leftovers(folder: Path, begins: tuple[str, ...]) -> None:
    """Parts of files that begin so, left by a writer that was killed. The caller knows that nobody is writing them."""
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if _TEMP.fullmatch(path.name) and path.name[1:].startswith(begins):
                _remove(path)


def _remove(temp: Path) -> None:
    # On a read-only disk even a file that is not there cannot be removed; the first error is the one to tell.
    with suppress(OSError):
        temp.unlink()
