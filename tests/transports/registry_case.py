"""What the registry tests share: a client without pauses and without anybody's credentials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.events import Emit, silent
from oci_builder.release.attach import Artifact
from oci_builder.store.blobs import DirStore
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_policy import RegistryOptions
from oci_builder.transports.registry_pull import Fetched, Pins, fetch_image
from oci_builder.transports.registry_reference import Reference
from tests.lab.registry import Registry

OPTIONS = RegistryOptions(find_credential=lambda _host, _repo: None, sleep=lambda _seconds: None)
REPO = "team/app"
# What is attached to images.
SBOM = Artifact("application/vnd.cyclonedx+json", "application/vnd.cyclonedx+json", {"a.cdx.json": b"{}1"})
RECEIPT = Artifact("application/vnd.test.receipt", "application/json", {"r.json": b"r", "s.json": b"s"}, {"k": "v"})


class Waits:
    """A sleep that only remembers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def client_of(registry: Registry, digest: Digest | None, repo: str = "team/app", **options: Any) -> RegistryClient:
    """A client for one repository."""
    return RegistryClient(Reference(registry.host, repo, None, digest), replace(OPTIONS, **options))


def pull_from(
    registry: Registry, digest: Digest, root: Path, repo: str = REPO, *, platform: str = "linux/amd64",
    pins: Pins | None = None, emit: Emit = silent, **options: Any,
) -> Fetched:  # fmt: skip
    """Pull into a store below ``root``; layers are proved."""
    with DirStore(root / "store") as store, client_of(registry, digest, repo, **options) as client:
        return fetch_image(client, store, platform, pins, emit)


def held(root: Path) -> set[str]:
    """Digests in the store below ``root``."""
    return set(DirStore(root / "store").digests())


def partials(root: Path) -> list[str]:
    """Names of partial files in that store."""
    return sorted(p.name for p in (root / "store" / "ingest").iterdir())
