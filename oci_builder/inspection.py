"""``inspect``: what an image is made of: layers, sizes, what each tier costs, what is shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oci_builder.model.events import Emit, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.sizes import human
from oci_builder.transports.contents import ImageContents, read_contents


@dataclass(frozen=True, slots=True)
class Inspection:
    """The image, and per layer and tier what is in it."""

    image: dict[str, Any]
    layers: list[dict[str, Any]]
    tiers: dict[str, dict[str, int]]
    totals: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Everything by name."""
        return {"image": self.image, "layers": self.layers, "tiers": self.tiers, "totals": self.totals}

    def lines(self) -> Iterator[str]:
        """For people."""
        names = ", ".join(self.image["tags"]) or "(no name)"
        yield f"{names}  {self.image['platform']}"
        yield f"manifest {self.image['manifest'] or '(none)'}"
        yield f"config   {self.image['config']}"
        yield ""
        yield f"{'layer':<28} {'stored':>10} {'tar':>10} {'files':>8}  holds"
        for layer in self.layers:
            yield (
                f"{layer['name'][:28]:<28} {human(layer['size']):>10} {human(layer['tar_size']):>10} "
                f"{layer['files']:>8}  {', '.join(layer['tiers']) or '-'}"
            )
        if self.tiers:
            yield ""
            yield f"{'tier':<20} {'seen':>10} {'own':>10} {'shared':>10} {'files':>8}"
        for name, tier in self.tiers.items():
            yield (
                f"{name:<20} {human(tier['size']):>10} {human(tier['own']):>10} "
                f"{human(tier['shared']):>10} {tier['files']:>8}"
            )
        yield ""
        yield f"stored {human(self.totals['size'])}, unpacked {human(self.totals['tar_size'])}"
        if self.tiers:
            yield (
                f"as plain layers the tiers would take {human(self.totals['plain'])}, sharing saves "
                f"{human(self.totals['saved'])}"
            )


def inspect_archive(
    path: Path, *, platform: str = "linux/amd64", image: str = "", emit: Emit = silent, limits: Limits = DEFAULT_LIMITS
) -> Inspection:
    """Read an archive or layout once and add up.

    Raises:
        OciBuilderError: as ``read_contents``.
    """
    contents = read_contents(path, platform=platform, image=image, limits=limits, emit=emit)
    tiers: dict[str, dict[str, int]] = {}
    layers: list[dict[str, Any]] = []
    for layer in contents.layers:
        held = sorted({tier for entry in layer.entries.values() if (tier := contents.tier_of(entry.path))})
        files = [e for e in layer.entries.values() if e.kind in ("file", "hardlink")]
        layers.append(
            {
                "name": layer.name or "+".join(held) or layer.digest[7:19],
                "digest": layer.digest, "diff_id": layer.diff_id, "media_type": layer.media_type,
                "size": layer.size, "tar_size": layer.tar_size, "files": len(files), "tiers": held,
                "entries": len(layer.entries),
            }
        )  # fmt: skip
        _add_tiers(contents, layer.entries, tiers, shared=len(held) > 1)
    plain = sum(t["size"] for t in tiers.values())
    distinct = sum(t["own"] for t in tiers.values()) + _shared_once(contents)
    totals = {
        "size": sum(item["size"] for item in layers), "tar_size": sum(item["tar_size"] for item in layers),
        "plain": plain, "saved": plain - distinct,
    }  # fmt: skip
    return Inspection(contents.about, layers, dict(sorted(tiers.items())), totals)


def _add_tiers(
    contents: ImageContents, entries: dict[bytes, Any], tiers: dict[str, dict[str, int]], *, shared: bool
) -> None:
    for entry in entries.values():
        name = contents.tier_of(entry.path)
        if name and entry.kind in ("file", "hardlink"):
            size = entries[entry.link].size if entry.kind == "hardlink" and entry.link in entries else entry.size
            tier = tiers.setdefault(name, {"size": 0, "own": 0, "shared": 0, "files": 0})
            tier["size"] += size
            tier["shared" if shared else "own"] += size if shared or entry.kind == "file" else 0
            tier["files"] += 1


def _shared_once(contents: ImageContents) -> int:
    total = 0
    for layer in contents.layers:
        held = {tier for entry in layer.entries.values() if (tier := contents.tier_of(entry.path))}
        if len(held) > 1:
            total += sum(entry.size for entry in layer.entries.values() if entry.kind == "file")
    return total
