"""Are two archives the same image? Both were read and judged; here they are only compared."""

from __future__ import annotations

import json
from typing import Any

from oci_builder.judge.archive import Judged
from oci_builder.judge.contents import Member
from oci_builder.judge.image import ImageView
from oci_builder.judge.names import agree
from oci_builder.model.errors import CheckFailed
from oci_builder.model.report import Finding

_DOCUMENTS = ("oci-layout", "index.json", "manifest.json")


def compare(first: Judged, second: Judged) -> list[Finding]:
    """Everything in which the two differ, as ``archive.twin`` (exit status 1)."""
    one, two = first.image, second.image
    if one is None or two is None:
        return []  # why there is no image to compare is a finding already
    out = _Differences(f"{first.contents.path} and {second.contents.path}")
    out.check("config", one.config_member.digest, two.config_member.digest)
    out.check("diff_ids", ", ".join(one.diff_ids), ", ".join(two.diff_ids))
    if one.names != two.names and not (agree(one.names, two.names) or agree(two.names, one.names)):
        out.check("names", ", ".join(sorted(one.names)), ", ".join(sorted(two.names)))
    _contents(out, one, two)
    if _ours(first) and _ours(second):
        _documents(out, first, second)
        _shared_bytes(out, first, second)
    return out.found


class _Differences:
    def __init__(self, where: str) -> None:
        self.where = where
        self.found: list[Finding] = []

    def check(self, what: str, expected: object, actual: object) -> None:
        if expected != actual:
            self.add(what, f"the archives differ in {what}", str(expected), str(actual))

    def add(self, what: str, message: str, expected: str = "", actual: str = "") -> None:
        status = CheckFailed.exit_status
        place = f"{self.where}: {what}"
        self.found.append(Finding("archive.twin", "error", place, expected[:400], actual[:400], message, status))


def _contents(out: _Differences, one: ImageView, two: ImageView) -> None:
    for index, (a, b) in enumerate(zip(one.layers, two.layers, strict=False)):
        if a and b and a.layer and b.layer and a.layer.diff_id and b.layer.diff_id:
            out.check(f"layer {index}", a.layer.diff_id, b.layer.diff_id)


def _ours(judged: Judged) -> bool:
    """Written by us, and not by somebody who took our layers over (skopeo's copies have no manifest.json)."""
    layers = judged.image.layers if judged.image else []
    complete = all(name in judged.contents.members for name in _DOCUMENTS)
    return complete and (judged.contents.written_by_us or any(m and m.layer and m.layer.ours for m in layers))


def _documents(out: _Differences, first: Judged, second: Judged) -> None:
    """Nothing covers index.json and manifest.json with a digest; but each archive has them, so each covers the other.

    They may differ only where they name the manifest and the layer blobs, which were checked.
    """
    for name in _DOCUMENTS:
        one, two = (_comparable(name, j.contents.members.get(name)) for j in (first, second))
        if one is not None and two is not None:
            out.check(name, json.dumps(one, sort_keys=True), json.dumps(two, sort_keys=True))
    a, b = first.image, second.image
    if a and b and a.manifest and b.manifest:
        pair = [j.contents.blob(i.manifest.id) for j, i in ((first, a), (second, b)) if i.manifest]
        one, two = (_comparable("manifest", member) for member in pair)
        out.check("manifest", json.dumps(one, sort_keys=True), json.dumps(two, sort_keys=True))


def _comparable(name: str, member: Member | None) -> Any:
    if member is None or member.data is None:
        return None
    try:
        value = json.loads(member.data)
        match name:
            case "index.json":
                for descriptor in value["manifests"]:
                    del descriptor["digest"], descriptor["size"]
            case "manifest.json":
                for item in value:
                    item["Layers"] = len(item["Layers"])
            case "manifest":
                value["layers"] = [layer.get("annotations") for layer in value["layers"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # its own finding says so
    return value


def _shared_bytes(out: _Differences, first: Judged, second: Judged) -> None:
    """Our Docker archive holds the very blobs of our OCI archive, so that every bit of one is covered by the other."""
    plain, packed = (first, second) if second.contents.outer == "gzip" else (second, first)
    if plain.contents.outer != "identity" or packed.contents.outer != "gzip" or not packed.contents.written_by_us:
        return
    if plain.image is None or packed.image is None:
        return
    for index, (a, b) in enumerate(zip(plain.image.layers, packed.image.layers, strict=False)):
        same = b is not None and (b.shared or (a is not None and a.layer is not None and a.layer.padded))
        if a and b and a.range and a.layer and a.layer.compression == "gzip" and not same:
            out.add(f"layer {index}", "the compressed bytes of this layer are not those of the other archive")
