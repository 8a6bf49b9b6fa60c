"""A minimal root made from the running machine: its Python, a shell, a few tools, and the libraries they need.

For a first run with no registry in reach. Every file keeps its path, so that an environment whose interpreter is this
machine's finds it; repeatable on one machine, and no more than that.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from oci_builder.model.errors import SpecError, show
from oci_builder.model.events import Emit, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.host_elf import Linkage, configured_folders, loader_cache, read_linkage
from oci_builder.rootfs.layers_assemble import InlineFile, assemble, place_files, place_tree
from oci_builder.rootfs.layers_plan import LayerPlan, Normal, Origin, PlannedEntry, folder_entry
from oci_builder.rootfs.scan import BASE_POLICY, SourceEntry, input_failure, scan_tree
from oci_builder.wire.tar import Kind

NAME = "host"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SCRIPTS = ("/bin/sh", "/bin/bash", "/usr/bin/env")
_REQUIRED = ("sh", "env", "cat", "ls", "true", "id")
_WELCOME = (
    "bash", "[", "awk", "basename", "chmod", "chown", "cp", "cut", "date", "dd", "df", "dirname", "du", "echo",
    "expr", "false", "find", "getent", "grep", "gzip", "head", "hostname", "kill", "ldconfig", "ln", "mkdir",
    "mkfifo", "mktemp", "mv", "nproc", "od", "printf", "pwd", "readlink", "realpath", "rm", "rmdir", "sed", "seq",
    "sha256sum", "sleep", "sort", "stat", "tail", "tar", "tee", "test", "timeout", "touch", "tr", "uname", "uniq",
    "wc", "whoami", "xargs",
)  # fmt: skip
# Opened by name at run time, or what portable wheels (PEP 600) expect of a machine.
_LIBRARIES = (
    "libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libutil.so.1", "libresolv.so.2",
    "libnss_files.so.2", "libnss_dns.so.2", "libgcc_s.so.1", "libstdc++.so.6", "libz.so.1", "libcrypt.so.1",
)  # fmt: skip
_STDLIB_LEFT_OUT = (
    "__pycache__", "*/__pycache__", "test", "*/tests", "*/idle_test", "idlelib", "tkinter", "turtledemo", "turtle.py",
    "lib2to3", "ensurepip", "config-*", "site-packages/*", "dist-packages/*", "lib-dynload/_tkinter.*",
    "lib-dynload/_test*", "lib-dynload/xx*",
)  # fmt: skip
_DEFAULT_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
_FOLDERS = {
    b"dev": 0o755, b"proc": 0o555, b"sys": 0o555, b"run": 0o755, b"root": 0o755, b"tmp": 0o1777, b"var/tmp": 0o1777,
}  # fmt: skip
_FILES = {
    b"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    b"etc/group": b"root:x:0:\nnogroup:x:65534:\n",
    b"etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
    b"etc/hosts": b"127.0.0.1 localhost\n::1 localhost\n",
}


def host_plan(*, epoch: int = 0, limits: Limits = DEFAULT_LIMITS, emit: Emit = silent) -> LayerPlan:
    """The layer that makes a root of this machine.

    Raises:
        SpecError: ``spec.host`` when the machine lacks what it takes (a shell, a readable standard library, x86-64).
        TransportError: ``io.*``.
    """
    normal = Normal(epoch)
    collector = _Collector(normal, limits, emit)
    python = python_executable()
    collector.python(python)
    for name in (*_REQUIRED, *_WELCOME):
        found = shutil.which(name, path=PATH)
        if found is None and name in _REQUIRED:
            raise SpecError("spec.host", f"this machine has no {name} in {PATH}; use another base", where="base.host")
        if found is not None:
            collector.add(Path(found))
    collector.libraries(_LIBRARIES)
    # Where scripts look for their interpreter: with a merged /usr, PATH leads to one name of it and #! to the other.
    texts = ("/usr/lib/os-release", "/etc/os-release", "/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8")
    for place in (*_SCRIPTS, *texts):
        if Path(place).exists():
            collector.add(Path(place))
    return assemble(NAME, collector.items(python), normal=normal)


def python_executable() -> Path:
    """The running interpreter's real file, outside any virtual environment."""
    return Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()


class _Collector:
    """Gathers files with everything that they need to run."""

    def __init__(self, normal: Normal, limits: Limits, emit: Emit) -> None:
        self.normal = normal
        self.limits = limits
        self.emit = emit
        self.origin = Origin.of_scan(b"/", b"", normal, time.time_ns())
        self.found: dict[bytes, PlannedEntry] = {}
        self.trees: list[PlannedEntry] = []
        self.names: dict[str, str] = {}
        self.conf = configured_folders()
        self.examined: set[Path] = set()

    def add(self, place: Path, depth: int = 0) -> None:
        """Add a path as the machine has it: links on the way stay links, what they lead to is added too."""
        if depth > self.limits.symlink_follows:
            raise SpecError("spec.host", f"{show(str(place))}: symbolic links go in circles", where=str(place))
        done = Path("/")
        parts = place.parts[1:]
        for index, part in enumerate(parts):
            done = done / part
            entry = self._lstat(done)
            if entry.kind is Kind.SYMLINK:
                self._keep(entry)
                target = Path(os.path.normpath(done.parent / os.fsdecode(entry.link)))
                self.add(target.joinpath(*parts[index + 1 :]), depth + 1)
                return
        if entry.kind is Kind.DIR:
            self.tree(done)
        elif entry.kind is Kind.FILE:
            self._keep(entry)
            self._needs(done)

    def tree(self, folder: Path, exclude: tuple[str, ...] = ()) -> None:
        """Add a folder with all below it, and what its programs, libraries and outward links need."""
        tree = scan_tree(folder, emit=self.emit, limits=self.limits, policy=replace(BASE_POLICY, exclude=exclude))
        prefix = os.fsencode(folder).lstrip(b"/")
        self.trees += place_tree(tree, prefix, self.normal)
        for entry in tree.entries:
            place = folder / os.fsdecode(entry.path)
            if entry.kind is Kind.SYMLINK:
                target = Path(os.path.normpath(place.parent / os.fsdecode(entry.link)))
                if target.exists() and not target.is_relative_to(folder):
                    self.add(target)
            elif entry.kind is Kind.FILE and (entry.mode & 0o111 or b".so" in entry.path):
                self._needs(place)

    def python(self, executable: Path) -> None:
        """Add the interpreter under all its names, and its standard library."""
        stdlib = {Path(sysconfig.get_path(kind, vars=_base_paths())) for kind in ("stdlib", "platstdlib")}
        for folder in sorted(stdlib):
            if not folder.is_dir():
                raise SpecError("spec.host", f"no standard library at {show(str(folder))}", where=str(folder))
            self.add(folder) if folder.is_symlink() else self.tree(folder.resolve(), _STDLIB_LEFT_OUT)
        self.add(executable)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        for name in ("python", "python3", f"python{version}"):
            for alias in (executable.parent / name, Path("/usr/bin") / name):
                if alias.is_file() and alias.resolve() == executable:
                    self.add(alias)

    def libraries(self, names: Iterable[str]) -> None:
        """Add libraries by name where the machine has them."""
        for name in names:
            place = self._find(name, Linkage(), Path("/"))
            if place is not None:
                self._library(name, place)

    def _library(self, name: str, place: Path) -> None:
        # What a RUNPATH leads to is found without the cache, and is nobody else's business.
        if place.parent in (*self.conf, *map(Path, _DEFAULT_FOLDERS)):
            self.names.setdefault(name, str(place))
        self.add(place)

    def _needs(self, place: Path) -> None:
        if place in self.examined:
            return
        self.examined.add(place)
        try:
            linkage = read_linkage(place)
            first = b"" if linkage is not None else _first_line(place)
        except OSError as error:
            raise input_failure(error, os.fsencode(place)) from None
        if linkage is None:
            words = first[2:].split()
            if first.startswith(b"#!/") and words and Path(os.fsdecode(words[0])).exists():
                self.add(Path(os.fsdecode(words[0])))
            return
        if linkage.interpreter:
            self.add(Path(linkage.interpreter))
        for name in linkage.needed:
            found = self._find(name, linkage, place)
            if found is not None:
                self._library(name, found)

    def _find(self, name: str, linkage: Linkage, place: Path) -> Path | None:
        if "/" in name:
            return Path(name) if Path(name).exists() else None
        origin = str(place.resolve().parent)
        own = [Path(folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)) for folder in linkage.search]
        for folder in (*own, *self.conf, *map(Path, _DEFAULT_FOLDERS)):
            candidate = folder / name
            if candidate.is_file() and read_linkage(candidate) is not None:
                return Path(os.path.normpath(candidate))
        return None

    def _keep(self, entry: SourceEntry) -> None:
        self.found.setdefault(entry.path, PlannedEntry(self.origin, entry))

    def _lstat(self, place: Path) -> SourceEntry:
        try:
            found = place.lstat()
            link = os.fsencode(place.readlink()) if stat.S_ISLNK(found.st_mode) else b""
        except OSError as error:
            raise input_failure(error, os.fsencode(place)) from None
        kinds = {stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.DIR, stat.S_IFLNK: Kind.SYMLINK}
        kind = kinds.get(stat.S_IFMT(found.st_mode), Kind.FIFO)
        return SourceEntry(
            os.fsencode(place).lstrip(b"/"), kind, stat.S_IMODE(found.st_mode) & 0o1777, 0, 0,
            found.st_size if kind is Kind.FILE else 0, found.st_mtime_ns, found.st_ctime_ns,
            found.st_dev, found.st_ino, found.st_nlink, link,
        )  # fmt: skip

    def items(self, python: Path) -> Iterator[PlannedEntry]:
        """Everything gathered, with the files and folders that a root must have."""
        given = dict(self.found)
        for item in self.trees:
            given.setdefault(item.name, item)
        yield from given.values()
        made = {path: InlineFile(data) for path, data in _FILES.items()}
        made[b"etc/ld.so.conf"] = InlineFile("".join(f"{folder}\n" for folder in self.conf).encode())
        made[b"etc/ld.so.cache"] = InlineFile(loader_cache(self.names))
        # Behind a link of the machine (a merged /usr), the name stands already.
        if not any(path in given for path in (b"usr/bin/python3", b"usr/local/bin/python3")):
            made[b"usr/local/bin/python3"] = InlineFile(link=os.fsencode(python))
        yield from (item for item in place_files(made, b"", self.normal) if item.name not in given)
        folders = Origin(b"", b"", self.normal)
        yield from (PlannedEntry(folders, folder_entry(path, mode)) for path, mode in _FOLDERS.items())


def _base_paths() -> dict[str, str]:
    return {
        "base": sys.base_prefix, "platbase": sys.base_exec_prefix,
        "installed_base": sys.base_prefix, "installed_platbase": sys.base_exec_prefix,
    }  # fmt: skip


def _first_line(place: Path) -> bytes:
    with place.open("rb") as file:
        return file.readline(256)
