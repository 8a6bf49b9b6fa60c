"""The OCI view of an archive: oci-layout, index.json, and all that they lead to."""

from __future__ import annotations

from oci_builder.judge.graph import Graph, is_artifact, is_attestation
from oci_builder.judge.image import ImageView, check_image, layer_of
from oci_builder.judge.names import CONTAINERD_NAME, REF_NAME, descriptor_names, image_name
from oci_builder.model import media
from oci_builder.model.documents import Descriptor, ImageConfig, Index, Manifest
from oci_builder.model.errors import show

_LAYOUT_VERSION = "1.0.0"

# Images by what led to them: digest, media type, depth, whether the platform is asked for, whether it is no image.
Seen = dict[tuple[str, str, int, bool, bool], list[ImageView]]


def oci_view(graph: Graph) -> list[ImageView]:
    """All images that index.json leads to, each checked."""
    if "index.json" not in graph.contents.members:
        return []
    _check_layout(graph)
    member = graph.member("index.json")
    index = graph.parse(Index, member, "index.json") if member else None
    if member is None or index is None:
        return []
    _check_own_type(graph, index, "index.json", media.OCI_INDEX)
    if graph.options.strict:
        _check_our_index(graph, index)
    images: list[ImageView] = []
    seen: Seen = {}
    for number, descriptor in enumerate(index.manifests):
        where = f"index.json: manifest {number}"
        if descriptor in index.manifests[:number]:
            graph.findings.warn("archive.images", where, "the same descriptor again: one is meant")
            continue
        images += _descend(graph, descriptor, where, 1, seen)
    if not index.manifests:
        graph.findings.error("archive.images", "index.json", "no image in it")
    merged = _merge_names(images)
    for image in merged:
        image.digests.add(member.digest)
    return merged


def _check_layout(graph: Graph) -> None:
    member = graph.member("oci-layout")
    if member is None:
        graph.findings.error("archive.missing", "oci-layout", "an OCI layout needs this file")
        return
    with graph.findings.collecting():
        value = graph.document(member, "oci-layout")
        version = value.get("imageLayoutVersion") if isinstance(value, dict) else None
        if version != _LAYOUT_VERSION:
            graph.findings.error(
                "layout.version", "oci-layout", "not a layout version that we know", expected=_LAYOUT_VERSION,
                actual=show(str(version)[:80]),
            )  # fmt: skip


def _check_own_type(graph: Graph, document: Index | Manifest, where: str, expected: str) -> None:
    if document.media_type is None:
        graph.findings.judge(graph.options.strict)("media.missing", where, "no mediaType", expected=expected)
    elif document.media_type != expected:
        graph.findings.error(
            "media.mismatch", where, "the document's mediaType is not what leads to it", expected=expected,
            actual=show(document.media_type),
        )  # fmt: skip


def _check_our_index(graph: Graph, index: Index) -> None:
    if len(index.manifests) != 1:
        graph.findings.error(
            "archive.images", "index.json", "our index has one image", expected=1, actual=len(index.manifests)
        )
    for descriptor in index.manifests:
        notes = descriptor.annotations or {}
        names = [notes.get(REF_NAME), notes.get(CONTAINERD_NAME)]
        if not all(names) or image_name(names[0] or "") != image_name(names[1] or ""):
            graph.findings.error(
                "archive.names", "index.json", f"{REF_NAME} and {CONTAINERD_NAME} must both give the full name",
                actual=show(str(names)),
            )  # fmt: skip


def _descend(graph: Graph, descriptor: Descriptor, where: str, depth: int, seen: Seen) -> list[ImageView]:
    """The images that a descriptor leads to; no document is walked twice, however many lead to it."""
    key = (descriptor.digest, descriptor.media_type, depth, _wanted(graph, descriptor), is_attestation(descriptor))
    if key not in seen:
        seen[key] = _follow(graph, descriptor, where, depth, seen)
    else:
        graph.blob(descriptor, where, needed=False)
        graph.spend(len(seen[key]))
    for image in seen[key]:
        image.names |= descriptor_names(descriptor)
        image.digests.add(descriptor.digest)
        if image.manifest and image.manifest.digest == descriptor.digest:
            _check_platform(graph, descriptor, image, where)
    return list(seen[key])


def _follow(graph: Graph, descriptor: Descriptor, where: str, depth: int, seen: Seen) -> list[ImageView]:
    if descriptor.media_type in media.INDEX_TYPES:
        return _nested(graph, descriptor, where, depth, seen)
    if descriptor.media_type in (media.DOCKER_SCHEMA1, media.DOCKER_SCHEMA1_SIGNED):
        graph.findings.error("media.schema1", where, "Docker manifest schema 1 is not supported")
        return []
    if descriptor.media_type not in media.MANIFEST_TYPES:
        graph.blob(descriptor, where)
        graph.findings.error(
            "media.mismatch", where, "neither a manifest nor an index", expected=media.OCI_MANIFEST,
            actual=show(descriptor.media_type),
        )  # fmt: skip
        return []
    if is_attestation(descriptor):
        _attestation(graph, descriptor, where)
        return []
    image = _image(graph, descriptor, where, needed=_wanted(graph, descriptor))
    return [image] if image else []


def _nested(graph: Graph, descriptor: Descriptor, where: str, depth: int, seen: Seen) -> list[ImageView]:
    most = graph.options.limits.index_depth
    member = graph.blob(descriptor, where)
    if depth >= most:
        graph.findings.error("limit.index_depth", where, f"indexes nested deeper than {most}", status=4)
        return []
    index = graph.parse(Index, member, where) if member else None
    if index is None:
        return []
    _check_own_type(graph, index, where, descriptor.media_type)
    images: list[ImageView] = []
    for number, inner in enumerate(index.manifests):
        images += _descend(graph, inner, f"{where}: manifest {number}", depth + 1, seen)
    return _merge_names(images)


def _attestation(graph: Graph, descriptor: Descriptor, where: str) -> None:
    """Not an image, it says; clients that look for no such mark may take it for one, so it is judged like one."""
    _image(graph, descriptor, where, needed=False)


def _check_artifact(graph: Graph, manifest: Manifest, where: str) -> None:
    for blob in (manifest.config, *manifest.layers):
        graph.blob(blob, f"{where}: artifact", needed=False)


def _image(graph: Graph, descriptor: Descriptor, where: str, *, needed: bool) -> ImageView | None:
    member = graph.blob(descriptor, where, needed=needed)
    manifest = graph.parse(Manifest, member, where) if member else None
    if manifest is None:
        return None
    _check_own_type(graph, manifest, where, descriptor.media_type)
    if is_artifact(manifest, descriptor):
        _check_artifact(graph, manifest, where)
        return None
    _check_family(graph, manifest, descriptor.media_type, where)
    config_member = graph.blob(manifest.config, f"{where}: config", needed=needed)
    if manifest.config.media_type not in media.CONFIG_TYPES:
        graph.findings.error(
            "media.mismatch", f"{where}: config", "not an image config", expected=media.OCI_CONFIG,
            actual=show(manifest.config.media_type),
        )  # fmt: skip
    config = graph.parse(ImageConfig, config_member, f"{where}: config") if config_member else None
    layers = [layer_of(graph, d, f"{where}: layer {n}", needed=needed) for n, d in enumerate(manifest.layers)]
    if config is None or config_member is None:
        return None
    image = ImageView(where, config, config_member, layers, descriptor)
    check_image(graph, image, len(manifest.layers))
    return image


def _check_family(graph: Graph, manifest: Manifest, kind: str, where: str) -> None:
    docker = kind == media.DOCKER_MANIFEST
    types = [manifest.config.media_type, *(layer.media_type for layer in manifest.layers)]
    if any(("docker" in one) != docker for one in types):
        judge = graph.findings.judge(graph.options.strict)
        judge("media.family", where, "Docker and OCI media types in one manifest: some clients refuse it")


def _wanted(graph: Graph, descriptor: Descriptor) -> bool:
    """Whether a manifest may be for the platform that is asked for."""
    found, asked = descriptor.platform, graph.options.platform.split("/")
    if found is None:
        return True
    return [found.os, found.architecture] == asked[:2] and (not found.variant or asked[2:] in ([], [found.variant]))


def _check_platform(graph: Graph, descriptor: Descriptor, image: ImageView, where: str) -> None:
    platform, config = descriptor.platform, image.config
    if platform and (platform.os, platform.architecture) != (config.os, config.architecture):
        # Told apart from the one that is asked for, by the index and by its own config: no client takes it for that.
        asked = _wanted(graph, descriptor) or image.platform == graph.options.platform
        graph.findings.judge(asked or graph.options.strict)(
            "config.platform", where, "the index and the config name different platforms",
            expected=f"{platform.os}/{platform.architecture}", actual=image.platform,
        )  # fmt: skip


def _merge_names(images: list[ImageView]) -> list[ImageView]:
    """One image under several names is several descriptors with one digest."""
    merged: dict[str, ImageView] = {}
    for image in images:
        key = image.manifest.digest if image.manifest else image.where
        if key in merged:
            merged[key].names |= image.names
            merged[key].digests |= image.digests
        else:
            merged[key] = image
    return list(merged.values())
