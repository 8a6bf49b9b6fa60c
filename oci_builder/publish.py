"""``oci-builder publish``: a finished build onto the Hub, read back by hash, with a delivery receipt."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.events import Emit, silent
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.model.receipts import Check
from oci_builder.release.delivery import Judge, Publication, delivery_receipt, keep, refuse_secrets, require_trusted
from oci_builder.release.files import read_file, require_writable
from oci_builder.release.folder import QUALIFICATION
from oci_builder.release.host import stamp, utc_now
from oci_builder.release.parts import Part, checksums, hash_parts, plan_parts
from oci_builder.release.publish import Card, HubTarget, commit_files, readme

_RECORDS = ("spec.json", "portable.json", "container.json", "provenance.json", "readiness.json")


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where it is now: the payload's commit, the card's commit, and the signed receipt."""

    commit: str
    card_commit: str
    receipt: Path


def publish(what: Publication, target: HubTarget, emit: Emit = silent) -> Delivery:
    """Publish a release: sizes, digests, secrets; then the payload; then delivery receipt, verdict and card.

    A run that was interrupted is repeated as it is: what the Hub has is not sent again. Each success leaves a receipt
    of its own.

    Raises:
        SpecError: ``publish.parts``, ``publish.archive`` (an archive that a record names is not there).
        IntegrityError: ``blob.digest``: an archive is not the one of its record, or other bytes came back.
        PolicyError: ``policy.secret``, ``policy.weights``, ``release.link``, ``key.trust``: nothing was sent.
        CheckFailed: ``release.rewritten``, ``release.unproven``: nor then.
        ConflictError: ``release.exists``, ``hub.conflict``.
        TransportError: ``auth``, ``http.*``, ``hub.*``, ``io.*``.
    """
    started = stamp()
    what.folder.require_own_files()
    require_writable(what.folder.receipts)
    require_trusted(what, utc_now(), emit)
    wholes, parts = _archive_parts(what)
    records = _records(what)
    checks = [refuse_secrets(what, sorted(wholes), [p.source for p in records], emit)]
    checks += [Check(name="uploaded", outcome="pass"), Check(name="read-back", outcome="pass")]
    with tempfile.TemporaryDirectory(prefix="oci-builder-publish-") as scratch:
        payload = [*parts, *records]
        sums = _inline(Path(scratch), "SHA256SUMS", checksums(wholes, payload))
        message = f"{what.folder.release}: archives and records"
        done = commit_files(target, _under(what, [*payload, sums]), message, emit)
        details = {
            "repository": target.repo, "endpoint": done["endpoint"], "commit": done["commit"],
            "files": [p.to_json() for p in _under(what, payload)],
        }  # fmt: skip
        name, envelope = delivery_receipt(what, wholes, checks, details, started)
        receipt = keep(what, name, envelope, utc_now())
        card = readme(_card(what, done["commit"], wholes), _under(what, payload))
        last = [
            *_under(what, [_inline(Path(scratch), f"receipts/{name}", envelope), *_verdict(what, Path(scratch))]),
            replace(_inline(Path(scratch), "README.md", card), replace=True),
        ]
        final = commit_files(target, last, f"{what.folder.release}: delivery receipt, verdict and card", emit)
    return Delivery(done["commit"], final["commit"], receipt)


def _archive_parts(what: Publication) -> tuple[dict[str, str], list[Part]]:
    recorded = what.folder.subjects()
    planned = {
        name: plan_parts(name, what.archive(name), max_file=what.max_file, part_size=what.part_size)
        for name in recorded
    }  # fmt: skip
    parts: list[Part] = []
    for name, plan in planned.items():
        parts += hash_parts(plan, recorded[name])[1]
    return recorded, parts


def _records(what: Publication) -> list[Part]:
    """Everything of the release that is final; the verdict, which changes as receipts come in, goes with the card."""
    root = what.folder.root
    found = [root / name for name in _RECORDS if (root / name).is_file()]
    found += sorted(p for pattern in ("*.cdx.json", "inventory*.json") for p in root.glob(pattern))
    parts = [(path.name, path) for path in found] + [(what.helper.name, what.helper)]
    parts += [(f"receipts/{p.name}", p) for p in sorted(what.folder.receipts.glob("*.json"))]
    return [part for name, path in parts for part in hash_parts(plan_parts(name, path))[1]]


def _verdict(what: Publication, scratch: Path) -> list[Part]:
    """A copy of it: the folder's own may be replaced while this one is sent."""
    path = what.folder.root / QUALIFICATION
    if not path.is_file():
        return []
    return [replace(_inline(scratch, QUALIFICATION, read_file(path, DEFAULT_LIMITS.document)), replace=True)]


def _card(what: Publication, commit: str, wholes: dict[str, str]) -> Card:
    said: dict[str, Any] = what.folder.recorded() or {}
    gates = {str(g["name"]): str(g["state"]) for g in said.get("gates", ())}
    notes = (*what.notes, *(str(line) for line in said.get("not_tested", ())))
    return Card(what.folder.release, commit, wholes, tuple(dict.fromkeys(notes)), str(said.get("state", "")), gates)


def _inline(scratch: Path, name: str, data: bytes) -> Part:
    path = scratch / name.replace("/", "-")
    path.write_bytes(data)
    return Part(name, path, 0, len(data), Digest.of(data).hex, replace=name == "SHA256SUMS")


def _under(what: Publication, parts: Sequence[Part]) -> list[Part]:
    return [replace(part, name=f"{what.folder.release}/{part.name}") for part in parts]


__all__ = ["Delivery", "HubTarget", "Judge", "Publication", "publish"]
