"""SHA-256 of large files, remembered while the file is the same, and the small records that it takes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oci_builder.model.errors import IntegrityError, OciBuilderError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.jsontext import dump_json, load_json
from oci_builder.model.limits import DEFAULT_LIMITS

_BLOCK = 4 << 20


def _identity(info: os.stat_result) -> list[int]:
    return [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


def file_sha256(path: Path, cache: Path, emit: Emit = silent) -> str:
    """SHA-256 (hex) of a file; remembered in ``cache`` by the file's identity, ctime included.

    Raises:
        IntegrityError: ``archive.changed``: it was written to while it was read.
    """
    before = path.stat()
    record = cache / f"sha256-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
    known = read_record(record)
    if known.get("identity") == _identity(before) and isinstance(known.get("sha256"), str):
        return str(known["sha256"])
    task = f"hash {path.name}"
    emit(Event("start", task, total=before.st_size))
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            emit(Event("advance", task, len(block)))
    emit(Event("done", task))
    require_unchanged(path, before)
    write_record(record, {"identity": _identity(before), "sha256": digest.hexdigest()})
    return digest.hexdigest()


def require_unchanged(path: Path, before: os.stat_result) -> None:
    """Raises IntegrityError ``archive.changed`` when the file is not what ``before`` saw."""
    if _identity(path.stat()) != _identity(before):
        raise IntegrityError("archive.changed", f"{show(str(path))} was written to meanwhile", where=str(path))


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object on disk; empty when there is none, or none that can be believed."""
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            value = load_json(file.read(DEFAULT_LIMITS.document + 1), str(path))
    except (OSError, OciBuilderError):
        return {}
    return value if isinstance(value, dict) else {}


def write_record(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    fd, partial = tempfile.mkstemp(dir=path.parent, prefix=".record-")
    with open(fd, "wb") as file:
        file.write(dump_json(value))
        file.flush()
        os.fsync(file.fileno())
    Path(partial).replace(path)
