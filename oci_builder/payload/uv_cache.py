"""What uv's cache says beyond uv's own answers: which file an installed distribution is, and what was built how.

The layout is that of the pinned uv: ``archive-v0/<id>/`` holds unpacked wheels, of which environments are hard links;
``wheels-v6`` and ``sdists-v9`` hold a link to such a folder and, beside it, what is known of the file. uv's key for a
wheel that it builds is the source alone, so that one built under other variables would be taken for it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oci_builder.model.jsontext import dump_json
from oci_builder.payload.names import normalize
from oci_builder.payload.partial import beside
from oci_builder.store.removal import remove_folder

_SHA256 = re.compile(rb"Sha256\xd9@([0-9a-f]{64})")
# In MessagePack a string of 32 to 255 bytes has its length before it, a byte that may look like a letter.
_WHEEL = re.compile(rb"(?:\xd9.)?([A-Za-z0-9_.+!-]+\.whl)", re.DOTALL)
_POINTERS = (".http", ".rev")
_MARKS = "oci-builder-built.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an installed distribution came from.

    Attributes:
        file: name of the wheel.
        sha256: of the wheel, or of the archive of sources that it was built from; empty where uv knows none (git).
        built: uv built the wheel from sources.
        index: uv's name of the index: ``pypi``, ``index`` for another one, empty for none.
    """

    file: str
    sha256: str
    built: bool
    index: str


def origins(env: Path, cache: Path) -> dict[str, Origin]:
    """Package -> origin, of the distributions of an environment that are hard links of uv's cache.

    Raises:
        OSError: the disk.
    """
    known = {**dict(_built(cache)), **dict(_wheels(cache))}
    return {name: known[place.name] for name, place in unpacked(env, cache).items() if place.name in known}


def unpacked(env: Path, cache: Path) -> dict[str, Path]:
    """Package -> the folder of uv's cache with its unpacked wheel, of those that are hard links of it.

    Raises:
        OSError: the disk.
    """
    archives = {
        (found.st_dev, found.st_ino): path.parents[1]
        for path in cache.glob("archive-v*/*/*.dist-info/METADATA")
        if (found := path.stat())
    }
    out = {}
    for path in env.glob("lib/python*/site-packages/*.dist-info/METADATA"):
        found = path.stat()
        archive = archives.get((found.st_dev, found.st_ino))
        if archive is not None:
            out[normalize(path.parent.name.split("-")[0])] = archive
    return out


def _wheels(cache: Path) -> Iterator[tuple[str, Origin]]:
    for bucket in sorted(cache.glob("wheels-v*/*")):
        index = bucket.name if bucket.name in ("pypi", "index") else ""
        for link in _links(bucket):
            data = _pointer(link.parent, link.name)
            name, sha = _WHEEL.search(data), _SHA256.search(data)
            if name:
                yield os.path.basename(os.readlink(link)), Origin(name[1].decode(), _text(sha), False, index)


def _built(cache: Path) -> Iterator[tuple[str, Origin]]:
    for bucket in sorted(cache.glob("sdists-v*/*")):
        index = bucket.name if bucket.name in ("pypi", "index") else ""
        for link in _links(bucket):
            sha = _SHA256.search(_pointer(link.parent.parent, "revision"))
            yield os.path.basename(os.readlink(link)), Origin(f"{link.name}.whl", _text(sha), True, index)


def archive_links(cache: Path) -> Iterator[Path]:
    """Every link of uv's cache to an unpacked wheel."""
    for bucket in sorted([*cache.glob("wheels-v*/*"), *cache.glob("sdists-v*/*")]):
        yield from _links(bucket)


def pointer_files(link: Path) -> list[Path]:
    """What is known of the file of a link, beside it."""
    return [path for end in _POINTERS if (path := link.with_name(f"{link.name}{end}")).is_file()]


def _links(bucket: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(bucket):
        folders[:] = [name for name in folders if name != "src"]
        for name in (*folders, *files):
            place = Path(parent, name)
            if place.is_symlink() and "archive-v" in os.readlink(place):
                yield place


def _pointer(folder: Path, stem: str) -> bytes:
    return next((path.read_bytes() for end in _POINTERS if (path := folder / f"{stem}{end}").is_file()), b"")


def _text(match: re.Match[bytes] | None) -> str:
    return match[1].decode() if match else ""


# ---- what was built under which variables


def drop_other_builds(cache: Path, variables: str) -> None:
    """Forget wheels that uv built under other variables than these, or nobody knows which; their sources stay.

    Args:
        variables: stands for what a build depends on besides its source.

    Raises:
        OSError: the disk.
    """
    marks = _marks(cache)
    for wheel in sorted(path for bucket in cache.glob("sdists-v*/*") for path in _built_files(bucket)):
        if marks.get(normalize(wheel.name.split("-")[0])) != variables:
            wheel.unlink(missing_ok=True)
            for beside in (wheel.with_suffix(""), wheel.with_name("metadata.msgpack")):
                remove_folder(beside)


def note_builds(cache: Path, packages: Iterable[str], variables: str) -> None:
    """These packages of the cache were built under these variables.

    Raises:
        OSError: the disk.
    """
    marks = {**_marks(cache), **dict.fromkeys(packages, variables)}
    if marks != _marks(cache):
        fresh = beside(cache / _MARKS)
        fresh.write_bytes(dump_json(marks))
        fresh.replace(cache / _MARKS)


def _marks(cache: Path) -> dict[str, str]:
    try:
        found = json.loads((cache / _MARKS).read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _built_files(bucket: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(bucket):
        folders[:] = [name for name in folders if name != "src"]
        yield from (Path(parent, name) for name in files if name.endswith(".whl"))
