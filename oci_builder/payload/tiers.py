"""The tiers of a spec as folders on disk: those that stand there, and those that uv has to make first."""

from __future__ import annotations

from pathlib import Path

from oci_builder.model.errors import SpecError, show
from oci_builder.model.events import Emit, silent
from oci_builder.model.spec import GitTier, PathTier, Spec
from oci_builder.payload.uv import Programs


def realize_tiers(
    spec: Spec, folder: Path, work: Path, emit: Emit = silent, programs: Programs | None = None
) -> dict[str, Path]:
    """Tier name -> folder, in the spec's order. Idempotent: an environment whose inputs are unchanged stays.

    Repositories were fetched beforehand (``fetch_sources``).

    Args:
        folder: relative paths of the spec are relative to it.
        work: where environments are made.
        programs: what the caller asked already.

    Raises:
        SpecError: ``spec.tier`` when a tier's folder is not there.
        OciBuilderError: what making an environment can raise.
    """
    out: dict[str, Path] = {}
    programs = programs or Programs(work)
    for name, tier in spec.tiers.items():
        if isinstance(tier, PathTier):
            path = folder / tier.path
            if not path.is_dir():
                raise SpecError(
                    "spec.tier", f"tiers.{name}.path: there is no folder {show(str(path))}", where=f"tiers.{name}.path"
                )
            out[name] = path
        elif not isinstance(tier, GitTier):  # those were fetched beforehand
            from oci_builder.payload.environments import realize

            out[name] = realize(name, tier, folder, work, emit, programs)
    return out
