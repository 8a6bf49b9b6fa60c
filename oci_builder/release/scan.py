"""What must not leave: credentials and model weights in archives and records, looked for before anything is sent."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oci_builder.model.errors import OciBuilderError, PolicyError, SpecError, show
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.model.redact import names_secret, redact, secret_values
from oci_builder.model.report import Finding
from oci_builder.release.files import read_file
from oci_builder.release.secrets import ScanOptions, names_weights, scan_file, weights_finding
from oci_builder.release.walk import Data, Walk, walk
from oci_builder.wire.tar import Kind, TarEntry

_SHOWN = 10
# Shorter passwords are words that stand in any file.
_SHORTEST_OWN = 12
_SHORTEST_NAMED = 6
# Never uploaded as they are, but found in every CPython that is shipped whole.
PUBLISHED = {
    r"(?:.*/)?lib(?:64)?/python3\.\d+/test/.*": "keys of CPython's own test suite, published with its source",
}


@dataclass(slots=True)
class Scan:
    """What was looked at and what was found."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    size: int = 0

    def to_json(self) -> dict[str, Any]:
        """For a receipt's check."""
        return {"files": self.files, "bytes": self.size, "findings": [f.to_json() for f in self.findings]}

    def require(self) -> None:
        """Refuse whatever was found.

        Raises:
            PolicyError: ``policy.secret`` or ``policy.weights``, naming the places, never the secrets.
        """
        if not self.findings:
            return
        lines = [f"{f.message} ({f.actual})" if f.actual else f.message for f in self.findings[:_SHOWN]]
        more = f"; and {len(self.findings) - _SHOWN} more" if len(self.findings) > _SHOWN else ""
        first = self.findings[0]
        raise PolicyError(
            first.code,
            f"{'; '.join(lines)}{more}. Remove them and build again, or allow what is public with --allow",
            where=first.where, actual=len(self.findings),
        )  # fmt: skip


def scan_archives(archives: Sequence[Path], options: ScanOptions, how: Walk | None = None) -> Scan:
    """Scan every layer of every archive, and the images' configs. A layer that stands in two archives is read once.

    Args:
        archives: image archives, layouts, portable archives, or folders.

    Raises:
        OciBuilderError: as ``walk``.
    """
    how = how or Walk()
    found, options = Scan(), _with_own(options)
    links = _Links(options)

    def visit(entry: TarEntry, data: Data, where: str) -> None:
        links.note(entry, where)
        if entry.kind is not Kind.FILE:
            return
        found.files += 1
        found.size += entry.size
        found.findings += scan_file(entry.name, entry.size, data(), where, options)

    for archive in archives:
        image = walk(archive, visit, how)
        found.findings += links.findings()
        for name, document in [("image config", image.config), ("manifest", image.data)] if image else []:
            named = list(_settings(document, archive.name, name, options)) if document else []
            found.findings += named or scan_file(name.encode(), len(document), [document], archive.name, options)
    return found


@dataclass(slots=True)
class _Links:
    """Links that are called as weights are, and the sizes of what they may mean: a model cache links names to blobs,
    and equal files of a tree are stored once, under the name that comes first.
    """

    options: ScanOptions
    _large: dict[bytes, int] = field(default_factory=dict)
    _named: list[tuple[bytes, bytes, str]] = field(default_factory=list)

    def note(self, entry: TarEntry, where: str) -> None:
        """Take an entry."""
        if entry.kind is Kind.FILE and entry.size >= self.options.weights_size:
            self._large[entry.name] = entry.size
        elif entry.kind in (Kind.HARDLINK, Kind.SYMLINK) and names_weights(entry.name):
            target = entry.link
            if entry.kind is Kind.SYMLINK:
                target = os.path.normpath(os.path.join(b"/", os.path.dirname(entry.name), target)).lstrip(b"/")
            self._named.append((entry.name, target, where))

    def findings(self) -> Iterator[Finding]:
        """Of all that was taken; begins anew."""
        for path, target, where in self._named:
            size = self._large.get(target, 0)
            # What the file's own name or content tells is said once, there.
            found = None if names_weights(target) else weights_finding(path, size, b"", where, self.options)
            if found is not None and not self.options.lets(target):
                yield found
        self._named, self._large = [], {}


def _with_own(options: ScanOptions) -> ScanOptions:
    """The options, with what this machine's environment keeps secret: a build may have written it anywhere."""
    own = tuple(os.fsencode(value) for value in secret_values(os.environ) if len(value) >= _SHORTEST_OWN)
    return replace(options, own=own)


def _settings(document: bytes, where: str, what: str, options: ScanOptions) -> Iterator[Finding]:
    """Variables, labels, annotations, commands and history that are credentials by name or form, whatever their shape.

    Text in files is not judged so: documentation is full of passwords of nobody. Settings are few, and all are meant.
    """
    for text in _strings(load_json(document, f"{where}: {what}")):
        secret = text.encode()
        shown = redact(text, [os.fsdecode(value) for value in options.own])
        if (shown == text and not _assigns(text)) or options.lets(what.encode(), secret):
            continue
        name = text.partition("=")[0] if text.partition("=")[0].isidentifier() else "a setting"
        place = f"{where}: {what}"
        yield Finding(
            "policy.secret", "error", place, "", f"sha256 {hashlib.sha256(secret).hexdigest()}",
            f"{name} looks like a credential in {place}", PolicyError.exit_status,
        )  # fmt: skip


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            # A pair is judged as an assignment, the way a variable is written.
            yield from [f"{key}={item}"] if isinstance(item, str) else _strings(item)
    elif isinstance(value, list):
        for item, following in zip(value, [*value[1:], None], strict=True):
            yield from _strings(item)
            if isinstance(item, str) and isinstance(following, str) and item.startswith("--"):
                yield f"{item[2:].replace('-', '_')}={following}"


def _assigns(text: str) -> bool:
    """``DB_PASS=…`` and the like: by its name, as for this machine's environment."""
    name, equals, value = text.partition("=")
    return bool(equals) and name.isidentifier() and names_secret(name) and len(value) >= _SHORTEST_NAMED


def scan_files(files: Iterable[Path], options: ScanOptions) -> Scan:
    """Scan small files, such as records, by the same rules.

    Raises:
        TransportError: ``io.*``.
    """
    found, options = Scan(), _with_own(options)
    for path in files:
        data = read_file(path, 64 * DEFAULT_LIMITS.document)
        found.files += 1
        found.size += len(data)
        found.findings += scan_file(path.name.encode(), len(data), [data], "", options)
    return found


def read_allowed(path: Path | None) -> ScanOptions:
    """The options of a file: ``{"secrets": {SHA256: REASON}, "paths": {PATTERN: REASON}, "weights_size": BYTES}``.

    What is published with CPython's source is always allowed.

    Raises:
        SpecError: ``spec.allow``.
    """
    if path is None:
        return ScanOptions(allow_paths=PUBLISHED)
    try:
        value = load_json(read_file(path, DEFAULT_LIMITS.document), str(path))
    except OciBuilderError as error:
        raise _refused(path, error.message) from None
    if not isinstance(value, dict) or set(value) - {"secrets", "paths", "weights_size"}:
        raise _refused(path, "an object with the keys secrets, paths, weights_size is wanted")
    secrets, paths = (_reasons(path, value.get(key, {})) for key in ("secrets", "paths"))
    size = value.get("weights_size", ScanOptions().weights_size)
    if type(size) is not int or size <= 0:
        raise _refused(path, f"weights_size is {json.dumps(size)[:40]}, wanted a number of bytes")
    try:
        return ScanOptions(size, secrets, {**PUBLISHED, **paths}).checked()
    except ValueError as error:
        raise _refused(path, str(error)) from None


def _reasons(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) and v.strip() for v in value.values()):
        raise _refused(path, "each thing that is let through needs a reason in words")
    return value


def _refused(path: Path, why: str) -> SpecError:
    return SpecError("spec.allow", f"{show(str(path))}: {why}", where=str(path))
