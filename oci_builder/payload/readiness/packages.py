"""Which package a file belongs to, from the environments' own records (PyPA "Recording installed projects")."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from oci_builder.payload.names import normalize
from oci_builder.payload.readiness.tree import Tree

_PIN = re.compile(r"^Requires-Dist: ([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?==\s*([^\s;,)*]+)\)?\s*(?:;\s*(.*))?$")
# An import package that no record names: its first folder below the environment.
_SITE = re.compile(rb"\A(.*(?:site|dist)-packages)/([^/]+)")


@dataclass(frozen=True, slots=True)
class Package:
    """An installed distribution.

    Attributes:
        site: its folder (``…/site-packages``).
        pins: (name, exact version) of unconditional requirements with ``==``.
    """

    name: str
    version: str
    site: bytes
    pins: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(slots=True)
class Packages:
    """All distributions of a tree, by environment."""

    by_site: dict[bytes, dict[str, Package]] = field(default_factory=dict)
    owners: dict[bytes, Package] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: Tree) -> Packages:
        """Read them from the tree's METADATA and RECORD files."""
        out = cls()
        records: list[tuple[bytes, bytes, str]] = []
        for path, _, facts in tree.files():
            folder, _, name = path.rpartition(b"/")
            if name == b"METADATA" and folder.endswith(b".dist-info"):
                package = _package(folder.rpartition(b"/")[0], facts.text)
                out.by_site.setdefault(package.site, {})[package.name] = package
                records.append((folder, package.site, package.name))
        for folder, site, project in records:
            node = tree.nodes.get(folder + b"/RECORD")
            if node and node.facts:
                owner = out.by_site[site][project]
                out.owners.update((path, owner) for path in _recorded(site, node.facts.text))
        return out

    def owner(self, path: bytes) -> str:
        """The package of a file as text; the import package's name where no record says; empty outside of Python."""
        known = self.owners.get(path)
        if known:
            return str(known)
        match = _SITE.match(path)
        return match[2].decode("utf-8", "replace") if match else ""

    def named(self, name: str) -> Iterator[Package]:
        """The package of that name in each environment that has it."""
        return (p[normalize(name)] for p in self.by_site.values() if normalize(name) in p)

    def site_of(self, path: bytes) -> bytes | None:
        """The environment that a path lies in."""
        match = _SITE.match(path)
        return match[1] if match else next((s for s in self.by_site if path.startswith(s + b"/")), None)


def _package(site: bytes, text: str) -> Package:
    fields: dict[str, str] = {}
    pins = []
    for line in text.splitlines():
        key, _, value = line.partition(": ")
        if key in ("Name", "Version"):
            fields.setdefault(key, value.strip())
        pin = _PIN.match(line)
        if pin and _holds(pin[3]):
            pins.append((normalize(pin[1]), pin[2]))
    return Package(normalize(fields.get("Name", "?")), fields.get("Version", "?"), site, tuple(pins))


def _holds(marker: str | None) -> bool:
    """Whether a requirement's marker holds on every Linux x86_64 Python; unknown ones are taken as no."""
    terms = [t.strip(" ()") for t in re.split(r"\band\b", marker or "")] if marker else []
    good = {"platform_system == 'Linux'", "sys_platform == 'linux'", "platform_machine == 'x86_64'"}
    return all(t.replace('"', "'") in good for t in terms)


def _recorded(site: bytes, text: str) -> Iterator[bytes]:
    for line in text.splitlines():
        path = line.split('"')[1] if line.startswith('"') else line.partition(",")[0]
        yield posixpath.normpath(posixpath.join(site, path.encode("utf-8", "replace")))
