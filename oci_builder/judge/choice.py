"""Which image of an archive is meant: by its name, by a digest, and by the platform."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from oci_builder.judge.graph import Graph
from oci_builder.judge.image import ImageView
from oci_builder.judge.names import descriptor_names, image_name
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import SpecError, show

_MOST_NAMED = 20


def select_image(graph: Graph, oci: Sequence[ImageView], docker: Sequence[ImageView]) -> ImageView | None:
    """The image that is asked for; None when there is none, or no one. Why is a finding then."""
    images = list(oci or docker)
    if not images:
        if not graph.unread and not graph.findings.failed:
            graph.findings.error("archive.images", "", "no image in it", expected=1, actual=0)
        return None
    named = _by_name(graph, images, docker) if graph.options.image else images
    fitting = _by_platform(graph, named) if named else []
    if len({image.config_member.digest for image in fitting}) <= 1:
        return fitting[0] if fitting else None
    # Images that have names of their own, or that both views list, were put together on purpose, as docker save does.
    on_purpose = _named_apart(fitting) or _all_in(fitting, docker)
    doubtful = bool(graph.options.image) or ("index.json" in graph.contents.members and not on_purpose)
    judge_it = graph.findings.judge(doubtful or graph.options.strict)
    shown = ", ".join(_called(image) for image in fitting[:_MOST_NAMED])
    message = f"{len(fitting)} images for {graph.options.platform}; say with --image which is meant: {shown}"
    judge_it("platform.ambiguous", "", message, expected=1, actual=len(fitting))
    return None if doubtful else fitting[0]


def fits(asked: str, names: Iterable[str], digests: Iterable[str]) -> bool:
    """Whether an image is the one that is asked for: a name, a digest, or ``name@digest``.

    Args:
        asked: in any spelling; a name without a tag means ``latest``, as with docker.
        names: as ``image_name`` gives them; a bare tag (ref.name) is one.

    >>> fits("docker.io/library/a:1", ["a:1"], []), fits("a", ["a:latest"], []), fits("a:2", ["a:1"], [])
    (True, True, False)
    """
    name, _, digest = ("", "", asked) if _is_digest(asked) else asked.partition("@")
    if digest and digest not in digests:
        return False
    wanted = image_name(name)
    tagged = wanted if ":" in wanted.rpartition("/")[2] else f"{wanted}:latest"
    return not name or any(one in (wanted, tagged) or wanted.endswith(f":{one}") for one in names)


def choose_descriptors(asked: str, found: Sequence[Descriptor], where: str) -> tuple[Descriptor, ...]:
    """Those of ``index.json``'s descriptors that are asked for; all when nothing is.

    Raises:
        SpecError: ``spec.image``, ``spec.digest``: none is.
    """
    fitting = tuple(d for d in found if not asked or fits(asked, descriptor_names(d), (d.digest,)))
    if not fitting:
        raise not_there(asked, {name for d in found for name in descriptor_names(d)}, where)
    return fitting


def not_there(asked: str, names: Iterable[str], where: str) -> SpecError:
    """``spec.image``, or ``spec.digest`` where a digest was asked for: no image is called so."""
    known = ", ".join(sorted(map(show, names))[:_MOST_NAMED]) or "none that has a name"
    code = "spec.digest" if _is_digest(asked) else "spec.image"
    message = f"{where}: there is no image {show(asked[:300])} in it; there is {known}"
    return SpecError(code, message, where=where, expected=asked[:300], actual=known)


def _by_name(graph: Graph, images: list[ImageView], docker: Sequence[ImageView]) -> list[ImageView]:
    asked = graph.options.image
    more: Mapping[str, set[str]] = {image.config_member.digest: image.names for image in docker}
    named = [(image, image.names | more.get(image.config_member.digest, set())) for image in images]
    found = [image for image, names in named if fits(asked, names, {*image.digests, image.config_member.digest})]
    if not found:
        graph.findings.take(not_there(asked, {n for _, names in named for n in names}, graph.findings.where))
    return found


def _by_platform(graph: Graph, images: list[ImageView]) -> list[ImageView]:
    """Those of the asked platform: exact first, then without regard to the variant (apptainer#2895)."""
    asked = graph.options.platform
    fitting = [i for i in images if i.platform == asked]
    fitting = fitting or [i for i in images if i.platform.startswith(asked + "/")]
    if not fitting:
        found = ", ".join(sorted({show(i.platform[:80]) for i in images})[:_MOST_NAMED])
        message = f"no image for {asked}; there is {found}: ask with --platform"
        graph.findings.error("platform.missing", "", message, expected=asked, actual=found)
    return fitting


def _named_apart(images: list[ImageView]) -> bool:
    names = [name for image in images for name in image.names]
    return all(image.names for image in images) and len(names) == len(set(names))


def _all_in(images: list[ImageView], docker: Sequence[ImageView]) -> bool:
    listed = {image.config_member.digest for image in docker}
    return all(image.config_member.digest in listed for image in images)


def _called(image: ImageView) -> str:
    """Its names, or the digest to ask for."""
    digest = image.manifest.digest if image.manifest else image.config_member.digest
    return " = ".join(show(name[:200]) for name in sorted(image.names)[:3]) or digest


def _is_digest(text: str) -> bool:
    return text.startswith("sha256:")
