"""The image config's settings and the manifest's annotations, from the spec and the base's settings.

Labels and annotations follow the OCI conventions (image-spec annotations.md), base name and digest included.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from oci_builder.model.spec import Spec

_PREFIX = "org.opencontainers.image."


def timestamp(epoch: int) -> str:
    """RFC 3339, in UTC.

    >>> timestamp(0)
    '1970-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def image_settings(
    spec: Spec, base: Mapping[str, Any], base_name: str, base_digest: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """The config without rootfs and history, and the manifest's annotations.

    The spec's ``env`` replaces the base's variables of the same name; entrypoint, cmd, user and workdir of the spec
    replace the base's. A base's command goes when the spec sets an entrypoint: it was meant for another.
    """
    annotations = _annotations(spec, base_name, base_digest)
    run: dict[str, Any] = dict(base.get("config") or {})
    run["Env"] = merge_env(run.get("Env") or [], spec.env)
    run["Labels"] = {**(run.get("Labels") or {}), **annotations, **spec.labels}
    if spec.entrypoint is not None:
        run["Entrypoint"] = list(spec.entrypoint)
        run.pop("Cmd", None)
    for key, value in (("User", spec.user), ("WorkingDir", spec.workdir)):
        if value is not None:
            run[key] = value
    if spec.cmd is not None:
        run["Cmd"] = list(spec.cmd)
    system, _, architecture = spec.platform.partition("/")
    dropped = ("container", "container_config", "docker_version", "id", "parent", "moby.buildkit.buildinfo.v1")
    kept = {key: value for key, value in base.items() if key not in dropped}
    settings = {**kept, "architecture": architecture, "os": system, "config": run, "created": timestamp(spec.epoch)}
    return settings, annotations


def merge_env(base: list[str], ours: tuple[str, ...]) -> list[str]:
    """Variables in order, ours in place of the base's of the same name; what has no equals sign sets nothing and goes.

    >>> merge_env(["A=1", "B=2", "D"], ("B=3", "C=4"))
    ['A=1', 'B=3', 'C=4']
    """
    values = {item.partition("=")[0]: item for item in base if "=" in item}
    values.update({item.partition("=")[0]: item for item in ours})
    return list(values.values())


def _annotations(spec: Spec, base_name: str, base_digest: str) -> dict[str, str]:
    out = {
        _PREFIX + "created": timestamp(spec.epoch),
        _PREFIX + "title": spec.name,
        _PREFIX + "version": spec.release or spec.tag,
        _PREFIX + "ref.name": spec.full_reference,
    }
    if base_name:
        out[_PREFIX + "base.name"] = base_name
    if base_digest:
        out[_PREFIX + "base.digest"] = base_digest
    return out
