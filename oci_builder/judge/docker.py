"""The Docker view of an archive: manifest.json and what it names (moby image/tarexport)."""

from __future__ import annotations

import re

from oci_builder.judge.contents import Member
from oci_builder.judge.graph import Graph
from oci_builder.judge.image import ImageView, check_image
from oci_builder.judge.names import image_name, is_repo_tag
from oci_builder.model.documents import DockerArchiveItem, ImageConfig, validate
from oci_builder.model.errors import FormatError, show

_HEX_NAME = re.compile(r"(?:.*/)?([0-9a-f]{64})(?:\.json)?\Z")
_LEGACY = re.compile(r"[0-9a-f]{64}/(?:VERSION|json|layer\.tar)\Z")


def docker_view(graph: Graph) -> list[ImageView]:
    """All images of manifest.json, each checked."""
    member = graph.member("manifest.json")
    if member is None:
        return []
    items: list[DockerArchiveItem] = []
    graph.unread, unread = True, graph.unread
    with graph.findings.collecting():
        where = f"{graph.findings.where}: manifest.json"
        value = graph.document(member, "manifest.json", most=graph.options.limits.docker_manifest)
        if not isinstance(value, list):
            hint = "; this is a manifest, as in a folder of dir: copy that to oci:" if _of_dir(value) else ""
            raise FormatError(
                "json.field", f"{where}: expected a list of images{hint}", where=where, actual=show(repr(value)[:60])
            )
        limits = graph.options.limits
        items = [validate(DockerArchiveItem, item, f"{where}: image {n}", limits) for n, item in enumerate(value)]
        if not items:
            raise FormatError("archive.images", f"{where}: no image in it", where=where, expected=1, actual=0)
        graph.unread = unread
    if len(items) > 1:
        judge = graph.findings.judge(graph.options.strict)
        judge("archive.images", "manifest.json", "more than one image", expected=1, actual=len(items))
    _legacy(graph)
    images = [_image(graph, item, f"manifest.json: image {n}") for n, item in enumerate(items)]
    return [image for image in images if image]


def _of_dir(value: object) -> bool:
    """Whether it is what skopeo's and podman's ``dir:`` has under this name: a manifest, a list of them, a schema 1."""
    return isinstance(value, dict) and not value.keys().isdisjoint(("layers", "manifests", "fsLayers"))


def _image(graph: Graph, item: DockerArchiveItem, where: str) -> ImageView | None:
    names = _names(graph, item, where)
    member = graph.member(item.config)
    layers = [_layer(graph, name, f"{where}: layer {n}") for n, name in enumerate(item.layers or ())]
    if member is None:
        graph.findings.error("archive.missing", where, f"the config {show(item.config)} is not in the archive")
        return None
    found = _HEX_NAME.match(item.config)
    if found and found.group(1) != member.digest.hex:
        graph.findings.error(
            "archive.config_name", where, "the config's name is its SHA-256, and it is not",
            expected=found.group(1), actual=member.digest.hex,
        )  # fmt: skip
    config = graph.parse(ImageConfig, member, f"{where}: config")
    if config is None:
        return None
    image = ImageView(where, config, member, layers, None, names)
    check_image(graph, image, len(layers))
    return image


def _layer(graph: Graph, name: str, where: str) -> Member | None:
    if not name:
        graph.findings.error("archive.missing", where, "an empty name: some loaders take it, others refuse it")
        return None
    member = graph.member(name)
    if member is None:
        graph.findings.error("archive.missing", where, f"{show(name)} is not in the archive", expected=show(name))
        return None
    if name in graph.contents.links:
        graph.findings.warn("archive.member", where, "a symbolic link to another member, as old docker save writes")
    if graph.intake.layer_facts(member).compression == "zstd":
        graph.findings.warn("media.compression", where, "a zstd layer: Docker before 23 does not load it")
    return member


def _names(graph: Graph, item: DockerArchiveItem, where: str) -> set[str]:
    for tag in item.repo_tags or ():
        if not is_repo_tag(tag):
            graph.findings.error(
                "archive.tag", where, f"{show(tag[:200])} is no image name with a tag", actual=show(tag[:200])
            )
    if not item.repo_tags:
        graph.findings.judge(graph.options.strict)("archive.tag", where, "no RepoTags: it loads without a name")
    return {image_name(tag) for tag in item.repo_tags or ()}


def _legacy(graph: Graph) -> None:
    """Files that docker save wrote for loaders of version 1; nobody reads them any more."""
    for name in (*graph.contents.members, *graph.contents.links):
        if _LEGACY.match(name):
            graph.used.add(name)
    member = graph.contents.get("repositories")
    if member is not None:
        graph.used.add("repositories")
        with graph.findings.collecting():
            graph.document(member, "repositories")
