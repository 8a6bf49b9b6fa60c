"""What an image is made of, read from its own files: Python and Debian or Alpine packages, interpreters, inventories.

An inventory that a tier brings is believed in what the files cannot say (hashes, sources, what was left out), and in
nothing else: a package that it names and the tier does not have is none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from oci_builder.model.errors import FormatError, PolicyError, show
from oci_builder.model.jsontext import load_json
from oci_builder.model.redact import redact_url
from oci_builder.payload.inventory import licence
from oci_builder.payload.names import normalize
from oci_builder.release.files import hide
from oci_builder.release.system import system_packages, wants_system
from oci_builder.release.walk import Data, Walk, walk
from oci_builder.transports.wanted import WantedImage
from oci_builder.wire.tar import Kind, TarEntry

_INFO = re.compile(
    rb"(?P<place>.*/(?:site|dist)-packages)/(?P<info>[^/]+\.(?:dist|egg)-info)/(?:METADATA|PKG-INFO|RECORD|direct_url\.json)"
)
_INVENTORY = re.compile(rb"(?P<prefix>(?:.*/)?)inventory-(?P<tier>[a-z0-9][a-z0-9._-]*)\.json")
_PYTHON = re.compile(rb"(?P<place>(?:.*/)?)(?:include|lib)/python(?P<minor>3\.\d+)[a-z]*/(?:patchlevel\.h|os\.py)")
_TIER = re.compile(r"(?P<prefix>(?:.*/)?)envs/(?P<tier>[^/]+)/")
_VERSION = re.compile(rb'#define\s+PY_VERSION\s+"([^"]{1,40})"')
_SHA256 = re.compile("[0-9a-f]{64}")
_TEXT = re.compile(r"[^\0-\x1f]{1,4096}")
_MOST = 32 << 20
_COUNT = 200_000


@dataclass(slots=True)
class Contents:
    """What was found.

    Attributes:
        image: None for what is no image.
        tiers: name -> its inventory, as ``payload.inventory`` makes them.
        elsewhere: Python packages outside the tiers, each with its ``place``.
        system: the base's packages: ``type`` (deb, apk), ``distro``, ``name``, ``version``, ``arch``.
        interpreters: place -> version.
        unread: package databases that are there and cannot be read.
    """

    image: WantedImage | None = None
    tiers: dict[str, dict[str, Any]] = field(default_factory=dict)
    elsewhere: list[dict[str, Any]] = field(default_factory=list)
    system: list[dict[str, str]] = field(default_factory=list)
    interpreters: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def read_packages(subject: Path, how: Walk | None = None) -> Contents:
    """Read an image archive, a layout, a portable archive or a folder once.

    Raises:
        OciBuilderError: as ``walk``. FormatError: ``json.*`` for an inventory that is none.
    """
    how = how or Walk()
    files = _Files()
    image = walk(subject, files.visit, how)
    if files.unresolved:
        # Equal files may be links to one that is called otherwise: once more, with those in view.
        files = _Files(frozenset(files.unresolved))
        image = walk(subject, files.visit, replace(how, seen=set()))
    kept = files.final()
    out = Contents(image)
    inventories = _inventories(kept)
    for (place, _), info in sorted(_infos(kept).items()):
        package = _package(info)
        if package is None:
            continue
        tier = _TIER.match(place + "/")
        if tier is not None:
            out.tiers.setdefault(tier["tier"], {"tier": tier["tier"], "packages": [], "omitted": {}})
            out.tiers[tier["tier"]]["packages"].append(package)
        else:
            out.elsewhere.append({**package, "place": place})
    for name, recorded in inventories.items():
        made = out.tiers.setdefault(name, {"tier": name, "packages": [], "omitted": {}})
        out.tiers[name] = _with_record(made, recorded)
    out.system, out.unread = system_packages(kept)
    out.interpreters = dict(_interpreters(kept))
    return out


class _Files:
    """The files that say what packages there are, as the layers leave them (image-spec layer.md, whiteouts)."""

    def __init__(self, more: frozenset[bytes] = frozenset()) -> None:
        self.unresolved: set[bytes] = set()
        self._more = more
        self._below: dict[bytes, bytes] = {}
        self._layer: dict[bytes, bytes] = {}
        self._gone: list[bytes] = []
        self._where = ""

    def visit(self, entry: TarEntry, data: Data, where: str) -> None:
        if where != self._where:
            self._merge()
            self._where = where
        folder, _, name = entry.name.rpartition(b"/")
        if name.startswith(b".wh."):
            hidden = folder if name == b".wh..wh..opq" else b"/".join(p for p in (folder, name[4:]) if p)
            self._gone.append(hidden)
        elif entry.kind is Kind.FILE and (entry.name in self._more or _wanted(entry.name)):
            self._layer[entry.name] = self._read(entry, data)
        elif entry.kind is Kind.HARDLINK and _wanted(entry.name):
            self._link(entry)
        elif entry.kind is not Kind.DIR and entry.name in self._below:
            self._gone.append(entry.name)

    def _link(self, entry: TarEntry) -> None:
        target = self._layer.get(entry.link, self._below.get(entry.link))
        if target is None:
            self.unresolved.add(entry.link)
        else:
            self._layer[entry.name] = target

    def _read(self, entry: TarEntry, data: Data) -> bytes:
        if entry.size > _MOST or len(self._layer) + len(self._below) >= _COUNT:
            raise PolicyError(
                "limit.document", f"{show(entry.name)}: {entry.size} bytes, or too many such files", where=self._where
            )
        return b"".join(bytes(chunk) for chunk in data())

    def _merge(self) -> None:
        gone = set(self._gone)
        if gone:
            self._below = {p: d for p, d in self._below.items() if not any(a in gone for a in _ancestors(p))}
        self._below |= self._layer
        self._layer, self._gone = {}, []

    def final(self) -> dict[bytes, bytes]:
        self._merge()
        return self._below


def _ancestors(path: bytes) -> Iterator[bytes]:
    while path:
        yield path
        path = path.rpartition(b"/")[0]
    yield b""


def _wanted(path: bytes) -> bool:
    return any(p.fullmatch(path) for p in (_INFO, _INVENTORY, _PYTHON)) or wants_system(path)


def _infos(files: Mapping[bytes, bytes]) -> dict[tuple[str, str], dict[str, bytes]]:
    """(site-packages folder, dist-info folder) -> its files by name."""
    out: dict[tuple[str, str], dict[str, bytes]] = {}
    for path, data in files.items():
        match = _INFO.fullmatch(path)
        if match:
            key = (match["place"].decode("utf-8", "replace"), match["info"].decode("utf-8", "replace"))
            out.setdefault(key, {})[path.rpartition(b"/")[2].decode()] = data
    return out


def _package(info: Mapping[str, bytes]) -> dict[str, Any] | None:
    """One distribution as an inventory has it; None without a name or version."""
    text = (info.get("METADATA") or info.get("PKG-INFO") or b"").decode("utf-8", "replace")
    headers = HeaderParser().parsestr(text)
    if not headers["Name"] or not headers["Version"]:
        return None
    record = info.get("RECORD")
    return {
        "name": normalize(str(headers["Name"])), "version": str(headers["Version"]).strip(),
        "licence": licence(headers), "source": _source(info.get("direct_url.json", b"")),
        "record": hashlib.sha256(record).hexdigest() if record is not None else "",
    }  # fmt: skip


def _source(direct_url: bytes) -> str:
    """Where a package came from when not from an index (PEP 610), without credentials."""
    try:
        value = json.loads(direct_url)
        url, commit = str(value.get("url", "")), str((value.get("vcs_info") or {}).get("commit_id", ""))
    except (ValueError, AttributeError):
        return "index"
    if url.startswith("file:"):
        return "local"
    return f"git+{redact_url(url)}@{commit}" if commit else redact_url(url) or "index"


def _inventories(files: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """The inventories that lie beside ``envs``."""
    out: dict[str, dict[str, Any]] = {}
    prefixes = {m["prefix"] for p in files if (m := _TIER.match(p.decode("utf-8", "replace")))}
    for path, data in files.items():
        match = _INVENTORY.fullmatch(path)
        if match is None or match["prefix"].decode("utf-8", "replace") not in prefixes:
            continue
        where = show(path)
        value = load_json(data, where)
        if not isinstance(value, dict) or not isinstance(value.get("packages"), list):
            raise FormatError("json.type", f"{where} is no inventory: it has no list of packages", where=where)
        out[match["tier"].decode()] = value
    return out


def _with_record(found: dict[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The tier's own packages with what its inventory adds; what that has too many, or lacks, is said."""
    listed = {(str(p.get("name")), str(p.get("version"))): p for p in recorded["packages"] if isinstance(p, dict)}
    packages = [{**_added(listed.get(_key(p), {})), **_firm(p)} for p in found["packages"]]
    have = {_key(p) for p in packages}
    omitted = recorded.get("omitted")
    return {
        "tier": found["tier"], "packages": packages,
        "omitted": {str(n): str(r) for n, r in sorted(omitted.items())} if isinstance(omitted, dict) else {},
        "absent": sorted(f"{n} {v}" for n, v in listed if (n, v) not in have),
        "unlisted": sorted(f"{n} {v}" for n, v in have - listed.keys()),
    }  # fmt: skip


def _added(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What an inventory may add to a package, as far as it has the form that ours have."""
    out: dict[str, Any] = {"source": "index"}
    for key, form in (("hashes", _SHA256), ("licence_files", _TEXT)):
        values = entry.get(key)
        if isinstance(values, list) and all(isinstance(v, str) and form.fullmatch(v) for v in values):
            out[key] = values
    if isinstance(entry.get("source"), str):
        out["source"] = redact_url(entry["source"])
    fixes = entry.get("fixes")
    if isinstance(fixes, list) and all(_is_fix(fix) for fix in fixes):
        out["fixes"] = fixes
    return out


def _is_fix(fix: object) -> bool:
    forms = {"path": _TEXT, "sha256": _SHA256, "patched": _SHA256, "why": _TEXT}
    return (
        isinstance(fix, dict)
        and fix.keys() == forms.keys()
        and all(isinstance(fix[key], str) and form.fullmatch(fix[key]) for key, form in forms.items())
    )


def _key(package: Mapping[str, Any]) -> tuple[Any, Any]:
    return package["name"], package["version"]


def _firm(package: Mapping[str, Any]) -> dict[str, Any]:
    """What the files themselves say; that a package is from an index is only the lack of another word."""
    return {k: v for k, v in package.items() if not (k == "source" and v in ("index", "local"))}


def _interpreters(files: Mapping[bytes, bytes]) -> Iterator[tuple[str, str]]:
    """(place, version): exact where the headers are there, else as the library's folder is called."""
    for path, data in sorted(files.items(), key=lambda item: item[0].endswith(b".h")):
        match, version = _PYTHON.fullmatch(path), _VERSION.search(data)
        # A virtual environment may have an include folder, and has no library of its own.
        if match:
            exact = version[1] if version else match["minor"]
            yield match["place"].decode("utf-8", "replace").rstrip("/") or "/", exact.decode("ascii", "replace")


def inventory_bytes(inventory: Mapping[str, Any]) -> bytes:
    """An inventory as a file of a release folder."""
    return json.dumps(hide(inventory), indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


__all__ = ["Contents", "inventory_bytes", "read_packages"]
