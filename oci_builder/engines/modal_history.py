"""The history of projects that lies outside of their folders, made ready to travel to a container of Modal.

A clone of its own travels with its ``.git``. The ``.git`` of a submodule or a worktree leads out of it, and a folder of
a larger repository has none: there the container gets repositories of their own, with all that the checkout's commit
and tags reach, so that what a build makes of the commit there is what it makes of it here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from oci_builder.engines.modal_inputs import As, Item
from oci_builder.model.errors import SpecError, show
from oci_builder.payload.checkout import carry, has_own_history, prefix_of, submodules, top_of


@dataclass(frozen=True, slots=True)
class Carried:
    """What goes along for projects.

    Attributes:
        above: folders from the outermost checkout down to the spec's, where that lies in it; else none.
        items: name in the tar -> a repository, in the place of whatever is called so here.
    """

    above: str = ""
    items: Mapping[str, Item] = field(default_factory=dict)


def carry_projects(projects: Mapping[str, str], folder: Path, scratch: Path) -> Carried:
    """Repositories for the projects whose own cannot be sent as it is.

    Args:
        projects: a project's path below the spec's folder -> field of the spec that names it; checked already.
        folder: the spec's.
        scratch: an empty folder, for what is made.

    Raises:
        SpecError: ``payload.history``: a folder of a larger repository that is named through a link;
            ``payload.commit``: git refuses.
    """
    inside: dict[Path, list[Path]] = {}
    fields: dict[Path, str] = {}
    for name, where in sorted(projects.items()):
        project = folder / name
        top = _top(project, where)
        if top != project or not has_own_history(project, where):
            inside.setdefault(top, []).append(project)
            fields.setdefault(top, where)
    root = min((top for top in inside if folder.is_relative_to(top)), key=lambda top: len(top.parts), default=folder)
    items: dict[str, Item] = {}
    for top, projects_there in inside.items():
        for place in (top, *_checked_out(top, fields[top])):
            made = carry(place, _kept(place, projects_there), scratch / str(len(items)), fields[top])
            items[str(PurePosixPath("spec", place.relative_to(root), ".git"))] = Item(made, As.HISTORY)
    return Carried(str(folder.relative_to(root)), items)


def _top(project: Path, where: str) -> Path:
    """The top folder of the project's checkout, in the words that name the project."""
    prefix = PurePosixPath(prefix_of(project, where)).parts
    top = project.parents[len(prefix) - 1] if prefix else project
    if project.parts[len(top.parts) :] == prefix and os.path.realpath(top) == os.path.realpath(top_of(project, where)):
        return top
    raise SpecError(
        "payload.history", f"{where}: {show(str(project))} is a folder of a larger repository that is named through a "
        "link, which cannot be sent as it is: name it where it lies", where=f"{where}.project",
    )  # fmt: skip


def _checked_out(top: Path, where: str) -> Iterator[Path]:
    """The submodules that a checkout has, and theirs."""
    for path, _ in submodules(top, "HEAD", where):
        if (top / path / ".git").exists():
            yield top / path
            yield from _checked_out(top / path, where)


def _kept(place: Path, projects: Sequence[Path]) -> list[str]:
    """Which folders of a checkout travel: all of one in a project, the projects of one around them."""
    if any(place.is_relative_to(project) for project in projects):
        return [""]
    return [str(project.relative_to(place)) for project in projects if project.is_relative_to(place)]
