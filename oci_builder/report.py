"""``oci-builder report``: a release folder as one HTML page, and as the JSON that the page shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from oci_builder.model.errors import CheckFailed, SpecError, show
from oci_builder.model.gates import Gate, TrustPolicy
from oci_builder.release.files import hide, write_result
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.page import render
from oci_builder.release.receipts import judge

_SHOWN = 60


def report_data(
    folder: Path, gates: tuple[Gate, ...], policy: TrustPolicy, now: datetime, spec: str | None = None
) -> dict[str, Any]:
    """Everything that the page shows, as JSON: recomputed from the folder's files, nothing taken on trust.

    Raises:
        SpecError: ``release.folder``; FormatError, TransportError: unreadable files.
    """
    if not folder.is_dir():
        raise SpecError("release.folder", f"{show(str(folder))} is no release folder", where=str(folder))
    release = ReleaseFolder(folder)
    container = release.document("container.json")
    portable = release.document("portable.json")
    tiers = portable.get("tiers") if isinstance(portable, dict) else None
    layers = [_layer(v, tiers if isinstance(tiers, list) else ()) for v in _list(container, "layers")]
    data: dict[str, Any] = {
        "release": release.release,
        "qualification": release.evaluate(gates, policy, now, spec).to_json(),
        "files": _files(release, policy, now),
        "layers": layers,
        "tiers": _tiers(layers),
        "packages": _inventories(release),
        "readiness": _readiness(release),
        "receipts": [_receipt(n, d, policy, now, release.subjects()) for n, d in release.envelopes().items()],
    }
    # A folder of others may hold what ours never does: it was searched before it was recorded.
    return {name: hide(value) for name, value in data.items()}


def _files(release: ReleaseFolder, policy: TrustPolicy, now: datetime) -> dict[str, str]:
    """Whether what the page shows is what was recorded: ``recorded``, ``changed`` or ``unprotected``, in words too."""
    try:
        release.check_files(policy, now)
    except CheckFailed as error:
        return {"state": "changed", "why": error.message}
    if release.protected(policy, now):
        return {"state": "recorded", "why": "as a signed record receipt has them"}
    return {"state": "unprotected", "why": "no record receipt of a trusted key has the digests of these files"}


def write_report(data: Mapping[str, Any], path: Path) -> None:
    """Write the page. An older one is replaced; a pipe, a device or a link is written to.

    Raises:
        TransportError: ``io.*``.
    """
    write_result(path, render(data))


def _list(document: Any, key: str) -> list[Mapping[str, Any]]:
    found = document.get(key) if isinstance(document, dict) else None
    return [v for v in found if isinstance(v, dict)] if isinstance(found, list) else []


def _layer(value: Mapping[str, Any], tiers: Collection[str]) -> dict[str, Any]:
    name = str(value.get("name") or "")
    return {
        "name": name or "base image", "kind": _kind(value, tiers), "digest": str(value.get("digest") or ""),
        "size": _bytes(value.get("size")), "tar_size": _bytes(value.get("tar_size")) or _bytes(value.get("size")),
    }  # fmt: skip


def _bytes(value: object) -> int:
    """A size as a record has it; whatever else stands there is none."""
    return value if type(value) is int and value > 0 else 0


def _kind(value: Mapping[str, Any], tiers: Collection[str]) -> str:
    """``base`` image, ``shared`` by tiers (``base+vllm``), one tier's ``own``, or shipped ``runtime`` files."""
    name = str(value.get("name") or "")
    if not name or value.get("from") == "base":
        return "base"
    if "+" in name:
        return "shared"
    return "own" if name in tiers else "runtime"


def _tiers(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    ours = [v for v in layers if v["kind"] in ("own", "shared")]
    names = sorted({part for v in ours for part in v["name"].split("+")})
    sums = {n: Counter({"own": 0, "shared": 0}) for n in names}
    for layer in ours:
        for name in layer["name"].split("+"):
            sums[name][layer["kind"]] += layer["tar_size"]
    return [{"name": n, "own": sums[n]["own"], "shared": sums[n]["shared"]} for n in names]


def _inventories(release: ReleaseFolder) -> dict[str, list[dict[str, str]]]:
    out: dict[str, list[dict[str, str]]] = {}
    for path in sorted(release.root.glob("inventory*.json")):
        document = release.document(path.name)
        tier = str(document.get("tier") or path.stem) if isinstance(document, dict) else path.stem
        out[tier] = [
            {"name": str(p.get("name", "")), "version": str(p.get("version", "")),
             "licence": str(p.get("licence") or p.get("license") or ""), "source": str(p.get("source") or "")}
            for p in _list(document, "packages")
        ]  # fmt: skip
    return out


def _readiness(release: ReleaseFolder) -> dict[str, Any] | None:
    """``readiness.json``, as far as a page shows it: errors and warnings, worst first."""
    document = release.document("readiness.json")
    if not isinstance(document, dict):
        return None
    rows = [r for r in _list(document, "rows") if r.get("severity") in ("error", "warning")]
    keys = ("severity", "code", "where", "message")
    return {
        "ok": document.get("ok") is True, "target": str(document.get("target") or ""),
        "rows": [{k: str(r.get(k) or "") for k in keys} for r in rows[:_SHOWN]], "left": max(0, len(rows) - _SHOWN),
    }  # fmt: skip


def _receipt(name: str, data: bytes, policy: TrustPolicy, now: datetime, subjects: Mapping[str, str]) -> dict[str, Any]:
    verdict = judge(data, policy, now=now, subjects=subjects, where=name)
    said = verdict.statement.predicate if verdict.statement else None
    gpus = Counter(f"{g.name} ({g.capability})" for g in said.host.gpus) if said else Counter()
    return {
        "name": name, "answer": verdict.answer.value, "reasons": list(verdict.reasons),
        "stage": said.stage if said else "unreadable", "engine": said.engine if said else "",
        "os": said.host.os if said else "", "driver": said.host.driver if said else "",
        "gpus": ", ".join(f"{n} × {g}" for g, n in sorted(gpus.items())),
        "started": said.started if said else "", "finished": said.finished if said else "",
        "outcomes": dict(Counter(c.outcome for c in said.checks)) if said else {},
    }  # fmt: skip
