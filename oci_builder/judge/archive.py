"""One archive, judged: both views, what they leave out, and which image is meant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oci_builder.judge.choice import select_image
from oci_builder.judge.contents import Contents, Intake, blob_name
from oci_builder.judge.docker import docker_view
from oci_builder.judge.graph import Graph
from oci_builder.judge.image import ImageView
from oci_builder.judge.names import agree
from oci_builder.judge.oci import oci_view
from oci_builder.judge.path import tree_hint
from oci_builder.model.errors import show


@dataclass(slots=True)
class Judged:
    """An archive with its images.

    Attributes:
        contents: what it holds.
        oci, docker: the images of its two views.
        image: the one that is asked for, or None when there is none or no one.
    """

    contents: Contents
    oci: list[ImageView] = field(default_factory=list)
    docker: list[ImageView] = field(default_factory=list)
    image: ImageView | None = None

    @property
    def kind(self) -> str:
        """``oci-layout``, ``oci-archive`` or ``docker-archive``."""
        if self.contents.is_folder:
            return "oci-layout"
        if "index.json" not in self.contents.members:
            return "docker-archive"
        if "manifest.json" not in self.contents.members:
            return "oci-archive"
        layers = self.image.layers if self.image else []
        plain = any(m and m.layer and m.layer.compression == "identity" for m in layers)
        return "docker-archive" if plain or self.contents.outer != "identity" else "oci-archive"

    def to_json(self, profile: str) -> dict[str, Any]:
        """The subject of a report."""
        return {
            "path": str(self.contents.path),
            "kind": self.kind,
            "sha256": self.contents.digest.hex if self.contents.digest else None,
            "size": self.contents.size,
            "outer_compression": self.contents.outer,
            "profile": profile,
            **(self.image.to_json() if self.image else {}),
        }


def judge(intake: Intake) -> Judged:
    """Judge what was read."""
    graph = Graph(intake)
    judged = Judged(intake.contents)
    members = intake.contents.members
    if "index.json" not in members and "manifest.json" not in members:
        if intake.contents.complete:
            message = "no image: neither index.json (OCI) nor manifest.json (docker save) is in it"
            message += next(filter(None, map(tree_hint, (*members, *intake.contents.folders))), "")
            intake.findings.error("archive.missing", "", message, expected="index.json or manifest.json")
        return judged
    with intake.findings.collecting():
        judged.oci, judged.docker = oci_view(graph), docker_view(graph)
        return _concluded(graph, judged)
    return judged


def _concluded(graph: Graph, judged: Judged) -> Judged:
    """What the two views, each judged, are together."""
    intake = graph.intake
    judged.image = select_image(graph, judged.oci, judged.docker)
    if judged.oci or ("index.json" in graph.contents.members and not intake.findings.failed):
        _compare_views(graph, judged)
    _check_blob_names(graph)
    _check_between_members(graph, judged)
    if not graph.unread:
        _check_extra(graph)
    if not intake.contents.complete:
        intake.findings.drop("archive.missing", "archive.extra")
    return judged


def _compare_views(graph: Graph, judged: Judged) -> None:
    """Clients pick either view; both must show the same image."""
    findings = graph.findings
    by_config = {image.config_member.digest: image for image in judged.oci}
    for docker in judged.docker:
        oci = by_config.get(docker.config_member.digest)
        if oci is None:
            findings.error(
                "archive.views", docker.where, "manifest.json shows an image that index.json does not",
                expected=", ".join(by_config), actual=docker.config_member.digest,
            )  # fmt: skip
            continue
        for index, (one, other) in enumerate(zip(oci.layers, docker.layers, strict=False)):
            if one and other and one.digest != other.digest:
                findings.error(
                    "archive.views", f"{docker.where}: layer {index}", "the two views name different bytes",
                    expected=one.digest, actual=other.digest,
                )  # fmt: skip
        if not agree(oci.names, docker.names):
            findings.error(
                "archive.views", docker.where, "the two views call the image differently",
                expected=", ".join(sorted(map(show, oci.names))), actual=", ".join(sorted(map(show, docker.names))),
            )  # fmt: skip


def _check_blob_names(graph: Graph) -> None:
    """A blob's name is its digest, whether or not anything refers to it."""
    for name, member in graph.contents.members.items():
        wanted = blob_name(name)
        if wanted and wanted != member.digest.hex:
            graph.findings.error(
                "blob.digest", name, "a blob's name is its SHA-256, and it is not", expected=f"sha256:{wanted}",
                actual=member.digest,
            )  # fmt: skip


def _check_between_members(graph: Graph, judged: Judged) -> None:
    """In an archive of ours, only the layers of a base may hold gzip members of another writer."""
    contents = graph.contents
    if not contents.complete:
        return  # Which members are layers is not known.
    layers = {member.name for image in (*judged.oci, *judged.docker) for member in image.layers if member}
    for name, at in contents.foreign_members.items():
        if contents.written_by_us and name not in layers:
            message = f"the gzip member at byte {at} is not as we write it, among others that are: changed"
            graph.findings.error("gzip.header", name, message)
    for name, at in contents.pressed_members.items():
        if name not in layers:
            message = f"the gzip member at byte {at} is compressed, where we only store: changed"
            graph.findings.error("gzip.data", name, message)


def _check_extra(graph: Graph) -> None:
    strict = graph.options.strict
    for name in (*graph.contents.members, *graph.contents.links):
        if name not in graph.used:
            message = "nothing refers to it"
            graph.findings.judge(strict)("archive.extra", show(name.encode(errors="surrogateescape")), message)
    if strict:
        for folder in graph.contents.folders:
            if folder and not any(name.startswith(folder + "/") for name in graph.contents.members):
                graph.findings.error("archive.extra", show(folder), "an empty folder")
