"""What a run leaves on the host, and how it goes: a record, an empty folder, placeholders in a direct tree.

All mounts of a run live in its private namespace and end with it. So a folder of a dead run that has something
mounted on or below it holds somebody else's mount: it is unmounted from the innermost outwards, and the first one
that is busy stops everything (imagecomposer #760, forkd #264: removal went on through a mount that stayed).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator

from chroot_exec import syscalls
from chroot_exec.errors import RunnerError

_RECORD, _BASE = "record", "base"
# Seconds that removing a run's placeholders may take.
_TIDYING = 5.0


class Run:
    """The host's side of one run: a folder ``run-…`` with a locked record; the kernel drops the lock with the process.

    Attributes:
        folder: the run's folder.
        base: an empty folder in it, where the sandbox is put together.
    """

    def __init__(self, state: str, root: str) -> None:
        self._state = state
        # Under the state's lock nobody sees a folder that has no locked record yet.
        with _locked(state):
            self.folder = tempfile.mkdtemp(prefix="run-", dir=state)
            self.base = os.path.join(self.folder, _BASE)
            self._record = open(os.path.join(self.folder, _RECORD), "a+b", buffering=0)
            fcntl.flock(self._record, fcntl.LOCK_EX)
        os.mkdir(self.base, 0o700)
        self._write({"pid": os.getpid(), "root": root})
        # Others who run in the tree leave the placeholders in it that this run mounts upon.
        self._tree = _shared(root)

    def _write(self, value: object) -> None:
        self._record.write(json.dumps(value).encode() + b"\n")

    def made(self, path: str) -> None:
        """Record a placeholder that was made in the tree; called before it is used."""
        self._write({"made": path})

    def end(self) -> None:
        """Remove what the run left; where others run in the tree, with placeholders of this one, a later sweep does.

        Raises:
            RunnerError: ``teardown.busy``; nothing was removed then.
        """
        self._tree.close()
        self._record.seek(0)
        _remove_run(self.folder, self._record.readlines())
        self._record.close()
        leave(self._state)


def _default_state() -> str:
    return os.path.join(tempfile.gettempdir(), f"chroot-exec-{os.getuid()}")


def state_folder(path: str, make: bool = True) -> str:
    """The folder for records: ``path``, or this user's own below the temporary folder.

    Args:
        make: make it when it is absent; otherwise an absent one gives an empty string.

    Raises:
        RunnerError: ``state.owner``: somebody else's, or writable by others.
    """
    folder = path or _default_state()
    info = _found_or_made(folder, make)
    if info is None:
        return ""
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise RunnerError("state.owner", f"{folder} must be a folder of your own that nobody else can write to")
    return folder


def _found_or_made(folder: str, make: bool) -> os.stat_result | None:
    while True:
        if make:
            with contextlib.suppress(FileExistsError):
                os.makedirs(folder, 0o700)
        try:
            return os.stat(folder, follow_symlinks=False)
        except FileNotFoundError:
            # Another run of the same user has just left, and taken the empty folder with it.
            if not make:
                return None


@contextlib.contextmanager
def _locked(state: str) -> Iterator[None]:
    """The state folder to oneself, for the moments in which runs come and go; made again when it has just gone."""
    while True:
        state_folder(state)
        try:
            fd = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not _is_at(fd, state):
                continue
            yield
            return
        finally:
            os.close(fd)


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def leave(state: str) -> None:
    """Remove the user's own state folder when nothing is in it; a folder that a caller named is the caller's."""
    if state == _default_state() and os.path.isdir(state):
        with _locked(state), contextlib.suppress(OSError):
            os.rmdir(state)


def sweep(state: str) -> list[str]:
    """Clean up after runs whose process is gone; running ones are left alone. Idempotent.

    A folder that holds what no run puts there is somebody else's, whatever its name, and stays as it is.

    Returns:
        The folders that were removed.

    Raises:
        RunnerError: ``teardown.busy``.
    """
    removed = []
    with _locked(state):
        for name in sorted(os.listdir(state)):
            folder = os.path.join(state, name)
            if name.startswith("run-") and _is_run(folder) and _sweep_run(folder):
                removed.append(folder)
    return removed


def _is_run(folder: str) -> bool:
    """Whether a folder holds at most a record and a base that is empty, or that something is mounted on."""
    try:
        if os.path.islink(folder) or not set(os.listdir(folder)) <= {_RECORD, _BASE}:
            return False
        base, record = os.path.join(folder, _BASE), os.path.join(folder, _RECORD)
        return not _holds(record) and (not _holds(base) or bool(mounts_below(base)))
    except (NotADirectoryError, FileNotFoundError):
        # A file; or a run that ends just now.
        return False


def _holds(folder: str) -> bool:
    return os.path.isdir(folder) and not os.path.islink(folder) and bool(os.listdir(folder))


def _sweep_run(folder: str) -> bool:
    """Remove a run's folder if its process is gone: nobody holds its record's lock, or it never came to have one."""
    try:
        fd = os.open(os.path.join(folder, _RECORD), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            raise
        _remove_run(folder, [])
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lines: list[bytes] = []
        if stat.S_ISREG(os.fstat(fd).st_mode):
            with open(fd, "rb", closefd=False) as record:
                lines = record.readlines()
        return _remove_run(folder, lines)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _remove_run(folder: str, record: list[bytes]) -> bool:
    """Undo what the lines of a record say, then remove the folder, the record last; what is gone is gone.

    Returns:
        False when placeholders must stay, because others run in the tree; the record stays with them.
    """
    lines = [line for line in map(_parsed, record) if line]
    unmount_below(folder)
    root = str(lines[0].get("root", "")) if lines else ""
    made = [str(line["made"]) for line in lines if "made" in line]
    if made:
        try:
            with _tree_lock(root, fcntl.LOCK_EX | fcntl.LOCK_NB):
                for path in reversed(made):
                    _remove_placeholder(root, path)
        except BlockingIOError:
            return False
    for path in (os.path.join(folder, _BASE), folder):
        with contextlib.suppress(FileNotFoundError):
            remove_tree(path)
    return True


def _tree_lock(root: str, operation: int) -> contextlib.ExitStack:
    """A lock on a tree's folder, which goes when this is closed; none where the folder cannot be opened or locked.

    Raises:
        BlockingIOError: it is not to be had, and ``operation`` does not wait.
    """
    out = contextlib.ExitStack()
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        out.callback(os.close, fd)
        fcntl.flock(fd, operation)
    except BlockingIOError:
        out.close()
        raise
    except OSError:
        pass
    return out


def _shared(root: str) -> contextlib.ExitStack:
    """A share in a tree, as soon as a run that ends has tidied up; somebody else's lock is not waited for for long."""
    until = time.monotonic() + _TIDYING
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            return _tree_lock(root, fcntl.LOCK_SH | fcntl.LOCK_NB)
        time.sleep(0.02)
    return contextlib.ExitStack()


def _parsed(line: bytes) -> dict[str, object]:
    """One line of a record; empty for one that was torn by a full disk or a crash."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _remove_placeholder(root: str, path: str) -> None:
    """Remove a folder or file of ours from a tree, unless somebody has put something into it."""
    try:
        parent = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    *parts, name = path.split("/")
    try:
        for part in parts:
            child = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            os.close(parent)
            parent = child
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            os.rmdir(name, dir_fd=parent)
        elif stat.S_ISREG(info.st_mode) and info.st_size == 0:
            os.unlink(name, dir_fd=parent)
    except OSError:
        pass
    finally:
        os.close(parent)


def mounts_below(path: str) -> list[str]:
    """Mount points at or below ``path`` in this namespace, in the order in which they were mounted."""
    top = os.path.realpath(path)
    with open("/proc/self/mountinfo", "rb") as file:
        points = [_unescape(line.split(b" ")[4]) for line in file]
    return [p for p in points if p == top or p.startswith(top.rstrip("/") + "/")]


def _unescape(field: bytes) -> str:
    # The kernel writes space, tab, newline and backslash as octal.
    for code, byte in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
        field = field.replace(code, byte)
    return os.fsdecode(field)


def unmount_below(path: str) -> None:
    """Unmount what is mounted at or below ``path``, last mounted first; never lazily, never through a link.

    Raises:
        RunnerError: ``teardown.busy`` names the mount; the ones before it in the list still stand.
    """
    for point in reversed(mounts_below(path)):
        try:
            syscalls.umount(point)
        except OSError as error:
            raise RunnerError(
                "teardown.busy", f"{point} cannot be unmounted ({error.strerror}); nothing below {path} was removed"
            ) from None


def remove_tree(path: str) -> None:
    """Remove a folder and all in it, following no link and crossing no mount.

    Raises:
        RunnerError: ``teardown.busy``: something is mounted at or below ``path``; nothing was removed.
        OSError: what the file system says.
    """
    standing = mounts_below(path)
    if standing:
        raise RunnerError("teardown.busy", f"{standing[-1]} is mounted; nothing below {path} was removed")
    parent, name = os.path.split(os.path.abspath(path))
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _remove(fd, name, os.stat(name, dir_fd=fd, follow_symlinks=False).st_dev)
    finally:
        os.close(fd)


def _remove(parent: int, name: str, device: int) -> None:
    """One folder is open at a time: trees of images are deeper than Python's stack, and than files may be open."""
    at = os.dup(parent)
    levels = [(_identity(at), [name])]
    try:
        while True:
            names = levels[-1][1]
            if names:
                child = _entered(at, names[-1], device)
                if child is None:
                    names.pop()
                    continue
                os.close(at)
                at = child
                levels.append((_identity(at), os.listdir(at)))
                continue
            levels.pop()
            if not levels:
                return
            at = _up(at, *levels[-1])
    finally:
        os.close(at)


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


def _entered(parent: int, name: str, device: int) -> int | None:
    """A folder, opened; anything else is removed."""
    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(name, dir_fd=parent)
        return None
    if info.st_dev != device:
        raise RunnerError("teardown.busy", f"{name!r} has come to be on another file system; the removal stopped there")
    if info.st_mode & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=parent)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def _up(fd: int, parent: tuple[int, int], names: list[str]) -> int:
    """From an empty folder to the one that it was entered from, where it is removed."""
    above = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    try:
        if _identity(above) != parent:
            raise RunnerError("teardown.busy", f"{names[-1]!r} was moved; the removal stopped there")
        os.rmdir(names.pop(), dir_fd=above)
    except BaseException:
        os.close(above)
        raise
    os.close(fd)
    return above
