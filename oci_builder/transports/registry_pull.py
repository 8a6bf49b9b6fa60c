"""An image of a registry, by digest, into the store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from oci_builder.judge.options import JudgeOptions
from oci_builder.judge.survey import survey_manifest
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, ImageConfig, parse_document
from oci_builder.model.errors import IntegrityError, OciBuilderError, PolicyError, SpecError
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Image
from oci_builder.store.blobs import DirStore
from oci_builder.transports.admit import admit_image, prove_layer
from oci_builder.transports.registry import RegistryClient
from oci_builder.transports.registry_blobs import Stop, fetch_blob
from oci_builder.transports.registry_manifests import describe, fetch_manifest
from oci_builder.transports.registry_policy import RegistryOptions
from oci_builder.transports.registry_reference import Reference, pinned_reference
from oci_builder.transports.resolve import Resolved, check_layers, check_platform, resolve_manifest


@dataclass(frozen=True, slots=True)
class Pins:
    """Digests below the pinned one that are expected too, where the spec names them."""

    manifest: str | None = None
    config: str | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """One platform's image, all its bytes in the store.

    Attributes:
        reference: with the digest that was asked for.
        root: what that digest names, an index or a manifest.
        resolved: the platform's manifest; ``resolved.trail`` holds the indexes above it.
        config: the config's bytes.
    """

    reference: Reference
    root: Descriptor
    resolved: Resolved
    config: bytes

    @property
    def layers(self) -> tuple[Descriptor, ...]:
        """The layers, lowest first."""
        return self.resolved.manifest.layers


def fetch_image(
    client: RegistryClient, store: DirStore, platform: str = "linux/amd64", pins: Pins | None = None,
    emit: Emit = silent, *, prove: bool = True,
) -> Fetched:  # fmt: skip
    """Get the image that ``client.reference`` pins. Idempotent, and resumes what an earlier process left.

    Documents come first and are judged, platform included, before any layer is asked for (B091).

    Args:
        platform: ``os/architecture[/variant]``, taken from an index and demanded of the config.
        prove: also decompress each layer once and compare its tar with the config's diff_id.

    Raises:
        SpecError: ``spec.digest`` when the reference has none.
        FormatError: ``json.*``, ``media.*``, ``platform.*``, ``config.*``; with ``prove`` those of the compression.
        IntegrityError: ``blob.*``, ``pin.manifest``, ``pin.config``; with ``prove`` ``layer.diff_id``.
        PolicyError: ``limit.*``, ``media.foreign``, ``http.redirect``.
        TransportError: ``http.*``, ``auth``, ``io.*``.
    """
    reference, limits = client.reference, client.options.limits
    if reference.digest is None:
        raise SpecError("spec.digest", f"{reference}: no digest", where=str(reference))
    root = describe(fetch_manifest(client, reference.digest, store), reference.digest)
    resolved = resolve_manifest(root, lambda d: fetch_manifest(client, d.id, store, d.size), platform, limits)
    where = f"config {resolved.manifest.config.digest}"
    _check_pins(resolved, pins or Pins())
    config_bytes = _fetch_config(client, resolved.manifest.config, store, emit)
    judging = JudgeOptions(platform="/".join(platform.split("/")[:2]), limits=limits)
    survey_manifest(resolved.descriptor, resolved.data, config_bytes, judging)
    config = parse_document(ImageConfig, config_bytes, where, limits)
    check_platform(config, platform, where)
    check_layers(resolved.manifest, config, where)
    emit(Event("note", str(reference), message=f"{platform}: manifest {resolved.descriptor.digest}"))
    _fetch_layers(client, resolved, tuple(Digest(d) for d in config.rootfs.diff_ids) if prove else None, store, emit)
    return Fetched(reference, root, resolved, config_bytes)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A base from a registry.

    Attributes:
        image: its layers are in the store, and proved.
        manifest: digest of the platform's manifest.
        root: the digest that was asked for; an index's, or the manifest's own.
    """

    image: Image
    manifest: Digest
    root: Digest


def load_registry(
    ref: str, digest: str | None, store: DirStore, options: RegistryOptions | None = None, *,
    platform: str = "linux/amd64", pins: Pins | None = None, emit: Emit = silent,
) -> Loaded:  # fmt: skip
    """The base ``{"registry": ref, "digest": digest}``. Idempotent; a warm store makes no request.

    Raises:
        As ``fetch_image``; SpecError: ``spec.reference``, ``spec.digest``, ``spec.credentials``.
    """
    options = options or RegistryOptions()
    reference = pinned_reference(ref, Digest.parse(digest) if digest else None)
    with RegistryClient(reference, options, emit=emit) as client:
        fetched = fetch_image(client, store, platform, pins, emit, prove=False)
    manifest = fetched.resolved.manifest
    image = admit_image(fetched.config, manifest, store, limits=options.limits, platform=platform, emit=emit)
    return Loaded(image, fetched.resolved.descriptor.id, fetched.root.id)


def _check_pins(resolved: Resolved, pins: Pins) -> None:
    pairs = (
        ("manifest", pins.manifest, resolved.descriptor.digest),
        ("config", pins.config, resolved.manifest.config.digest),
    )
    for what, expected, actual in pairs:
        if expected is not None and expected != actual:
            raise IntegrityError(
                f"pin.{what}", f"the image's {what} is {actual}, the spec pins {expected}", where=what,
                expected=expected, actual=actual,
            )  # fmt: skip


def _fetch_config(client: RegistryClient, descriptor: Descriptor, store: DirStore, emit: Emit) -> bytes:
    limit = client.options.limits.document
    if descriptor.size > limit:
        raise PolicyError(
            "limit.document", f"config {descriptor.digest}: {descriptor.size} bytes, the limit is {limit}",
            where=descriptor.digest, expected=f"<= {limit}", actual=descriptor.size,
        )  # fmt: skip
    fetch_blob(client, descriptor, store, emit)
    return store.read(descriptor.id, limit)


def _fetch_layers(
    client: RegistryClient, resolved: Resolved, diff_ids: tuple[Digest, ...] | None, store: DirStore, emit: Emit
) -> None:
    """All layers, a few at a time; the first error ends the others, which keep what they have."""
    stop, limits = Stop(), client.options.limits
    jobs: dict[tuple[Digest, Digest | None], Callable[[], None]] = {}
    for number, layer in enumerate(resolved.manifest.layers):
        diff_id = diff_ids[number] if diff_ids else None

        def job(layer: Descriptor = layer, diff_id: Digest | None = diff_id) -> None:
            stop.check()
            fetch_blob(client, layer, store, emit, stop, follow=diff_id is not None)
            if diff_id is not None:
                prove_layer(layer, diff_id, store, limits, emit)

        jobs[layer.id, diff_id] = job
    with ThreadPoolExecutor(max(1, client.options.parallel), "pull") as pool:
        futures = [pool.submit(job) for job in jobs.values()]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            if any(not f.done() or f.exception() for f in futures):
                stop.ask()
    errors = [e for e in (f.exception() for f in futures) if e is not None]
    errors.sort(key=lambda e: isinstance(e, OciBuilderError) and e.code == "http.stopped")
    if errors:
        raise errors[0]
