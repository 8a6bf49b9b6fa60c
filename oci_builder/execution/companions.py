"""What a build left beside an archive: its records, and the portable archive. Believed only as far as digests agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.execution.hashes import file_sha256, read_record
from oci_builder.model.errors import OciBuilderError
from oci_builder.model.events import Emit, silent
from oci_builder.model.receipts import PORTABLE
from oci_builder.model.report import Report


@dataclass(frozen=True, slots=True)
class Portable:
    """The portable archive beside an image archive.

    Attributes:
        sha256: hex; empty when it may not be named together with the image.
        reason: why not; empty when there is none, or it is named.
    """

    sha256: str = ""
    reason: str = ""


def container_record(archive: Path, sha256: str) -> Mapping[str, Any]:
    """``container.json`` beside an archive, when it is the record of this very file; else empty.

    Args:
        sha256: of the archive, hex.
    """
    record = read_record(archive.parent / "container.json")
    archives = record.get("archives")
    known = archives.values() if isinstance(archives, dict) else ()
    return record if sha256 and any(isinstance(a, dict) and a.get("sha256") == sha256 for a in known) else {}


def unpacked_size(record: Mapping[str, Any]) -> int:
    """Bytes of all layers' tars by a container record; 0 where it does not say."""
    size = record.get("size")
    found = size.get("uncompressed") if isinstance(size, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


def layer_facts(report: Report) -> tuple[list[str], int]:
    """(diff_ids, bytes of all tars) of the first verified archive."""
    layers: Any = report.subjects[0].get("layers") if report.subjects else ()
    rows = [layer for layer in layers or () if isinstance(layer, dict)]
    return [str(row.get("diff_id", "")) for row in rows], sum(int(row.get("tar_size") or 0) for row in rows)


def portable_beside(archive: Path, diff_ids: Sequence[str], cache: Path, emit: Emit = silent) -> Portable:
    """The portable archive in the archive's folder, if it belongs to the same build.

    It does when its bytes are those of ``portable.json`` and the layers that it says it holds are the image's last
    ones. Its SHA-256 is remembered in ``cache``, as that of a staged archive.

    Args:
        diff_ids: of the verified image, in order.
    """
    path = archive.parent / PORTABLE
    if not path.is_file():
        return Portable()
    record = read_record(archive.parent / "portable.json")
    held = record.get("diff_ids")
    if not isinstance(held, list) or not held or list(diff_ids)[-len(held) :] != held:
        return Portable(reason=f"{PORTABLE} is not named: portable.json does not give this image's layers")
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        sha256 = file_sha256(path, cache, emit)
    except (OciBuilderError, OSError) as error:
        return Portable(reason=f"{PORTABLE} is not named: {error}")
    if record.get("sha256") != sha256:
        return Portable(reason=f"{PORTABLE} is not named: its bytes are not those of portable.json")
    return Portable(sha256)
