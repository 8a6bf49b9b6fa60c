"""``diff``: which layers, packages and files of two images differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.model.errors import show
from oci_builder.model.events import Emit, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.transports.contents import Item, read_contents

_PACKAGE = re.compile(rb"(?P<place>.*)/(?P<name>[^/]+)-(?P<version>[^/-]+)\.dist-info/METADATA\Z")
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs; all lists are sorted. ``config`` has the settings that differ as (old, new)."""

    layers: dict[str, list[str]]
    packages: list[dict[str, Any]]
    files: dict[str, list[str]]
    config: dict[str, list[Any]]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.layers["removed"] or self.layers["added"] or any(self.files.values()) or self.config)

    def to_json(self) -> dict[str, Any]:
        """Everything by name."""
        return {
            "same": self.same, "layers": self.layers, "packages": self.packages, "files": self.files,
            "config": self.config,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """For people; long lists are cut."""
        if self.same:
            yield "no difference"
            return
        yield f"layers: {len(self.layers['same'])} the same"
        for sign, which in (("-", "removed"), ("+", "added")):
            yield from (f"  {sign} {digest}" for digest in self.layers[which])
        for key, (old, new) in self.config.items():
            yield f"config {key}: {old!r} -> {new!r}"
        for package in self.packages:
            yield f"package {package['name']} ({package['place']}): {package['old'] or '-'} -> {package['new'] or '-'}"
        for sign, which in (("-", "removed"), ("+", "added"), ("~", "changed")):
            paths = self.files[which]
            yield f"files {which}: {len(paths)}"
            yield from (f"  {sign} {path}" for path in paths[:_SHOWN])
            if len(paths) > _SHOWN:
                yield f"  … and {len(paths) - _SHOWN} more (--json has them all)"


def diff_archives(
    old: Path, new: Path, *, platform: str = "linux/amd64", images: tuple[str, str] = ("", ""), emit: Emit = silent,
    limits: Limits = DEFAULT_LIMITS,
) -> Difference:  # fmt: skip
    """Compare two archives or layouts by content; how the layers are cut does not matter for files and packages.

    Args:
        images: name or digest of the ones that are meant, where there are several.

    Raises:
        OciBuilderError: as ``read_contents``.
    """
    before = read_contents(old, platform=platform, image=images[0], limits=limits, emit=emit, hashes=True)
    after = read_contents(new, platform=platform, image=images[1], limits=limits, emit=emit, hashes=True)
    a, b = before.tree(), after.tree()
    files = {
        "removed": [show(p) for p in sorted(a.keys() - b.keys())],
        "added": [show(p) for p in sorted(b.keys() - a.keys())],
        "changed": [show(p) for p in sorted(a.keys() & b.keys()) if a[p].value != b[p].value],
    }
    old_layers = [layer.diff_id for layer in before.layers]
    new_layers = [layer.diff_id for layer in after.layers]
    layers = {
        "same": [x for x in old_layers if x in new_layers],
        "removed": [x for x in old_layers if x not in new_layers],
        "added": [x for x in new_layers if x not in old_layers],
    }
    return Difference(layers, _packages(a, b), files, _settings(before.settings, after.settings))


def _packages(old: Mapping[bytes, Item], new: Mapping[bytes, Item]) -> list[dict[str, Any]]:
    a, b = _versions(old), _versions(new)
    return [
        {"place": show(key[0]), "name": key[1].decode("utf-8", "replace"), "old": a.get(key), "new": b.get(key)}
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]


def _versions(tree: Mapping[bytes, Item]) -> dict[tuple[bytes, bytes], str]:
    found = (_PACKAGE.match(path) for path in tree)
    return {(m["place"], m["name"]): m["version"].decode("utf-8", "replace") for m in found if m}


def _settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    a, b = ({**s, **{f"config.{k}": v for k, v in (s.get("config") or {}).items()}} for s in (old, new))
    skip = ("rootfs", "history", "config")
    return {k: [a.get(k), b.get(k)] for k in sorted(a.keys() | b.keys()) if k not in skip and a.get(k) != b.get(k)}
