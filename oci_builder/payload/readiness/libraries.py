"""Shared libraries: does every DT_NEEDED resolve inside the tree, as ld.so and Python would look (ld.so(8))?"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from oci_builder.model.errors import show
from oci_builder.payload.elf import ElfFacts
from oci_builder.payload.readiness.allow import Rules, matches
from oci_builder.payload.readiness.packages import Packages
from oci_builder.payload.readiness.report import ERROR, NOTE, WARNING, Row
from oci_builder.payload.readiness.tree import Tree

_DEFAULT = (
    b"lib/x86_64-linux-gnu", b"usr/lib/x86_64-linux-gnu", b"lib64", b"usr/lib64", b"lib", b"usr/lib",
)  # fmt: skip
_CONF_LINES = 1000
_OS = (b"usr/", b"lib/", b"lib64/", b"bin/", b"sbin/")


def is_os(path: bytes) -> bool:
    """Whether a path belongs to the operating system of the image, not to the payload on it."""
    return path.startswith(_OS) and not path.startswith(b"usr/local/") and b"site-packages/" not in path


@dataclass(frozen=True, slots=True)
class Found:
    """Where a needed library comes from: a path of the tree, or ``driver``, ``host``, ``preload``, ``missing``."""

    how: str
    path: bytes = b""


class Loader:
    """Finds libraries in a tree.

    Attributes:
        complete: the tree holds a C library; without one the host's loader and its basic libraries serve it.
        search: folders of LD_LIBRARY_PATH, then of ld.so.conf, then the loader's own.
    """

    def __init__(self, tree: Tree, rules: Rules) -> None:
        self.tree = tree
        self.rules = rules
        self.library_path = _split(tree.env.get("LD_LIBRARY_PATH", ""))
        self.configured = list(_conf_folders(tree, b"etc/ld.so.conf", set()))
        self.search = [*self.library_path, *self.configured, *_DEFAULT]
        self.by_name: dict[str, list[bytes]] = defaultdict(list)
        for path, node in tree.nodes.items():
            name = path.rpartition(b"/")[2]
            if b".so" in name and node.kind in ("file", "link"):
                self.by_name[name.decode("utf-8", "replace")].append(path)
        for path, elf in libraries(tree):
            if elf.soname and path not in self.by_name[elf.soname]:
                self.by_name[elf.soname].append(path)
        self.complete = any(p.rpartition(b"/")[2] == b"libc.so.6" for p in self.by_name.get("libc.so.6", ()))

    def find(self, path: bytes, elf: ElfFacts, name: str) -> Found:
        """Where the library ``name`` that ``path`` needs comes from."""
        if "/" in name:
            real = self.tree.resolve(name.encode("utf-8", "replace"))
            return Found("file", real) if real else Found("missing")
        for folder in self._folders(path, elf):
            real = self.tree.find(folder, name.encode("utf-8", "replace"))
            if real and self._fits(real, elf):
                return Found("file", real)
        if any(matches(name, d.names) for d in self.rules.driver):
            return Found("driver")
        if not self.complete and any(matches(name, h.names) for h in self.rules.host):
            return Found("host")
        return self._preloaded(path, name)

    def _folders(self, path: bytes, elf: ElfFacts) -> Iterator[bytes]:
        origin = path.rpartition(b"/")[0]
        if not elf.runpath:
            yield from (expand(d, origin) for d in elf.rpath if d)
        yield from self.library_path
        yield from (expand(d, origin) for d in elf.runpath if d)
        yield from self.search[len(self.library_path) :]

    def _fits(self, real: bytes, elf: ElfFacts) -> bool:
        facts = self.tree.nodes[real].facts
        return facts is not None and facts.elf is not None and facts.elf.machine == elf.machine

    def _preloaded(self, path: bytes, name: str) -> Found:
        text = path.decode("utf-8", "replace")
        site = _site(path)
        for rule in self.rules.preload:
            if not fnmatchcase(text, rule.path):
                continue
            for candidate in self.by_name.get(name, ()):
                inside = site is not None and candidate.startswith(site + b"/")
                if inside and fnmatchcase(candidate[len(site or b"") + 1 :].decode("utf-8", "replace"), rule.libraries):
                    return Found("preload", candidate)
        return Found("missing")


def libraries(tree: Tree) -> Iterator[tuple[bytes, ElfFacts]]:
    """Every program and library of the tree."""
    for path, _, facts in tree.files():
        if facts.elf is not None and facts.elf.kind != "rel":
            yield path, facts.elf


def judge_libraries(tree: Tree, packages: Packages, loader: Loader) -> Iterator[Row]:
    """Rows for libraries that nothing provides, and for symbol versions that the provider in the tree lacks."""
    for path, elf in libraries(tree):
        where, package = show(path)[1:-1], packages.owner(path)
        if elf.machine != "x64":
            yield Row(WARNING, "elf.machine", where, f"built for {elf.machine}", package, "x64", elf.machine)
            continue
        offered: dict[str, Found] = {}
        for name in elf.needed:
            found = offered[name] = loader.find(path, elf, name)
            if found.how == "missing":
                yield _missing(loader, where, package, name)
        yield from _versions(tree, where, package, elf, offered)
    for path, _, facts in tree.files():
        if facts.bad:
            where = show(path)[1:-1]
            yield Row(WARNING, "elf.unreadable", where, f"not a sound ELF file: {facts.bad}", packages.owner(path))


def _missing(loader: Loader, where: str, package: str, name: str) -> Row:
    elsewhere = [show(p)[1:-1] for p in loader.by_name.get(name, ())][:2]
    hint = f"; a file of that name is at {', '.join(elsewhere)}, off its search path" if elsewhere else ""
    message = f"needs {show(name)[1:-1]}, which nothing provides{hint}"
    return Row(ERROR, "lib.missing", where, message, package, "", show(name)[1:-1])


def _versions(tree: Tree, where: str, package: str, elf: ElfFacts, offered: dict[str, Found]) -> Iterator[Row]:
    for library, versions in elf.requires:
        found = offered.get(library)
        facts = tree.nodes[found.path].facts if found and found.path else None
        if facts is None or facts.elf is None or not facts.elf.defines:
            continue
        lacking = [v for v in versions if v not in facts.elf.defines]
        if lacking:
            message = f"needs {', '.join(lacking)} of {library}, which the one in this tree does not define"
            provider = show(found.path if found else b"")[1:-1]
            yield Row(ERROR, "lib.version", where, message, package, ", ".join(lacking), provider)


def judge_duplicates(tree: Tree, packages: Packages) -> Iterator[Row]:
    """Two different providers of one soname in one environment: which one loads depends on import order."""
    by_site: dict[tuple[bytes, str], dict[tuple[bytes, int], bytes]] = defaultdict(dict)
    for path, elf in libraries(tree):
        site = packages.site_of(path)
        if site and elf.soname and elf.machine == "x64":
            by_site[site, elf.soname].setdefault((path.rpartition(b"/")[0], tree.nodes[path].size), path)
    for (site, soname), providers in sorted(by_site.items()):
        if len({folder for folder, _ in providers}) > 1:
            paths = sorted(p[len(site) + 1 :] for p in providers.values())
            listed = ", ".join(show(p)[1:-1] for p in paths)
            message = f"{len(paths)} libraries call themselves {show(soname)[1:-1]}: {listed}"
            yield Row(WARNING, "lib.duplicate", show(site)[1:-1], message, "", "one", show(soname)[1:-1])


def judge_hygiene(tree: Tree, packages: Packages) -> Iterator[Row]:
    """Run paths that leave the tree's own logic, executable stacks, text relocations."""
    for path, elf in libraries(tree):
        where, package = show(path)[1:-1], packages.owner(path)
        for folder in elf.rpath + elf.runpath:
            yield from _run_path(tree, path, where, package, folder)
        if elf.exec_stack:
            message = "asks for an executable stack, which glibc 2.41 and hardened kernels refuse"
            yield Row(WARNING, "elf.exec_stack", where, message, package)
        if elf.textrel:
            yield Row(WARNING, "elf.textrel", where, "has relocations in its code (not position independent)", package)


def _run_path(tree: Tree, path: bytes, where: str, package: str, folder: str) -> Iterator[Row]:
    shown = show(folder)[1:-1]
    if folder.startswith(("$ORIGIN", "${ORIGIN}")):
        return
    if not folder.startswith("/"):
        yield Row(
            WARNING, "rpath.relative", where, f"run path {shown!r} depends on the working folder", package, "", shown
        )
    elif tree.resolve(folder.encode("utf-8", "replace")) is None:
        yield Row(
            WARNING, "rpath.foreign", where, f"run path {shown} does not exist here: it names the build machine",
            package, "$ORIGIN/…", shown,
        )  # fmt: skip
    elif not is_os(path):
        message = f"run path {shown} is absolute, so the file cannot move"
        yield Row(NOTE, "rpath.absolute", where, message, package, "$ORIGIN/…", shown)


def expand(folder: str, origin: bytes) -> bytes:
    """A run path entry as a path of the tree."""
    text = folder.replace("${ORIGIN}", "$ORIGIN").encode("utf-8", "replace")
    text = text.replace(b"$ORIGIN", b"/" + origin).replace(b"$LIB", b"lib64").replace(b"${LIB}", b"lib64")
    return posixpath.normpath(text).lstrip(b"/")


def _split(value: str) -> list[bytes]:
    return [posixpath.normpath(p).strip("/").encode("utf-8", "replace") for p in value.split(":") if p]


def _conf_folders(tree: Tree, path: bytes, seen: set[bytes]) -> Iterator[bytes]:
    real = tree.resolve(path)
    node = tree.nodes.get(real) if real else None
    if node is None or node.facts is None or real is None or real in seen:
        return
    seen.add(real)
    for raw in node.facts.text.splitlines()[:_CONF_LINES]:
        line = raw.partition("#")[0].strip()
        if line.startswith("include "):
            pattern = posixpath.join("/etc", line[8:].strip()).lstrip("/")
            for name in _conf_files(tree, pattern):
                yield from _conf_folders(tree, name, seen)
        elif line:
            yield line.split("=")[0].strip("/ ").encode("utf-8", "replace")


def _conf_files(tree: Tree, pattern: str) -> list[bytes]:
    found = (p for p, _, _ in tree.files() if p.startswith(b"etc/ld.so.conf"))
    return [p for p in found if fnmatchcase(p.decode("utf-8", "replace"), pattern)]


def _site(path: bytes) -> bytes | None:
    head, found, _ = path.partition(b"site-packages/")
    return head + b"site-packages" if found else None
