"""The same content in every form that an image comes in: name of the form -> what writes it into a folder."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.lab.archives import Lab, Members, tar, unchanged, write, write_layout

Build = Callable[[Path], Path]
Shapes = Mapping[str, Build]


def _archive(members: Callable[[], Members], compress: bool = False) -> Build:
    return lambda folder: write(folder / "archive.tar", members(), compress=compress)


def _layout(lab: Lab) -> Build:
    return lambda folder: write_layout(folder / "archive.tar", lab.oci())


def _legacy(lab: Lab) -> Build:
    def build(folder: Path) -> Path:
        (folder / "archive.tar").write_bytes(gzip.compress(tar(*lab.legacy()), 1))
        return folder / "archive.tar"

    return build


def layer_shapes(layers: list[bytes]) -> Shapes:
    """Layers whose tar is what matters, in all forms and compressions."""
    lab = {pack: Lab(layers=layers, pack=pack) for pack in ("identity", "gzip", "zstd")}
    return {
        "oci": _archive(lab["identity"].oci),
        "oci-gzip": _archive(lab["gzip"].oci),
        "oci-zstd": _archive(lab["zstd"].oci),
        "docker": _archive(lab["identity"].docker),
        "docker-gz": _archive(lab["gzip"].docker, compress=True),
        "legacy": _legacy(lab["identity"]),
        "layout": _layout(lab["gzip"]),
    }


def lab_shapes(lab: Lab) -> Shapes:
    """An image whose documents or blobs are what matters: as archive, compressed archive and layout folder.

    Where neither manifest nor index matter, as a Docker archive without them too.
    """
    shapes = {"oci": _archive(lab.oci), "oci-gz": _archive(lab.oci, compress=True), "layout": _layout(lab)}
    edits = (lab.edit_manifest, lab.edit_descriptor, lab.edit_index, lab.edit_members, lab.edit_docker)
    if all(edit is unchanged for edit in edits):
        shapes |= {"docker": _archive(lab.docker), "docker-gz": _archive(lab.docker, compress=True)}
    return shapes


def lone(build: Build) -> Shapes:
    """An archive that has one form only."""

    def moved(folder: Path) -> Path:
        (folder / "made").mkdir()
        made = build(folder / "made")
        if made.is_symlink():
            return made
        made.rename(folder / "archive.tar")
        with suppress(OSError):
            (folder / "made").rmdir()
        return folder / "archive.tar"

    return {"archive": moved}
