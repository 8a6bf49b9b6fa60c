"""The licence texts of everything that a runtime ships, gathered once by content, with an index of who needs which.

A package that brings no text is listed as such: somebody has to decide about it, and cannot about what is not said.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import os
import posixpath
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import Any

from oci_builder.model.errors import disk_error, show
from oci_builder.model.jsontext import dump_json
from oci_builder.payload.inventory import licence
from oci_builder.payload.names import normalize

FOLDER = "licences"
MOST_BYTES = 4 << 20  # of one text; the longest met is 0.6 MB
MOST_FILES = 1000  # of one package
_NAME = re.compile(
    r"(?:(?:un)?licen[cs]es?|copying|copyright|notices?|eula|patents)(?![a-z])"
    r"|.*third[-_ ]?party.*(?:licen[cs]e|notice)",
    re.IGNORECASE,
)
_CODE = re.compile(
    r".*\.(?:py[cdiox]?|so|dll|exe|c|cc|cpp|cuh?|h|hpp|js|mjs|map|ts|css|json|ya?ml|toml|po|mo|gz)\Z", re.I
)
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_METADATA = {".dist-info": "METADATA", ".egg-info": "PKG-INFO"}
# PEP 639: whatever a package keeps there is about its licence; AUTHORS, for one.
_OWN_FOLDER = "licenses/"


@dataclass(slots=True)
class _Package:
    """A distribution as it lies in one or more environments.

    Attributes:
        texts: path below site-packages -> key of the text.
        left_out: path below site-packages -> why its text is not here.
    """

    name: str
    version: str
    licence: str
    texts: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    tiers: list[str] = field(default_factory=list)

    def key(self) -> tuple[Any, ...]:
        return (
            self.name,
            self.version,
            self.licence,
            (*sorted(self.texts.items()),),
            (*sorted(self.left_out.items()),),
        )


def collect_licences(envs: Mapping[str, Path], extra: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """All texts and the two lists of them; the same bytes for the same environments.

    Args:
        envs: tier -> its environment.
        extra: what is no Python package -> its text, empty when it brings none: Python itself, CUDA.

    Returns:
        Path below the prefix -> content: ``licences/texts/<start of the SHA-256>.txt``, ``licences/index.json`` and
        ``licences/THIRD-PARTY.md``.

    Raises:
        TransportError: ``io.*``.
    """
    texts: dict[str, bytes] = {}
    found: dict[tuple[Any, ...], _Package] = {}
    try:
        for tier, env in sorted(envs.items()):
            for package in _packages(env, texts):
                found.setdefault(package.key(), package).tiers.append(tier)
    except OSError as error:
        raise disk_error(error, "collecting licences") from None
    packages = [found[key] for key in sorted(found)]
    others = {name: _keep(data, texts) if data else "" for name, data in sorted((extra or {}).items())}
    index = {
        "format": 1,
        "packages": [_entry(package) for package in packages],
        "others": [{"name": name, "text": _place(key) if key else None} for name, key in others.items()],
        "without_text": [f"{p.name} {p.version}" for p in packages if not p.texts]
        + [n for n, k in others.items() if not k],
    }
    out = {f"{FOLDER}/{_place(key)}": data for key, data in sorted(texts.items())}
    out[f"{FOLDER}/index.json"] = dump_json(index) + b"\n"
    out[f"{FOLDER}/THIRD-PARTY.md"] = _page(packages, others).encode()
    return out


def python_texts(python: Path) -> dict[str, bytes]:
    """What a staged Python brings, for ``collect_licences``: its own licence, and its libraries'.

    Raises:
        TransportError: ``io.*``.
    """
    try:
        own = sorted(python.glob("lib/python3*/LICENSE.txt"))
        texts = {"Python": own[0].read_bytes() if own else b""}
        for place in sorted(python.glob("share/licences/*.txt")):
            texts[f"Python's library {place.stem}"] = place.read_bytes()
        for place in sorted(python.glob("share/licences/common/*.txt")):
            texts[f"{place.stem}, as Python's libraries name it"] = place.read_bytes()
    except OSError as error:
        raise disk_error(error, "collecting licences") from None
    return texts


def _packages(env: Path, texts: dict[str, bytes]) -> Iterator[_Package]:
    for suffix, metadata in _METADATA.items():
        for info in sorted(env.glob(f"lib/python*/site-packages/*{suffix}")):
            headers = BytesHeaderParser().parsebytes(_read(info.parent, f"{info.name}/{metadata}")[0])
            named, _, version = info.name.removesuffix(suffix).partition("-")
            package = _Package(
                normalize(str(headers["Name"] or named)), str(headers["Version"] or version), licence(headers)
            )
            declared = {str(name) for name in headers.get_all("License-File", [])}
            for path in _candidates(info, declared):
                if len(package.texts) + len(package.left_out) == MOST_FILES:
                    package.left_out["..."] = f"more than {MOST_FILES} files"
                    break
                data, wrong = _read(info.parent, path)
                if wrong:
                    package.left_out[path] = wrong
                elif data.strip():
                    package.texts[path] = _keep(data, texts)
            yield package


def _candidates(info: Path, declared: set[str]) -> list[str]:
    """Paths below site-packages of what looks like a licence among a distribution's files, sorted."""
    listed = {f"{info.name}/{name}" for name in _below(info)} | set(_recorded(info))
    out = set()
    for path in listed:
        inner = path.removeprefix(f"{info.name}/") if path.startswith(f"{info.name}/") else ""
        own = inner in declared or inner.startswith(_OWN_FOLDER)
        base = posixpath.basename(path)
        if own or (_NAME.match(base) and not _CODE.match(base)):
            out.add(path)
    return sorted(out)


def _below(info: Path) -> Iterator[str]:
    for parent, _, names in os.walk(info):
        for name in names:
            yield Path(parent, name).relative_to(info).as_posix()


def _recorded(info: Path) -> Iterator[str]:
    """The paths of a RECORD that stay in site-packages; whatever else it says is nobody's licence."""
    data, _ = _read(info.parent, f"{info.name}/RECORD", most=64 << 20)
    for line in data.decode("utf-8", "surrogateescape").splitlines():
        try:
            path = posixpath.normpath(next(csv.reader([line]), [""])[0])
        except csv.Error:
            continue
        if not path.startswith(("/", "..")) and "\0" not in path:
            yield path


def _read(site: Path, path: str, most: int = MOST_BYTES) -> tuple[bytes, str]:
    """A regular file below site-packages, or why it is not read. No link is followed out of it."""
    place = site / path
    if not os.path.realpath(place).startswith(os.path.realpath(site) + "/"):
        return b"", "leads out of the environment"
    try:
        found = os.stat(place)
        if not stat.S_ISREG(found.st_mode):
            return b"", "is no regular file"
        if found.st_size > most:
            return b"", f"has {found.st_size} bytes, more than {most}"
        return place.read_bytes(), ""
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return b"", "is not there"


def _keep(data: bytes, texts: dict[str, bytes]) -> str:
    key = hashlib.sha256(data).hexdigest()[:16]
    texts[key] = data
    return key


def _place(key: str) -> str:
    return f"texts/{key}.txt"


def _entry(package: _Package) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": package.name,
        "version": package.version,
        "tiers": package.tiers,
        "licence": package.licence,
        "texts": [{"path": _text(path), "text": _place(key)} for path, key in sorted(package.texts.items())],
    }
    if package.left_out:
        entry["left_out"] = [{"path": _text(path), "reason": why} for path, why in sorted(package.left_out.items())]
    return entry


def _page(packages: list[_Package], others: Mapping[str, str]) -> str:
    lines = [
        "# Third-party licences", "", "Each package with the licence that its own metadata names and the texts that it",
        "brings. `index.json` is the same for programs.", "", "| package | version | tiers | licence | texts |",
        "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for package in packages:
        cells = (package.name, package.version, ", ".join(package.tiers), package.licence or "not said")
        links = _links(package.texts.values())
        lines.append(f"| {' | '.join(map(_cell, cells))} | {links or '**none**'} |")
    for name, key in others.items():
        lines.append(f"| {_cell(name)} | | | | {_links([key] if key else []) or '**none**'} |")
    bare = [f"{p.name} {p.version}" for p in packages if not p.texts] + [
        name for name, key in others.items() if not key
    ]
    if bare:
        lines += ["", "## Without a text of their own", ""] + [f"- {_cell(name)}" for name in bare]
    return "\n".join(lines) + "\n"


def _links(keys: Any) -> str:
    return " ".join(f"[{key[:6]}]({_place(key)})" for key in sorted(set(keys)))


def _cell(value: str) -> str:
    """Text of somebody's metadata, harmless in a table."""
    return re.sub(r"([\\`*_{}\[\]<>()#|!])", r"\\\1", _text(value))


def _text(value: str) -> str:
    return value if value.isprintable() else show(value)
