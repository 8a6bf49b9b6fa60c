"""Is an archive the image that a spec describes? Only what the spec fixes is compared; the rest is the base's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from oci_builder.judge.archive import Judged
from oci_builder.judge.image import ImageView, is_ours
from oci_builder.judge.layer import LayerFacts
from oci_builder.judge.names import image_name
from oci_builder.model.errors import CheckFailed, show
from oci_builder.model.report import Finding
from oci_builder.model.settings import image_settings, timestamp
from oci_builder.model.spec import OciBase, RegistryBase, Spec
from oci_builder.wire.tar import name_key

_BASE = "org.opencontainers.image.base."
_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Difference:
    """``code`` without its ``check.``; what the spec says, and what the archive does."""

    code: str
    what: str
    expected: object
    actual: object


def hold_to_spec(judged: Judged, spec: Spec) -> list[Finding]:
    """Everything in which the image is not the spec's, as ``check.*`` (exit status 1); nothing where there is no image.

    Codes: ``check.name``, ``check.platform``, ``check.config`` (time, user, folder, entry point, command),
    ``check.env``, ``check.labels``, ``check.base``, ``check.prefix``, ``check.epoch``, ``check.compression``.
    """
    image = judged.image
    if image is None:
        return []
    return [_finding(judged, one) for one in _differences(judged, image, spec)]


def _finding(judged: Judged, one: _Difference) -> Finding:
    expected, actual = show(str(one.expected)[:400]), show(str(one.actual)[:400])
    message = f"{one.what}: the spec says {expected or 'nothing'}, the archive {actual or 'nothing'}"
    where = f"{judged.contents.path}: {one.what}"
    return Finding(f"check.{one.code}", "error", where, expected, actual, message, CheckFailed.exit_status)


def _differences(judged: Judged, image: ImageView, spec: Spec) -> Iterator[_Difference]:
    wanted = {image_name(spec.reference), image_name(spec.full_reference)}
    if not wanted & image.names:
        yield _Difference("name", "the image's name", spec.reference, ", ".join(sorted(image.names)))
    if image.platform != spec.platform:
        yield _Difference("platform", "platform", spec.platform, image.platform)
    config = json.loads(image.config_member.data or b"{}")
    yield from _settings(config, spec)
    run = config.get("config") or {}
    yield from _labels("label", run.get("Labels") or {}, spec)
    manifest = judged.contents.blob(image.manifest.id) if image.manifest else None
    if manifest is not None and manifest.data is not None:
        yield from _labels("annotation", json.loads(manifest.data).get("annotations") or {}, spec)
    yield from _layers(image, spec)


def _settings(config: Mapping[str, Any], spec: Spec) -> Iterator[_Difference]:
    wanted, _ = image_settings(spec, {}, "", "")
    if config.get("created") != wanted["created"]:
        yield _Difference("config", "created", wanted["created"], config.get("created"))
    run = config.get("config") or {}
    for key in ("User", "WorkingDir", "Entrypoint", "Cmd"):
        if key in wanted["config"] and run.get(key) != wanted["config"][key]:
            yield _Difference("config", key, wanted["config"][key], run.get(key))
    if spec.entrypoint is not None and spec.cmd is None and run.get("Cmd"):
        yield _Difference("config", "Cmd", "", run["Cmd"])
    found = {item.partition("=")[0]: item for item in run.get("Env") or []}
    for item in spec.env:
        name = item.partition("=")[0]
        if found.get(name) != item:
            yield _Difference("env", f"variable {name}", item, found.get(name, ""))


def _labels(what: str, found: Mapping[str, Any], spec: Spec) -> Iterator[_Difference]:
    _, wanted = image_settings(spec, {}, *_base_of(spec))
    if what == "label":
        wanted = {**wanted, **spec.labels}
    for key, value in wanted.items():
        if found.get(key) != value:
            code = "base" if key.startswith(_BASE) else "labels"
            yield _Difference(code, f"{what} {key}", value, found.get(key, ""))


def _base_of(spec: Spec) -> tuple[str, str]:
    """The base's name, and its manifest's digest where the spec fixes it (an index has many)."""
    match spec.base:
        case RegistryBase() as base:
            return base.registry, base.manifest or ""
        case OciBase() as base:
            return base.oci.rstrip("/").rpartition("/")[2], ""
    return "", ""


def _layers(image: ImageView, spec: Spec) -> Iterator[_Difference]:
    layers = [(n, member.layer) for n, member in enumerate(image.layers) if member and member.layer]
    for tier in spec.tiers:
        path = f"{spec.prefix}/envs/{tier}"
        if not any(_has_folder(facts, path.lstrip("/").encode()) for _, facts in layers):
            yield _Difference("prefix", f"tier {tier}", path, "")
    for number, facts in layers:
        if not is_ours(image, number):
            continue
        if facts.newest > spec.epoch * _SECOND:
            newest = timestamp(min(facts.newest // _SECOND, 2**33))
            yield _Difference("epoch", f"newest time in layer {number}", f"<= {timestamp(spec.epoch)}", newest)
        if facts.compression not in (spec.compression.codec, "identity"):
            yield _Difference(
                "compression", f"compression of layer {number}", spec.compression.codec, facts.compression
            )


def _has_folder(facts: LayerFacts, path: bytes) -> bool:
    return facts.names.saw(path) or name_key(path) in facts.log.folders.keys
