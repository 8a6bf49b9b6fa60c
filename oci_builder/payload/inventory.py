"""What is in an environment: every distribution with version, source, hashes and licence, and what was left out."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from email.message import Message
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import Any

from oci_builder.model.redact import redact, redact_url, secret_values
from oci_builder.payload.names import normalize
from oci_builder.payload.uv_cache import Origin

_STRONG = ("sha256:", "sha384:", "sha512:")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?\s*(==|@)\s*([^\s;\\]+)")
_LOCAL = frozenset({"directory", "editable", "path"})
_PYPI = "https://pypi.org/simple"
_CLASSIFIER = "License :: OSI Approved :: "


def inventory(
    tier: str,
    env: Path,
    omitted: Mapping[str, str],
    listed: Mapping[str, Mapping[str, Any]],
    origins: Mapping[str, Origin] | None = None,
) -> dict[str, Any]:
    """The inventory of a tier as a JSON-able value, the same for the same environment.

    Args:
        tier: its name.
        env: folder of the environment.
        omitted: package left out -> reason.
        listed: what its list or lock says of each package, see ``from_requirements`` and ``from_lock``.
        origins: the file of each package, where it is known (``uv_cache.origins``).
    """
    known = secret_values(os.environ)
    found = sorted(distributions(env), key=lambda item: (item["name"], item["version"]))
    for item in found:
        item.update(listed.get(item["name"], {}))
        origin = (origins or {}).get(item["name"])
        if origin is not None:
            item.update(_of_file(origin, item))
        # It goes into the image, where everybody can read it.
        item["source"] = redact(str(item["source"]), known)
    return {"tier": tier, "packages": found, "omitted": dict(sorted(omitted.items()))}


def _of_file(origin: Origin, item: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says: of the hashes that a list accepts, the one that was installed."""
    accepted = item.get("hashes") or [origin.sha256]
    out: dict[str, Any] = {"file": origin.file}
    if origin.sha256 in accepted and origin.sha256:
        out["hashes"] = [origin.sha256]
    if origin.built:
        out["built"] = True
    if origin.index == "pypi" and "index" not in item and item.get("source") == "index":
        out["index"] = _PYPI
    return out


def from_requirements(requirements: str) -> dict[str, dict[str, Any]]:
    """Package -> its ``sha256`` hashes (uv installed a file with one of these) and its URL, if it has one.

    >>> from_requirements("a==1 \\\\\\n    --hash=sha256:" + "0" * 64)["a"]["hashes"] == ["0" * 64]
    True
    """
    out: dict[str, dict[str, Any]] = {}
    for entry in requirements.replace("\\\n", " ").splitlines():
        match = _PINNED.match(entry)
        if match:
            item = out.setdefault(normalize(match[1]), {"hashes": []})
            item["hashes"] = sorted({*item["hashes"], *_HASH.findall(entry)})
            if match[2] == "@":
                # A folder of the build machine is not named.
                item["source"] = "local" if match[3].startswith(("file:", "/")) else match[3]
    return out


def from_lock(lock: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same from a parsed ``uv.lock``: package -> accepted hashes, and its index, or its source when it has none."""
    out: dict[str, dict[str, Any]] = {}
    for package in lock.get("package", []):
        item = out.setdefault(normalize(package["name"]), {"hashes": []})
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        item["hashes"] = sorted({*item["hashes"], *(f["hash"].removeprefix("sha256:") for f in files if "hash" in f)})
        source = package.get("source", {})
        if "git" in source or "url" in source:
            item["source"] = f"git+{source['git']}" if "git" in source else source["url"]
        elif not _LOCAL.isdisjoint(source):
            item["source"] = "local"
        elif "://" in str(source.get("registry", "")):
            item["index"] = redact_url(str(source["registry"]))
    return out


def unpinned(lock: Mapping[str, Any]) -> list[str]:
    """Packages of a parsed ``uv.lock`` with a file that no SHA-2 hash is known of: whatever comes is installed.

    Folders and repositories are none of them: a commit says what these are.
    """
    out = set()
    for package in lock.get("package", []):
        if not {"registry", "url", "path"}.isdisjoint(package.get("source", {})):
            files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
            if not all(str(file.get("hash", "")).startswith(_STRONG) for file in files):
                out.add(normalize(package["name"]))
    return sorted(out)


def local_sources(lock: Mapping[str, Any]) -> dict[str, str]:
    """Package -> path relative to the project, of what a parsed ``uv.lock`` takes from folders and files.

    The project itself is none of them.
    """
    out = {}
    for package in lock.get("package", []):
        source = package.get("source", {})
        for path in (str(source[kind]) for kind in _LOCAL.intersection(source)):
            if path != ".":
                out[normalize(package["name"])] = path
    return out


def distributions(env: Path) -> Iterator[dict[str, Any]]:
    """Name, version, licence, licence files and a digest of the installed files, of each distribution."""
    for folder in env.glob("lib/python*/site-packages/*.dist-info"):
        try:
            headers = BytesHeaderParser().parsebytes((folder / "METADATA").read_bytes())
        except FileNotFoundError:
            continue
        record = folder / "RECORD"
        yield {
            "name": normalize(str(headers["Name"])),
            "version": str(headers["Version"]),
            "licence": licence(headers),
            "licence_files": sorted(_licence_files(folder, headers)),
            "source": _direct(folder) or "index",
            "record": hashlib.sha256(record.read_bytes()).hexdigest() if record.is_file() else "",
        }


def licence(headers: Message) -> str:
    """The licence as its own metadata says: the SPDX expression, else the classifiers, else one line of free text.

    Source: core metadata 2.4 (PEP 639) and the fields before it.
    """
    if headers.get("License-Expression"):
        return str(headers["License-Expression"]).strip()
    classifiers = [c[len(_CLASSIFIER) :] for c in headers.get_all("Classifier", []) if c.startswith(_CLASSIFIER)]
    if classifiers:
        return " OR ".join(sorted(classifiers))
    lines = str(headers.get("License") or "").strip().splitlines()
    return lines[0][:120] if lines else ""


def _licence_files(folder: Path, headers: Message) -> Iterator[str]:
    named = {str(name) for name in headers.get_all("License-File", [])}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        plain = re.match(r"(licen[cs]e|copying|notice|authors|eula)", path.name, re.IGNORECASE)
        if path.is_file() and (plain or name in named or name.removeprefix("licenses/") in named):
            yield f"{folder.name}/{name}"


def _direct(folder: Path) -> str:
    """Where a package came from when not from an index (PEP 610); a folder of the build machine is not named."""
    try:
        value = json.loads((folder / "direct_url.json").read_bytes())
    except (OSError, ValueError):
        return ""
    url = str(value.get("url", ""))
    if url.startswith("file:"):
        return "local"
    commit = value.get("vcs_info", {}).get("commit_id", "")
    return f"git+{url}@{commit}" if commit else url
