"""From an index to one image's documents: the platform's manifest and the config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from oci_builder.judge.choice import choose_descriptors
from oci_builder.judge.graph import is_attestation, right_kind
from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, Document, ImageConfig, Index, Manifest, expect_media, validate
from oci_builder.model.errors import FormatError, PolicyError, show
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits

D = TypeVar("D", bound=Document)
# Reads the bytes of a descriptor's document, verified.
ReadDocument = Callable[[Descriptor], bytes]


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
    root: Descriptor, read: ReadDocument, platform: str = "linux/amd64", limits: Limits = DEFAULT_LIMITS,
    depth: int = 0, *, image: str = "",
) -> Resolved:  # fmt: skip
    """Follow indexes down to the platform's manifest.

    Args:
        image: name or digest of the one that is meant, where ``root`` names several.

    Raises:
        SpecError: ``spec.image``, ``spec.digest``.
        FormatError: ``media.mismatch``, ``json.*``, ``platform.missing``, ``platform.ambiguous``.
        PolicyError: ``limit.index_depth``.
    """
    where = str(root.digest)
    data = read(root)
    if root.media_type in media.MANIFEST_TYPES:
        manifest = _parse(Manifest, data, where, limits)
        if manifest.media_type is not None:
            expect_media(manifest.media_type, frozenset({root.media_type}), where)
        return Resolved(root, manifest, data)
    expect_media(root.media_type, media.INDEX_TYPES, where)
    if depth >= limits.index_depth:
        raise PolicyError("limit.index_depth", f"{where}: indexes nested deeper than {limits.index_depth}", where=where)
    index = _parse(Index, data, where, limits)
    if index.media_type is not None:
        expect_media(index.media_type, frozenset({root.media_type}), where)
    index = index.model_copy(update={"manifests": choose_descriptors(image, index.manifests, where)})
    below = resolve_manifest(pick_manifest(index, platform, where), read, platform, limits, depth + 1)
    return Resolved(below.descriptor, below.manifest, below.data, (root.id, *below.trail))


def _parse(model: type[D], data: bytes, where: str, limits: Limits) -> D:
    value = load_json(data, where, limits)
    right_kind(model, value, where)
    return validate(model, value, where, limits)


def pick_manifest(index: Index, platform: str, where: str) -> Descriptor:
    """The entry for a platform (``os/architecture[/variant]``): exact first, then without a variant, then a lone one.

    Attestations are passed over, whether platform (containerd/containerd#8243) or annotation (openshift/oc-mirror#1526)
    marks them; so are artifacts (a layout's referrers).

    Raises:
        FormatError: ``platform.missing``, ``platform.ambiguous``.
    """
    images = [d for d in index.manifests if not is_attestation(d) and (d.platform or not d.artifact_type)]
    system, _, rest = platform.partition("/")
    architecture, _, variant = rest.partition("/")
    same = [d for d in images if d.platform and (d.platform.os, d.platform.architecture) == (system, architecture)]
    exact = [d for d in same if ((d.platform.variant if d.platform else None) or "") == variant]
    # One image under several names stands several times, often without a platform.
    lone = [d for d in images if d.platform is None] if len({d.digest for d in images}) == 1 else []
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
