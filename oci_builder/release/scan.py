"""What must not leave: credentials and model weights in archives and records, looked for before anything is sent."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.errors import IntegrityError, OciBuilderError, PolicyError, SpecError, disk_error, show
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.model.redact import names_secret, redact, secret_values
from oci_builder.model.report import Finding
from oci_builder.release.files import read_file
from oci_builder.release.inside import is_tar, peeked
from oci_builder.release.secrets import ScanOptions
from oci_builder.release.sweep import Scan, Sweep
from oci_builder.release.walk import Walk, hashing, is_image, members, walk
from oci_builder.wire.compress import Compression, Options, decode_chunks, sniff
from oci_builder.wire.tar import Kind, TarEntry

# A blob of a layout; layers of podman's and skopeo's docker archives are called by their diff_id.
_BLOB = re.compile(rb"(blobs/sha256/)?([0-9a-f]{64})(?:\.tar)?\Z")
# Shorter passwords are words that stand in any file.
_SHORTEST_OWN = 12
_SHORTEST_NAMED = 6
# Found in every CPython that is shipped whole, and in tiers that have these packages.
PUBLISHED = {
    r"(?:.*/)?lib(?:64)?/python3\.\d+/test/.*": "keys of CPython's own test suite, published with its source",
    r"(?:.*/)?site-packages/Crypto(?:dome)?/SelfTest/.*": "keys of PyCryptodome's own test suite, published with it",
}
PUBLISHED_SECRETS = {
    "5de261506c0ff857b7c1af7059f842fb0a36d1ca2e4895da542c5eb726f2c802": "Hugging Face's user of a test server, in"
    " transformers.testing_utils",
}


def scan_archives(archives: Sequence[Path], options: ScanOptions, how: Walk | None = None) -> Scan:
    """Scan all that archives hold: every layer of every image for every platform, documents, and what nothing names.

    A layer that stands in two archives is read once. What an archive says of itself is not needed, and not believed: a
    blob is its bytes.

    Args:
        archives: image archives, layouts, portable archives, or folders.

    Raises:
        SpecError: ``spec.path``. FormatError, PolicyError: an archive or layer that cannot be read.
        IntegrityError: ``blob.digest``: a blob that is not what it is called. TransportError: ``io.*``.
    """
    how = how or Walk()
    sweep = Sweep(_with_own(options))
    for archive in archives:
        try:
            if not archive.is_dir() and not archive.is_file():
                shown = show(str(archive))
                raise SpecError("spec.path", f"{shown} is neither an archive nor a folder", where=str(archive))
            image = is_image(archive, how)
            if archive.is_dir() and not image:
                walk(archive, lambda entry, data, where: sweep.entry(entry, data(), where), how)
                continue
            for entry, chunks, extended in members(archive, how):
                if image:
                    sweep.text((archive.name, b""), b"\n".join((entry.name, entry.link, extended)))
                    _member(sweep, archive.name, entry, chunks, how)
                else:
                    sweep.entry(entry, chunks, archive.name, extended)
        except OSError as error:
            raise disk_error(error, f"reading {archive.name}") from None
        finally:
            sweep.finish(archive.name)
    return sweep.found


def _member(
    sweep: Sweep, archive: str, entry: TarEntry, chunks: Iterable[bytes | memoryview], how: Walk
) -> None:  # fmt: skip
    """A document, a layer, or something else: told by its bytes."""
    if entry.kind is not Kind.FILE:
        return
    head, stream = peeked(chunks)
    name = entry.name.decode("utf-8", "replace")
    if entry.size <= DEFAULT_LIMITS.document and head[:64].lstrip()[:1] in (b"{", b"["):
        document = b"".join(stream)
        _document(sweep, archive, name, document)
        return
    named = _BLOB.match(entry.name)
    claimed = Digest.from_hex(named[2].decode()) if named else None
    known = claimed in how.seen
    blob = hashlib.sha256()
    read = hashing(stream, blob)
    if not known:
        _layer(sweep, f"{archive}: {name}", entry, read, sniff(head), how)
    for _ in read:
        pass
    actual = Digest.from_hex(blob.hexdigest())
    if named and actual != claimed and (known or named[1]):
        raise IntegrityError(
            "blob.digest", f"{archive}: {name}: the bytes hash to {actual}", where=archive, expected=claimed,
            actual=actual,
        )  # fmt: skip
    how.seen.add(actual)


def _layer(
    sweep: Sweep, where: str, entry: TarEntry, blob: Iterator[bytes | memoryview], compression: Compression, how: Walk
) -> None:  # fmt: skip
    """A member as a layer; as a file, when it is none."""
    tar = hashlib.sha256()
    head, plain = peeked(hashing(decode_chunks(blob, compression, Options(how.limits, where, how.threads)), tar))
    if is_tar(head):
        sweep.tar(plain, where, how.limits)
    else:
        sweep.file((where, b""), entry.size, plain)
    for _ in plain:
        pass
    how.seen.add(Digest.from_hex(tar.hexdigest()))


def _document(sweep: Sweep, archive: str, name: str, document: bytes) -> None:
    """Settings are judged by their names too; what has none of those is searched as any text."""
    try:
        value = load_json(document, name)
    except OciBuilderError:
        value = None  # whether it has to be JSON is for verify to say
    what = _what(value)
    named = list(_settings(value, f"{archive}: {what}", what, sweep.options)) if what else []
    for finding in named:
        if finding not in sweep.found.findings:  # podman's docker archives hold a config twice
            sweep.add(finding)
    if not named:
        sweep.file((archive, (what or name).encode()), len(document), [document])


def _what(value: Any) -> str:
    """What a document of an image is, for people; empty for any other JSON (bills, attestations)."""
    if isinstance(value, list):
        return "manifest.json" if any(isinstance(v, dict) and "Layers" in v for v in value) else ""
    if not isinstance(value, dict):
        return ""
    kinds = (("manifests", "index"), ("layers", "manifest"), ("rootfs", "image config"), ("config", "image config"))
    return next((what for key, what in kinds if key in value), "")


def _with_own(options: ScanOptions) -> ScanOptions:
    """The options, with what this machine's environment keeps secret: a build may have written it anywhere."""
    own = tuple(os.fsencode(value) for value in secret_values(os.environ) if len(value) >= _SHORTEST_OWN)
    return replace(options, own=own)


def _settings(document: Any, place: str, what: str, options: ScanOptions) -> Iterator[Finding]:
    """Variables, labels, annotations, commands and history that are credentials by name or form, whatever their shape.

    Text in files is not judged so: documentation is full of passwords of nobody. Settings are few, and all are meant.
    """
    for text in _strings(document):
        secret = text.encode()
        shown = redact(text, [os.fsdecode(value) for value in options.own])
        if (shown == text and not _assigns(text)) or options.lets(what.encode(), secret):
            continue
        name = text.partition("=")[0] if text.partition("=")[0].isidentifier() else "a setting"
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


def scan_file(
    path: bytes, size: int, chunks: Iterable[bytes | memoryview], where: str = "", options: ScanOptions | None = None
) -> list[Finding]:
    """Findings of one file: ``policy.weights`` and ``policy.secret``; reads all of ``chunks``.

    Args:
        path: its path in the image.
        size: bytes.
        chunks: its content.
        where: archive and layer, for people.
        options: limits and what is let through.
    """
    sweep = Sweep(options or ScanOptions())
    sweep.file((where, path), size, chunks)
    sweep.finish(where)
    return sweep.found.findings


def scan_files(files: Iterable[Path], options: ScanOptions) -> Scan:
    """Scan small files, such as records, by the same rules; their names too.

    Raises:
        TransportError: ``io.*``.
    """
    sweep = Sweep(_with_own(options))
    for path in files:
        data = read_file(path, 64 * DEFAULT_LIMITS.document)
        sweep.entry(TarEntry(os.fsencode(path.name), Kind.FILE, len(data)), [data], "")
    sweep.finish()
    return sweep.found


def read_allowed(path: Path | None) -> ScanOptions:
    """The options of a file: ``{"secrets": {SHA256: REASON}, "paths": {PATTERN: REASON}, "weights_size": BYTES}``.

    What is published with CPython's, PyCryptodome's and Transformers' sources is always allowed.

    Raises:
        SpecError: ``spec.allow``.
    """
    if path is None:
        return ScanOptions(allow=PUBLISHED_SECRETS, allow_paths=PUBLISHED)
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
        return ScanOptions(size, PUBLISHED_SECRETS | secrets, PUBLISHED | paths).checked()
    except ValueError as error:
        raise _refused(path, str(error)) from None


def _reasons(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) and v.strip() for v in value.values()):
        raise _refused(path, "each thing that is let through needs a reason in words")
    return value


def _refused(path: Path, why: str) -> SpecError:
    return SpecError("spec.allow", f"{show(str(path))}: {why}", where=str(path))
