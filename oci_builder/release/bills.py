"""The bills of materials of one image: one for the image, one for each tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from oci_builder.model.errors import FormatError, SpecError
from oci_builder.model.jsontext import load_json
from oci_builder.release.packages import Contents

IMAGE = "image"
SUFFIX = ".cdx.json"
_LABEL = "org.opencontainers.image."


@dataclass(frozen=True, slots=True)
class Naming:
    """What a bill says that it is of: name, version, and the time of the document in seconds since 1970."""

    name: str
    version: str
    epoch: int = 0


def naming(contents: Contents, fallback: str) -> Naming:
    """As the image's own labels say; else as the archive calls it; else the file's name."""
    settings: Any = {}
    known = ""
    if contents.image is not None:
        settings = load_json(contents.image.config, "config")
        known = next(iter(contents.image.names), "")
    path, _, last = known.rpartition("/")
    name, _, tag = last.partition(":")
    labels = (settings.get("config") or {}).get("Labels") or {}
    title, version = (str(labels.get(_LABEL + key) or "") for key in ("title", "version"))
    called = f"{path}/{name}" if path else name
    return Naming(title or called or fallback, version or tag or "0", _epoch(str(settings.get("created") or "")))


def _epoch(created: str) -> int:
    try:
        at = datetime.fromisoformat(created[:19]).replace(tzinfo=UTC)
    except ValueError:
        return 0
    return max(0, int(at.timestamp()))


def bills(contents: Contents, what: Naming) -> dict[str, bytes]:
    """``image`` and each tier -> its CycloneDX document. Deterministic.

    Raises:
        SpecError: ``spec.extra`` when the library is not installed. FormatError: ``json.type``.
    """
    try:
        from oci_builder.release.sbom import image_sbom, sbom
    except ModuleNotFoundError as error:
        raise SpecError(
            "spec.extra", f"bills of materials need the package {error.name}: pip install 'oci-builder[payload]'"
        ) from None
    named: Mapping[str, Any] = {"subject": what.name, "version": what.version, "epoch": what.epoch}
    try:
        out = {IMAGE: image_sbom(contents, **named)}
        # A tier of that name would take the image's file.
        return out | {name: sbom(tier, **named) for name, tier in sorted(contents.tiers.items()) if name != IMAGE}
    except ValueError as error:
        raise FormatError("json.type", f"a package's own words make no bill of materials: {error}") from None


def file_name(name: str) -> str:
    """``image.cdx.json``, ``vllm.cdx.json``."""
    return f"{name}{SUFFIX}"
