"""From an index to one image: the platform's manifest, the config, and layers that are proved to be theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, ImageConfig, Index, Manifest, expect_media, parse_document
from oci_builder.model.errors import FormatError, IntegrityError, PolicyError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Image, Layer
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.store.blobs import DirStore
from oci_builder.wire.compress import Compression, decode, sniff

# Reads the bytes of a descriptor's document, verified.
ReadDocument = Callable[[Descriptor], bytes]

ATTESTATION = "vnd.docker.reference.type"


@dataclass(frozen=True, slots=True)
class Resolved:
    """One platform's manifest.

    Attributes:
        descriptor: of the manifest.
        manifest, data: parsed, and its bytes.
        trail: digests of the indexes on the way, outermost first.
    """

    descriptor: Descriptor
    manifest: Manifest
    data: bytes
    trail: tuple[Digest, ...] = ()


def resolve_manifest(
    root: Descriptor, read: ReadDocument, platform: str = "linux/amd64", limits: Limits = DEFAULT_LIMITS, depth: int = 0
) -> Resolved:
    """Follow indexes down to the platform's manifest.

    Raises:
        FormatError: ``media.mismatch``, ``json.*``, ``platform.missing``, ``platform.ambiguous``.
        PolicyError: ``limit.index_depth``.
    """
    where = str(root.digest)
    data = read(root)
    if root.media_type in media.MANIFEST_TYPES:
        manifest = parse_document(Manifest, data, where, limits)
        if manifest.media_type is not None:
            expect_media(manifest.media_type, frozenset({root.media_type}), where)
        return Resolved(root, manifest, data)
    expect_media(root.media_type, media.INDEX_TYPES, where)
    if depth >= limits.index_depth:
        raise PolicyError("limit.index_depth", f"{where}: indexes nested deeper than {limits.index_depth}", where=where)
    index = parse_document(Index, data, where, limits)
    if index.media_type is not None:
        expect_media(index.media_type, frozenset({root.media_type}), where)
    below = resolve_manifest(pick_manifest(index, platform, where), read, platform, limits, depth + 1)
    return Resolved(below.descriptor, below.manifest, below.data, (root.id, *below.trail))


def pick_manifest(index: Index, platform: str, where: str) -> Descriptor:
    """The entry for a platform (``os/architecture[/variant]``): exact first, then without a variant, then a lone one.

    Attestations are passed over, whether platform (containerd/containerd#8243) or annotation (openshift/oc-mirror#1526)
    marks them.

    Raises:
        FormatError: ``platform.missing``, ``platform.ambiguous``.
    """
    images = [d for d in index.manifests if not is_attestation(d)]
    system, _, rest = platform.partition("/")
    architecture, _, variant = rest.partition("/")
    same = [d for d in images if d.platform and (d.platform.os, d.platform.architecture) == (system, architecture)]
    exact = [d for d in same if ((d.platform.variant if d.platform else None) or "") == variant]
    lone = [d for d in images if d.platform is None] if len(images) == 1 else []
    found = exact or same or lone
    if not found:
        known = ", ".join(sorted(_platform(d) for d in images)) or "none"
        raise FormatError(
            "platform.missing", f"{where}: no image for {platform}; there is {known}", where=where,
            expected=platform, actual=known,
        )  # fmt: skip
    if len({d.digest for d in found}) > 1:
        raise FormatError(
            "platform.ambiguous", f"{where}: {len(found)} images for {platform}; name one by its digest", where=where,
            expected="1", actual=len(found),
        )  # fmt: skip
    return found[0]


def is_attestation(descriptor: Descriptor) -> bool:
    """Whether an index entry is evidence about an image and no image."""
    platform = descriptor.platform
    unknown = platform is not None and platform.os == "unknown" and platform.architecture == "unknown"
    return unknown or ATTESTATION in (descriptor.annotations or {})


def _platform(descriptor: Descriptor) -> str:
    found = descriptor.platform
    return "/".join(p for p in (found.os, found.architecture, found.variant) if p) if found else "an unnamed platform"


def check_platform(config: ImageConfig, platform: str, where: str) -> None:
    """The config must be of the platform asked for (redhat-performance/cloud-governance#1027).

    Raises:
        FormatError: ``platform.missing``.
    """
    actual = f"{config.os}/{config.architecture}"
    if actual != "/".join(platform.split("/")[:2]):
        raise FormatError(
            "platform.missing", f"{where}: the image is for {actual}, wanted {platform}", where=where,
            expected=platform, actual=actual,
        )  # fmt: skip


def check_layers(manifest: Manifest, config: ImageConfig, where: str) -> None:
    """The manifest's layers and the config's diff_ids must be as many, and of types that can be read.

    Raises:
        FormatError: ``config.layers``, ``config.rootfs``, ``media.mismatch``.
        PolicyError: ``media.foreign``.
    """
    if config.rootfs.type != "layers":
        raise FormatError("config.rootfs", f"{where}: rootfs.type is {show(config.rootfs.type)}", where=where)
    if len(manifest.layers) != len(config.rootfs.diff_ids):
        raise FormatError(
            "config.layers",
            f"{where}: {len(manifest.layers)} layers in the manifest, {len(config.rootfs.diff_ids)} diff_ids",
            where=where, expected=len(config.rootfs.diff_ids), actual=len(manifest.layers),
        )  # fmt: skip
    for layer in manifest.layers:
        if layer.media_type in media.FOREIGN_LAYERS:
            raise PolicyError(
                "media.foreign", f"{where}: layer {layer.digest} is to be fetched from elsewhere; that is refused",
                where=where, actual=layer.media_type,
            )  # fmt: skip
        expect_media(layer.media_type, frozenset(media.LAYER_COMPRESSION), f"{where}: layer {layer.digest}")


def admit_image(
    config_bytes: bytes, manifest: Manifest, store: DirStore, *, limits: Limits = DEFAULT_LIMITS,
    platform: str = "linux/amd64", emit: Emit = silent, threads: int = 2,
) -> Image:  # fmt: skip
    """The Image for documents whose layer blobs are in the store; every diff_id is recomputed from the bytes once.

    Raises:
        FormatError, PolicyError: as ``check_platform`` and ``check_layers``; the compression's own codes.
        IntegrityError: ``layer.diff_id``, ``blob.*``.
    """
    where = f"config {manifest.config.digest}"
    value = load_json(config_bytes, where, limits)
    config = parse_document(ImageConfig, config_bytes, where, limits)
    check_platform(config, platform, where)
    check_layers(manifest, config, where)
    pairs = list(zip(manifest.layers, config.rootfs.diff_ids, strict=True))
    with ThreadPoolExecutor(max(1, threads), "diff-id") as pool:
        sizes = list(pool.map(lambda p: prove_layer(p[0], Digest(p[1]), store, limits, emit), pairs))
    histories, empty = _histories(value, len(pairs))
    layers = tuple(
        Layer(_oci(d), Digest(diff_id), size, history)
        for (d, diff_id), size, history in zip(pairs, sizes, histories, strict=True)
    )
    settings = {k: v for k, v in value.items() if k not in ("rootfs", "history")}
    return Image(settings, layers, empty, None, len(layers))


def prove_layer(descriptor: Descriptor, diff_id: Digest, store: DirStore, limits: Limits, emit: Emit = silent) -> int:
    """Bytes of the layer's tar, once its diff_id is proved. Proved layers are remembered in the store.

    Raises:
        IntegrityError: ``layer.diff_id``, ``blob.size``.
        FormatError: ``media.compression`` when bytes and media type disagree.
    """
    where = f"layer {descriptor.digest}"
    known = store.recall(descriptor.id, "tar") if store.has(descriptor.id) else None
    if known is None:
        blob = store.open(descriptor.id)
        if blob.size != descriptor.size:
            raise IntegrityError(
                "blob.size", f"{where}: {blob.size} bytes, the manifest says {descriptor.size}", where=where,
                expected=descriptor.size, actual=blob.size,
            )  # fmt: skip
        compression = media.LAYER_COMPRESSION[descriptor.media_type]
        actual = sniff(blob.pread(8, 0))
        if actual != compression:
            raise FormatError(
                "media.compression", f"{where}: declared as {compression}, the bytes are {actual}", where=where,
                expected=compression, actual=actual,
            )  # fmt: skip
        digest, size = _hash_tar(blob_chunks=decode(blob, actual, limits=limits, where=where), emit=emit, task=where)
        known = {"diff_id": digest, "tar_size": size}
        store.remember(descriptor.id, "tar", known)
    if known["diff_id"] != diff_id:
        raise IntegrityError(
            "layer.diff_id", f"{where}: its tar hashes to {known['diff_id']}, the config says {diff_id}", where=where,
            expected=diff_id, actual=known["diff_id"],
        )  # fmt: skip
    return int(known["tar_size"])


def _hash_tar(blob_chunks: Iterator[bytes | memoryview], emit: Emit, task: str) -> tuple[Digest, int]:
    hashed, size = hashlib.sha256(), 0
    for chunk in blob_chunks:
        hashed.update(chunk)
        size += len(chunk)
        emit(Event("advance", task, len(chunk)))
    return Digest.from_hex(hashed.hexdigest()), size


def _oci(descriptor: Descriptor) -> Descriptor:
    """The same layer under its OCI media type: one family in a manifest (containerd/nerdctl#4384)."""
    compression: Compression = media.LAYER_COMPRESSION[descriptor.media_type]  # type: ignore[assignment]
    return Descriptor(media_type=media.oci_layer(compression), digest=descriptor.digest, size=descriptor.size)


def _histories(
    config: dict[str, object], layers: int
) -> tuple[list[dict[str, object]], tuple[tuple[int, dict[str, object]], ...]]:
    """History entries of layers and of empty steps. A history that does not fit the layers is dropped: it is advice."""
    history = [h for h in config.get("history") or [] if isinstance(h, dict)]  # type: ignore[attr-defined]
    full = [h for h in history if not h.get("empty_layer")]
    if len(full) != layers:
        return [{"created_by": "base"} for _ in range(layers)], ()
    empty, before = [], 0
    for entry in history:
        if entry.get("empty_layer"):
            empty.append((before, entry))
        else:
            before += 1
    return full, tuple(empty)
