"""One image: manifest, config and layers held against each other and against the bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from oci_builder.judge.contents import Member
from oci_builder.judge.graph import LAYER_NAMES, Graph
from oci_builder.judge.layer import LayerFacts
from oci_builder.model import media
from oci_builder.model.documents import Descriptor, ImageConfig
from oci_builder.model.env import is_hollow, names_one_folder
from oci_builder.model.errors import show
from oci_builder.rootfs.tree_log import judge_tree
from oci_builder.wire.tar import name_key, too_many_folders

OUR_HISTORY = "oci-builder:"


@dataclass(slots=True)
class ImageView:
    """An image as one view of an archive shows it.

    Attributes:
        where: for messages.
        config, config_member: the config, parsed and as a member.
        layers: the members, lowest first; None where one is missing.
        manifest: its descriptor, in an OCI view.
        names: what the image is called.
        digests: of its manifest and of the indexes that lead to it.
    """

    where: str
    config: ImageConfig
    config_member: Member
    layers: list[Member | None] = field(default_factory=list)
    manifest: Descriptor | None = None
    names: set[str] = field(default_factory=set)
    digests: set[str] = field(default_factory=set)

    @property
    def platform(self) -> str:
        """``os/architecture`` or ``os/architecture/variant``."""
        parts = (self.config.os, self.config.architecture, self.config.variant)
        return "/".join(part for part in parts if part)

    @property
    def diff_ids(self) -> list[str]:
        """What the config says that the layers are."""
        return list(self.config.rootfs.diff_ids)

    def to_json(self) -> dict[str, Any]:
        """The image part of a report's subject."""
        layers = [
            {"digest": m.digest, "size": m.size, "diff_id": m.layer.diff_id, "tar_size": m.layer.tar_size,
             "compression": m.layer.compression}
            for m in self.layers if m and m.layer
        ]  # fmt: skip
        return {
            "manifest": self.manifest.digest if self.manifest else None,
            "config": self.config_member.digest,
            "platform": self.platform,
            "names": sorted(self.names),
            "layers": layers,
        }


def check_image(graph: Graph, image: ImageView, count: int) -> None:
    """Check config and layers of an image whose manifest lists ``count`` layers."""
    findings, where, config = graph.findings, image.where, image.config
    expected = len(config.rootfs.diff_ids)
    if config.rootfs.type != "layers":
        findings.error(
            "config.rootfs", where, "rootfs.type must be layers", expected="layers", actual=config.rootfs.type
        )
    if count != expected:
        findings.error(
            "config.layers", where, f"{count} layers against {expected} diff_ids in the config", expected=expected,
            actual=count,
        )  # fmt: skip
    if config.history is not None:
        steps = sum(not step.empty_layer for step in config.history)
        if steps != expected:
            # Tools that append a layer to an image without a history leave it short (crane); nobody has said too much.
            judge = findings.judge(steps > expected or graph.options.strict)
            judge(
                "config.history", where, f"the history tells of {steps} layers, the config has {expected}",
                expected=expected, actual=steps,
            )  # fmt: skip
    check_env(graph, image)
    check_layers(graph, image)


def check_env(graph: Graph, image: ImageView) -> None:
    """Environment variables: NAME=value, once each, and no path that begins or ends with a colon (vllm#36077)."""
    findings, where = graph.findings, image.where
    seen: set[str] = set()
    for text in (image.config.config.env if image.config.config else None) or ():
        name, equals, value = text.partition("=")
        shown = show(text[:200])
        if not name or not equals or "\0" in text:
            # Without an equals sign it sets nothing, and Docker's builder once let it through.
            judge = findings.judge(not name or "\0" in text or graph.options.strict)
            judge("config.env", where, f"not NAME=value: {shown}", actual=shown)
        if name in seen:
            findings.warn("config.env", where, f"{show(name)} is set twice")
        seen.add(name)
        hollow = is_hollow(name, value)
        if hollow and names_one_folder(name):
            findings.error("config.env", where, f"a folder that begins or ends with a colon: {shown}", actual=shown)
        elif hollow:
            judge = findings.judge(graph.options.strict)
            judge("config.env", where, f"an empty path component means the current folder: {shown}", actual=shown)


def check_layers(graph: Graph, image: ImageView) -> None:
    """Each layer against its diff_id and the rules of a layer tar, and hard links across layers (B096)."""
    findings, total = graph.findings, 0
    lower: dict[int, LayerFacts] = {}
    every: list[LayerFacts] = []
    for index, member in enumerate(image.layers):
        if member is None:
            continue
        where = f"{image.where}: layer {index} ({member.name})"
        facts = graph.intake.layer_facts(member)
        graph.revisit(member.name, 1 + facts.weight // LAYER_NAMES)
        for problem in facts.problems:
            findings.take(problem)
        for code, message in facts.warnings:
            findings.warn(code, where, message)
        _check_diff_id(graph, image, index, facts, where)
        _check_rules(graph, image, index, facts, where)
        _check_links(graph, facts, lower.values(), where, graph.options.strict and is_ours(image, index))
        lower[id(facts)] = facts
        every.append(facts)
        total += facts.tar_size
    _check_tree(graph, image, every)
    most = graph.options.limits.folders
    if sum(facts.log.folders.count for facts in every) > most:
        findings.take(too_many_folders(image.where, most))
    most = graph.options.limits.image_size
    if total > most:
        message = f"{total} bytes uncompressed; raise limits.image_size if the image is really meant to be so large"
        findings.error("limit.image", image.where, message, expected=f"<= {most}", status=4)


def _check_diff_id(graph: Graph, image: ImageView, index: int, facts: LayerFacts, where: str) -> None:
    wanted = image.diff_ids[index] if index < len(image.diff_ids) else None
    if wanted is not None and facts.diff_id is not None and wanted != facts.diff_id:
        graph.findings.error(
            "layer.diff_id", where, "the uncompressed bytes are not those that the config names", expected=wanted,
            actual=facts.diff_id,
        )  # fmt: skip


def is_ours(image: ImageView, index: int) -> bool:
    """Whether the history says that a layer is one of ours, and no base's."""
    steps = [step for step in image.config.history or () if not step.empty_layer]
    return index < len(steps) and (steps[index].created_by or "").startswith(OUR_HISTORY)


def _check_rules(graph: Graph, image: ImageView, index: int, facts: LayerFacts, where: str) -> None:
    ours = is_ours(image, index)
    for problem in facts.rule_breaks:
        if ours and graph.options.strict:
            graph.findings.take(problem)
        elif problem.code == "entry.device":
            graph.findings.warn(problem.code, where, problem.message)
    foreign = graph.contents.foreign_members.get(image.layers[index].name) if image.layers[index] else None  # type: ignore[union-attr]
    if ours and foreign is not None and graph.contents.written_by_us:
        graph.findings.error(
            "gzip.header", where, f"the gzip member at byte {foreign} of the archive is not as we write it: changed",
        )  # fmt: skip


def _check_links(graph: Graph, facts: LayerFacts, lower: Iterable[LayerFacts], where: str, ours: bool) -> None:
    """What is legal of hard links, and not how ours are: into a lower layer, and before their target."""
    for name, target in facts.open_links:
        shown, key = f"{show(name)} -> {show(target)}", name_key(target)
        if any(layer.names.knows_key(key) for layer in lower):
            if ours:
                message = "a hard link into a lower layer; ours never cross layers"
                graph.findings.error("entry.link_target", where, f"{shown}: {message}", status=4)
        elif facts.names.knows_key(key):
            graph.findings.judge(ours)("entry.link_target", where, f"{shown}: a hard link before its target")


def _check_tree(graph: Graph, image: ImageView, layers: list[LayerFacts]) -> None:
    """The tree that the layers make together, where each of them is there and could be read."""
    if None in image.layers or any(facts.diff_id is None or facts.problems for facts in layers):
        return
    below: list[bytes] = []

    def note(path: bytes) -> None:
        if not below:
            below.append(path)

    problem = judge_tree([facts.tree for facts in layers], image.where, graph.options.limits, note)
    if problem is not None:
        graph.findings.take(problem)
    elif below:
        message = f"{show(below[0][:300])}: entries below what is no folder; Docker refuses that, we replace it"
        graph.findings.warn("entry.parent", image.where, message)


def layer_of(graph: Graph, descriptor: Descriptor, where: str, *, needed: bool = True) -> Member | None:
    """The layer of a manifest's descriptor, its media type held against its bytes (code ``media.mismatch``).

    Args:
        needed: False where the image is for a platform that nobody asked for: what it lacks is then no error.
    """
    kind = descriptor.media_type
    if kind in media.FOREIGN_LAYERS:
        message = f"{kind}: a layer to be fetched from elsewhere is refused, never fetched"
        if needed:
            graph.findings.error("media.foreign", where, message, actual=kind, status=4)
        else:
            graph.findings.warn("media.foreign", where, message, actual=kind)
        return None
    member = graph.blob(descriptor, where, needed=needed)
    declared = media.LAYER_COMPRESSION.get(kind)
    if declared is None:
        message = "not the media type of a layer that we know"
        if kind.endswith("+encrypted"):
            message = "an encrypted layer: decrypt the image first (skopeo copy --decryption-key)"
        graph.findings.error("media.mismatch", where, message, actual=show(kind))
    elif member is not None:
        actual = graph.intake.layer_facts(member).compression
        if actual != declared:
            graph.findings.error(
                "media.mismatch", where, f"declared as {kind}, but the bytes are {actual}", expected=declared,
                actual=actual,
            )  # fmt: skip
    return member
