"""The file system that a program sees, built in a private mount namespace and entered for good."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from chroot_exec import syscalls
from chroot_exec.devices import DeviceFolder, Node
from chroot_exec.errors import RunnerError
from chroot_exec.places import KERNEL, Places
from chroot_exec.protocol import Bind, Request
from chroot_exec.resolve import Root, fd_path
from chroot_exec.syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY, MS_REC, MS_REMOUNT

_READ_ONLY_PROC = ("bus", "fs", "irq", "sys", "sysrq-trigger")
_HIDDEN_PROC = ("kcore", "keys", "timer_list", "latency_stats", "sched_debug")
SHM = "/dev/shm"
# Code of a note: an overlay without them works, but for two things.
NO_ATTRIBUTES = "sandbox.attributes"
_PRIVATE = MS_NOSUID | MS_NODEV


@dataclass
class Facts:
    """What the sandbox turned out to be, for the receipt."""

    root: str = ""
    enter: str = ""
    devices: str = ""
    proc: str = ""
    sys: str = ""
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a remark once."""
        if text not in self.notes:
            self.notes.append(text)


class FileSystem:
    """Builds the sandbox's file system and enters it.

    Args:
        request: what was asked for.
        base: an empty folder of the host; in this namespace it becomes the place where all of it stands.
        made: told about every placeholder made in the tree itself (never with an overlay).
        user_namespace: whether this process is root only in a user namespace of its own.

    Raises:
        RunnerError: ``sandbox.mount``: nothing can be mounted here.
        OSError: the root cannot be opened.
    """

    def __init__(self, request: Request, base: str, made: Callable[[str], None], user_namespace: bool) -> None:
        self.facts = Facts()
        self._request = request
        self._base = base
        self._user_namespace = user_namespace
        try:
            syscalls.mount("", "/", "", syscalls.MS_PRIVATE | MS_REC)
        except OSError as error:
            raise RunnerError(
                "sandbox.mount", f"this process may not mount ({error.strerror}): in a container its security profile "
                "(with Docker, --security-opt apparmor=unconfined) or its filter of system calls forbids it",
            ) from None  # fmt: skip
        # From here on nothing that is mounted shows outside, and nothing mounted outside shows here.
        syscalls.mount("tmpfs", base, "tmpfs", _PRIVATE, "mode=0700")
        self._top = os.path.join(base, "root")
        os.mkdir(self._top)
        self._mount_root()
        self.root = Root(self._top, made if self.facts.root != "overlay" else None)
        self._places = Places(self.root)

    def _mount_root(self) -> None:
        lower = os.open(self._request.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if self._request.write == "overlay" and self._overlay(lower):
                self.facts.root = "overlay"
                return
            self._bind_root(lower)
            # Who asked for an overlay wants the tree as it is: others may run in it, and the next check does.
            self.facts.root = "direct" if self._request.write == "direct" else "read-only"
        finally:
            os.close(lower)

    def _overlay(self, lower: int) -> bool:
        upper, work = os.path.join(self._base, "upper"), os.path.join(self._base, "work")
        os.mkdir(upper)
        os.mkdir(work)
        os.chmod(upper, stat.S_IMODE(os.stat(fd_path(lower)).st_mode))
        # Through a descriptor, since a path may hold the characters that separate overlay's options.
        options = f"lowerdir={fd_path(lower)},upperdir={upper},workdir={work}"
        if self._user_namespace:
            options += ",userxattr"
        try:
            syscalls.mount("overlay", self._top, "overlay", MS_NODEV if self._user_namespace else _PRIVATE, options)
        except OSError as error:
            self.facts.note(f"no overlay here ({error.strerror}): the tree is read-only, but for /tmp, /run and /dev")
            return False
        if self._user_namespace:
            self._note_attributes(upper)
        return True

    def _note_attributes(self, upper: str) -> None:
        """In memory there are attributes of users since Linux 6.6; in a user namespace an overlay has no others."""
        try:
            os.setxattr(upper, "user.probe", b"")
            os.removexattr(upper, "user.probe")
        except OSError as error:
            self.facts.note(
                f"[{NO_ATTRIBUTES}] no user attributes in memory here ({error.strerror}; Linux 6.6 has them): "
                "what makes a folder of the image anew gets an input/output error, what sets such an attribute is not "
                "supported; as root (--isolation root) it works"
            )

    def _bind_root(self, lower: int) -> None:
        try:
            syscalls.mount(fd_path(lower), self._top, "", MS_BIND)
        except OSError:
            # Mounts below the tree are locked to it in a user namespace: all of it or nothing.
            syscalls.mount(fd_path(lower), self._top, "", MS_BIND | MS_REC)
        # Device nodes in a tree are its author's, not this host's.
        flags = os.statvfs(self._top).f_flag & (MS_RDONLY | MS_NOEXEC | 1024 | 2048)
        try:
            syscalls.mount("", self._top, "", MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | flags)
        except OSError as error:
            self.facts.note(f"device nodes in the tree cannot be switched off ({error.strerror})")

    def build(self, nodes: Iterable[Node]) -> None:
        """Everything but the caller's own mounts: kernel file systems, devices, scratch folders, names.

        Raises:
            RunnerError: ``sandbox.target``, ``sandbox.mount``, ``device.*``.
        """
        makers: dict[str, Callable[[], None]] = {
            "/proc": self._proc,
            "/sys": self._sys,
            "/dev": lambda: self._dev(nodes),
            "/run": lambda: self.scratch("/run", 0o755, 0),
            "/tmp": lambda: self.scratch("/tmp", 0o1777, self._request.tmp_size),
        }
        for path in self._places.in_order(makers):
            makers[path]()
            self._places.add(path)
        self._places.require_reachable((*makers, SHM))
        for path in self._request.tmpfs:
            self.scratch(path, 0o755, 0)
        self._names()
        for bind in self._request.binds:
            self.bind(bind)

    def _proc(self) -> None:
        fd = self._places.folder("/proc")
        try:
            syscalls.mount("proc", fd_path(fd), "proc", _PRIVATE | MS_NOEXEC)
            self.facts.proc = "own"
        except OSError as error:
            # The kernel gives a new one to a user namespace only where the outer one has nothing masked.
            self._bind_host("/proc", fd)
            self.facts.proc = "host"
            self.facts.note(f"/proc is the host's ({error.strerror}): process numbers there are not the sandbox's")
        finally:
            os.close(fd)

    def _guard_proc(self) -> None:
        if self.facts.proc == "host":
            return
        for name in _READ_ONLY_PROC:
            if os.path.exists(f"/proc/{name}"):
                self._guard(self.root.open(f"/proc/{name}"), f"/proc/{name}")
        for name in _HIDDEN_PROC:
            if os.path.isfile(f"/proc/{name}"):
                self._guard(os.open("/dev/null", os.O_PATH | os.O_CLOEXEC), f"/proc/{name}")

    def _guard(self, source: int, path: str) -> None:
        target = self.root.open(path)
        try:
            self._show(source, target, Bind(path, path))
        finally:
            os.close(source)
            os.close(target)

    def _sys(self) -> None:
        fd = self._places.folder("/sys")
        try:
            syscalls.mount("sysfs", fd_path(fd), "sysfs", _PRIVATE | MS_NOEXEC | MS_RDONLY)
            self.facts.sys = "own"
        except OSError:
            # Sysfs belongs to the network namespace: a user namespace that keeps the host's cannot mount it.
            self._bind_host("/sys", fd)
            self._read_only("/sys")
            self.facts.sys = "host"
        finally:
            os.close(fd)

    def _bind_host(self, path: str, fd: int) -> None:
        try:
            syscalls.mount(path, fd_path(fd), "", MS_BIND | MS_REC)
        except OSError as error:
            raise RunnerError("sandbox.mount", f"{path} can be neither mounted nor bound: {error}") from None

    def _dev(self, nodes: Iterable[Node]) -> None:
        fd = self._places.folder("/dev")
        self._tmpfs(fd, MS_NOSUID, "mode=0755,size=64k")
        os.close(fd)
        fd = self.root.directory("/dev")
        try:
            folder = DeviceFolder(fd, self.facts.note)
            self.facts.devices = folder.method
            folder.fill(nodes)
            os.mkdir("pts", 0o755, dir_fd=fd)
            os.mkdir("shm", 0o1777, dir_fd=fd)
            os.mkdir("mqueue", 0o1777, dir_fd=fd)
        finally:
            os.close(fd)
        self._pts()
        self.scratch(SHM, 0o1777, self._request.shm_size)
        self._places.add(SHM)
        self._try_mount("/dev/mqueue", "mqueue", _PRIVATE | MS_NOEXEC, "")

    def _pts(self) -> None:
        # Group 5 is tty by convention; a user namespace may not map it.
        for extra in (",gid=5", ""):
            options = "newinstance,ptmxmode=0666,mode=0620" + extra
            if self._try_mount("/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options, quiet=bool(extra)):
                return

    def _try_mount(self, path: str, kind: str, flags: int, options: str, quiet: bool = False) -> bool:
        fd = self.root.directory(path)
        try:
            syscalls.mount(kind, fd_path(fd), kind, flags, options)
        except OSError as error:
            if not quiet:
                self.facts.note(f"no {path} ({error.strerror})")
            return False
        finally:
            os.close(fd)
        return True

    def scratch(self, path: str, mode: int, size: int) -> None:
        """An empty folder in memory at ``path``; ``size`` in bytes, 0 for the kernel's default."""
        # In our own /dev there are such folders; else a link into a kernel file system would let it be covered.
        fd = self.root.directory(path) if path.startswith("/dev/") else self._places.folder(path)
        try:
            if self._places.is_scratch(fd):
                self.facts.note(f"{path} in the root leads to another scratch folder, which is used")
                return
            self._tmpfs(fd, _PRIVATE, f"mode={mode:o}" + (f",size={size}" if size else ""))
        finally:
            os.close(fd)

    @staticmethod
    def _tmpfs(fd: int, flags: int, options: str) -> None:
        try:
            syscalls.mount("tmpfs", fd_path(fd), "tmpfs", flags, options)
        except OSError as error:
            raise RunnerError("sandbox.mount", f"tmpfs: {error}") from None

    def _names(self) -> None:
        request = self._request
        hosts = f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n127.0.1.1\t{request.hostname}\n"
        resolv = "# no network\n"
        if request.network == "host":
            hosts, resolv = _host_file("/etc/hosts") or hosts, _host_file("/etc/resolv.conf")
        for name, text in (("hosts", hosts), ("resolv.conf", resolv), ("hostname", request.hostname + "\n")):
            self.text_file(f"/etc/{name}", text)

    def text_file(self, path: str, text: str) -> None:
        """A file of ours at ``path``, over whatever regular file the image has there."""
        source = os.path.join(self._base, path.strip("/").replace("/", "-"))
        with open(source, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        try:
            self.bind(Bind(source, path, read_only=False))
        except RunnerError as error:
            self.facts.note(f"{path} is left as the image has it: {error.message}")

    def bind(self, bind: Bind) -> None:
        """Show a file or folder of the host at a path resolved inside the root.

        Raises:
            RunnerError: ``sandbox.bind`` (no such source, or of another type than what stands there),
                ``sandbox.target`` (also where a link in the image leads to what must not be covered).
        """
        try:
            source = os.open(bind.source, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise RunnerError("sandbox.bind", f"cannot bind {bind.source!r}: {error.strerror}") from None
        try:
            folder = stat.S_ISDIR(os.fstat(source).st_mode)
            target = self.root.open(bind.target, "dir" if folder else "file")
            try:
                self._places.require_free(target, bind.target)
                self._show(source, target, bind)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _show(self, source: int, target: int, bind: Bind) -> None:
        folder = stat.S_ISDIR(os.fstat(source).st_mode)
        try:
            syscalls.mount(fd_path(source), fd_path(target), "", MS_BIND | (MS_REC if folder else 0))
        except OSError as error:
            raise RunnerError(
                "sandbox.bind", f"cannot bind {bind.source!r} at {bind.target!r}: {error.strerror}"
            ) from None
        if bind.read_only:
            self._read_only(bind.target)

    def twin(self, source: str, target: str) -> None:
        """Show a folder of the image at a second place, read-only.

        Raises:
            RunnerError: ``sandbox.twin``: not a folder, or not in the image itself (as /proc, /dev, a bind);
                ``sandbox.target``.
        """
        shown = self.root.open(source)
        try:
            info = os.fstat(shown)
            # Of a kernel file system a second copy would lack what guards the first.
            if not stat.S_ISDIR(info.st_mode) or info.st_dev != os.fstat(self.root.fd).st_dev:
                raise RunnerError("sandbox.twin", f"{source!r} is not a folder of the image itself")
            place = self.root.directory(target)
            try:
                self._places.require_free(place, target)
                syscalls.mount(fd_path(shown), fd_path(place), "", MS_BIND)
            finally:
                os.close(place)
        except OSError as error:
            raise RunnerError("sandbox.twin", f"cannot show {source!r} at {target!r}: {error.strerror}") from None
        finally:
            os.close(shown)
        self._read_only(target)

    def _read_only(self, path: str) -> None:
        fd = self.root.open(path)
        try:
            syscalls.make_read_only(fd_path(fd))
        except OSError:
            # Before Linux 5.12. A remount must repeat the flags that a user namespace finds locked.
            flags = os.statvfs(fd_path(fd)).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC | 1024 | 2048)
            syscalls.mount("", fd_path(fd), "", MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
        finally:
            os.close(fd)

    @property
    def read_only(self) -> bool:
        """Whether nothing can be made in the root once it has been entered."""
        return self._request.read_only or self.facts.root == "read-only"

    def enter(self) -> None:
        """Make it the root of this process; the old one is gone afterwards.

        Raises:
            RunnerError: ``sandbox.target``: what was mounted last covers /proc, /sys or /dev.
        """
        self._places.require_reachable(KERNEL)
        self._guard_proc()
        if self.read_only:
            flags = os.statvfs(self._top).f_flag & (MS_NOSUID | MS_NODEV | 1024 | 2048)
            syscalls.mount("", self._top, "", MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
        os.chdir(self._top)
        self.root.close()
        try:
            syscalls.pivot_root(".", ".")
            syscalls.umount(".", syscalls.MNT_DETACH)
            self.facts.enter = "pivot_root"
        except OSError as error:
            self.facts.note(f"no pivot_root here ({error.strerror}): chroot is used")
            os.chroot(".")
            self.facts.enter = "chroot"
        os.chdir("/")


def _host_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read(1 << 20)
    except OSError:
        return ""
