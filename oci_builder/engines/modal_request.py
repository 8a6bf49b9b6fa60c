"""The sender's half of a call to Modal that knows nothing of Modal's terms: the request and its result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from oci_builder import __version__
from oci_builder.engines.modal_container import RUNTIME
from oci_builder.engines.modal_project import pack, release_folder
from oci_builder.engines.stages import STAGES, Request, Stage
from oci_builder.model.errors import SpecError, show
from oci_builder.model.receipts import PORTABLE
from oci_builder.model.spec import Spec
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.host import new_attempt

# Stages that read what the spec names; all others work on what these made.
_READERS = ("build", "package", "container", "repack")


def prepare(stage: Stage, request: Request, spec: Spec, portable: str, inputs: Path) -> dict[str, Any]:
    """Pack the inputs, into ``inputs``; the request as the container gets it.

    Args:
        portable: SHA-256 of the portable archive, for stages on a host's image; its installer is put beside ``inputs``.

    Raises:
        SpecError: what ``pack`` raises; ``stage.option``, ``stage.checks``.
    """
    options = dict(request.options)
    if portable:
        if options.get("where", "host") != "host":
            raise SpecError("stage.option", "on Modal the checks run on the host: where=host", where="where")
        options = {**options, "where": "host", "prefix": RUNTIME, "sha256": portable}
        _write_helper(spec, request, inputs.with_name("ensure_runtime.sh"))
    attempt = request.attempt or new_attempt()
    asked = replace(request, options=options, version=__version__, attempt=attempt)
    mounts = {mount for known in STAGES.values() for mount in known.needs.volumes}
    sent = pack(asked, inputs, mounts, whole=stage.name in _READERS)
    return {**sent, "out": _folder_name(request, spec)}


def localized(result: Mapping[str, Any], request: Request, sent: Mapping[str, Any]) -> dict[str, Any]:
    """A container's result with the sender's paths for the sender's files.

    Args:
        sent: the request as the container got it.
    """
    found = dict(result)
    there = found.pop("inputs", "")
    if not there:
        return found
    pairs = [(f"{there}/{Path(sent['spec']).parent}", str(Path(request.spec).absolute().parent))]
    if request.release:
        pairs.insert(0, (f"{there}/{sent['release']}", request.release))

    def here(text: str) -> str:
        for far, near in pairs:
            text = near.join(re.split(f"{re.escape(far)}(?![A-Za-z0-9._-])", text))
        return text

    found["notes"] = [here(str(note)) for note in found["notes"]]
    found["receipt_path"] = here(str(found["receipt_path"]))
    if found["error"]:
        found["error"] = {**found["error"], "message": here(str(found["error"]["message"]))}
    return found


def _folder_name(request: Request, spec: Spec) -> str:
    """The build's folder on the volume."""
    if request.release:
        return release_folder(request.release).name
    return spec.release or f"{spec.name}-{spec.tag}".replace("/", "-")


def portable_of(request: Request) -> str:
    """SHA-256 of the portable archive, as the release folder here records it.

    Raises:
        SpecError: ``stage.order``; FormatError: ``release.subject``.
    """
    folder = ReleaseFolder(Path(request.release))
    if not request.release or not (folder.root / "portable.json").is_file():
        raise SpecError(
            "stage.order", f"{show(request.release)} has no record of {PORTABLE}: on Modal the stage container makes "
            "it, with this release folder",
            where=request.release,
        )  # fmt: skip
    return folder.subjects()[PORTABLE]


def _write_helper(spec: Spec, request: Request, target: Path) -> None:
    given = request.options.get("helper")
    files = Path(request.spec).absolute().parent / (spec.files or "") / "files/ensure_runtime.sh"
    source = Path(str(given)) if given else files
    if not source.is_file():
        raise SpecError("stage.checks", "the spec ships no ensure_runtime.sh, which the host's image needs")
    target.write_bytes(source.read_bytes())
