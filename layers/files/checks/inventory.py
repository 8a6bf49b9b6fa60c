"""A tier's inventory: what must be installed, and what the build left out and why."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import CheckFailed, Result

# Module -> package, where the names differ by more than their dashes.
PACKAGES = {
    "flashinfer": "flashinfer-python", "grouped_gemm": "nv-grouped-gemm",
    "mooncake": "mooncake-transfer-engine-cuda13",
}  # fmt: skip


@dataclass(frozen=True)
class Inventory:
    """Package -> version of what is there, and package -> reason of what was left out; names as in PEP 503.

    ``source`` is false when the marker beside it says that the runtime has none.
    """

    versions: Mapping[str, str]
    omitted: Mapping[str, str]
    source: bool = True

    def omission(self, module: str) -> str:
        """Why a module's package is not in this build; empty when it is, or when nobody said."""
        top = module.partition(".")[0]
        package = normal(PACKAGES.get(top, top))
        reason = self.omitted.get(package)
        if reason is None and top == "nemo_rl" and not self.source:
            return "no tier of this build names a project, so it brings no NeMo RL source"
        return "" if reason is None else f"{package} was left out of this build: {reason or 'no reason given'}"


def read(path: Path) -> Inventory:
    """An inventory: a list of packages, or an object with one under ``packages`` and, maybe, ``omitted``.

    Raises:
        CheckFailed: there is none, or it is not one.
    """
    try:
        value: Any = json.loads(path.read_text())
        packages = value["packages"] if isinstance(value, dict) else value
        versions = {normal(p["name"]): str(p["version"]) for p in packages}
        left = value.get("omitted", {}) if isinstance(value, dict) else {}
        omitted = {normal(name): str(reason) for name, reason in left.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckFailed(f"no inventory at {path}: {type(error).__name__}: {error}") from None
    if not versions:
        raise CheckFailed(f"the inventory {path} names no package")
    return Inventory(versions, omitted, _has_source(path.with_name("runtime.json")))


def _has_source(marker: Path) -> bool:
    try:
        return bool(json.loads(marker.read_text()).get("source", True))
    except (OSError, ValueError, AttributeError):
        return True


def compare(result: Result, inventory: Inventory) -> None:
    """What is installed is what the inventory says: nothing else, nothing missing, no other version."""
    found, wanted = installed(), inventory.versions
    missing = sorted(set(wanted) - set(found))
    more = sorted(set(found) - set(wanted))
    other = sorted(n for n in set(wanted) & set(found) if wanted[n] != found[n])
    both = sorted(set(inventory.omitted) & set(found))
    result.expect(not missing, f"{len(missing)} packages of the inventory are absent: {', '.join(missing[:5])}")
    result.expect(not more, f"{len(more)} packages are not in the inventory: {', '.join(more[:5])}")
    named = [f"{n} {found[n]} (inventory {wanted[n]})" for n in other[:5]]
    result.expect(not other, f"{len(other)} packages have another version: {', '.join(named)}")
    result.expect(not both, f"left out by the inventory, and installed: {', '.join(both[:5])}")
    result.details["packages"] = len(found)


def installed() -> dict[str, str]:
    """Package -> version. Where a name is there twice, the one that an import would find: the first on the path."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(normal(name), distribution.version)
    return found


def normal(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()
