"""``oci-builder publish``: a finished build onto the Hub, read back by hash, with a delivery receipt."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.errors import SpecError, show
from oci_builder.model.events import Emit, silent
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.model.receipts import Check, Receipt
from oci_builder.release.files import create_exclusively, read_file
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.host import engine_name, new_attempt, stamp, this_host, tool_versions
from oci_builder.release.parts import MAX_FILE, PART_SIZE, Part, checksums, hash_parts, plan_parts
from oci_builder.release.publish import HubTarget, commit_files, readme
from oci_builder.release.receipts import make_statement, receipt_name
from oci_builder.release.signing import SigningKey

_RECORDS = ("portable.json", "container.json", "qualification.json")


@dataclass(frozen=True, slots=True)
class Publication:
    """What is to be published.

    Attributes:
        folder: the release folder (records, receipts, SBOMs); its name is the release id.
        archives: folder with the archives that its records name.
        helper: ``ensure_runtime.sh``; its digest is in the delivery receipt.
        key: signs the delivery receipt.
        max_file, part_size: bytes; larger files are split.
        notes: what was not tested, for the dataset card.
    """

    folder: ReleaseFolder
    archives: Path
    helper: Path
    key: SigningKey
    max_file: int = MAX_FILE
    part_size: int = PART_SIZE
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where it is now: the payload's commit, the card's commit, and the signed receipt."""

    commit: str
    card_commit: str
    receipt: Path


def publish(what: Publication, target: HubTarget, emit: Emit = silent) -> Delivery:
    """Publish a release: sizes first, then digests, then the payload, then the card and the delivery receipt.

    A run that was interrupted is repeated as it is: what the Hub has is not sent again. Each success leaves a receipt
    of its own.

    Raises:
        SpecError: ``publish.parts``, ``publish.archive`` (an archive that a record names is not there).
        IntegrityError: ``blob.digest``: an archive is not the one of its record, or other bytes came back.
        ConflictError: ``release.exists``, ``hub.conflict``.
        TransportError: ``auth``, ``http.*``, ``hub.*``, ``io.*``.
    """
    started = stamp()
    wholes, parts = _archive_parts(what)
    with tempfile.TemporaryDirectory(prefix="oci-builder-publish-") as scratch:
        payload = [*parts, *_records(what)]
        sums = _inline(Path(scratch), "SHA256SUMS", checksums(wholes, payload))
        message = f"{what.folder.release}: archives and records"
        done = commit_files(target, _under(what, [*payload, sums]), message, emit)
        data = _delivery(what, target, done, wholes, payload, started)
        receipt = what.folder.receipts / data[0]
        create_exclusively(receipt, data[1])
        card = readme(what.folder.release, _under(what, payload), done["commit"], wholes, what.notes)
        last = [
            *_under(what, [_inline(Path(scratch), f"receipts/{data[0]}", data[1])]),
            replace(_inline(Path(scratch), "README.md", card), replace=True),
        ]
        final = commit_files(target, last, f"{what.folder.release}: delivery receipt and card", emit)
    return Delivery(done["commit"], final["commit"], receipt)


def _archive_parts(what: Publication) -> tuple[dict[str, str], list[Part]]:
    recorded = what.folder.subjects()
    planned = {}
    for name in recorded:
        source = what.archives / name
        if not source.is_file():
            raise SpecError(
                "publish.archive", f"{show(str(source))} is not there; the records name it", where=str(source)
            )
        planned[name] = plan_parts(name, source, max_file=what.max_file, part_size=what.part_size)
    parts: list[Part] = []
    for name, plan in planned.items():
        parts += hash_parts(plan, recorded[name])[1]
    return recorded, parts


def _records(what: Publication) -> list[Part]:
    root = what.folder.root
    found = [root / name for name in _RECORDS if (root / name).is_file()]
    found += sorted(p for pattern in ("*.cdx.json", "inventory*.json") for p in root.glob(pattern))
    parts = [(path.name, path) for path in found] + [(what.helper.name, what.helper)]
    parts += [(f"receipts/{p.name}", p) for p in sorted(what.folder.receipts.glob("*.json"))]
    out = []
    for name, path in parts:
        planned = plan_parts(name, path)
        # The verdict changes as receipts come in; everything else of a release is final.
        out += [replace(p, replace=path.name == "qualification.json") for p in hash_parts(planned)[1]]
    return out


def _inline(scratch: Path, name: str, data: bytes) -> Part:
    path = scratch / name.replace("/", "-")
    path.write_bytes(data)
    return Part(name, path, 0, len(data), Digest.of(data).hex, replace=name == "SHA256SUMS")


def _under(what: Publication, parts: Sequence[Part]) -> list[Part]:
    return [replace(part, name=f"{what.folder.release}/{part.name}") for part in parts]


def _delivery(
    what: Publication,
    target: HubTarget,
    done: dict[str, Any],
    wholes: dict[str, str],
    parts: Sequence[Part],
    start: str,
) -> tuple[str, bytes]:
    """(file name, envelope) of the delivery receipt."""
    helper = hashlib.sha256(read_file(what.helper, DEFAULT_LIMITS.document)).hexdigest()
    details = {
        "repository": target.repo, "endpoint": done["endpoint"], "commit": done["commit"],
        "files": [p.to_json() for p in _under(what, parts)], "helper": {"name": what.helper.name, "sha256": helper},
    }  # fmt: skip
    receipt = Receipt.model_validate(
        {
            "release": what.folder.release, "stage": "publish", "attempt": new_attempt(), "engine": engine_name(),
            "tools": tool_versions("huggingface_hub"), "host": this_host(), "started": start, "finished": stamp(),
            "checks": (Check(name="uploaded", outcome="pass"), Check(name="read-back", outcome="pass")),
            "details": details,
        }
    )  # fmt: skip
    envelope = what.key.sign(make_statement(receipt, wholes))
    return receipt_name(receipt, envelope), envelope


__all__ = ["Delivery", "HubTarget", "Publication", "publish"]
