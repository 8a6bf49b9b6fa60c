"""The payload of a spec, whole: sources fetched, environments made, brought together under one prefix."""

from __future__ import annotations

from pathlib import Path

from oci_builder.model.events import Emit, silent
from oci_builder.model.spec import LockTier, Spec
from oci_builder.payload.fetch import FOLDER, fetch_sources
from oci_builder.payload.runtime import Runtime, assemble_runtime
from oci_builder.payload.tidy import note_use
from oci_builder.payload.tiers import realize_tiers
from oci_builder.payload.uv import Programs


def make_runtime(spec: Spec, folder: Path, work: Path, jobs: int, emit: Emit = silent) -> Runtime:
    """What goes under the prefix. Idempotent: what is unchanged stays. What it is made of is noted (``tidy``).

    Args:
        folder: relative paths of the spec are relative to it.
        work: where sources, environments and what becomes of them are kept.
        jobs: threads.

    Raises:
        OciBuilderError: as ``fetch_sources``, ``realize_tiers`` and ``assemble_runtime``.
    """
    here, programs = fetch_sources(spec, work, emit), Programs(work)
    tiers = realize_tiers(here, folder, work, emit, programs)
    runtime = assemble_runtime(here, folder, work, tiers, jobs, emit, programs)
    if runtime.made:
        sources = [Path(tier.project) for tier in here.tiers.values() if isinstance(tier, LockTier)]
        fetched = {place.relative_to(work).parts[1] for place in sources if (work / FOLDER) in place.parents}
        note_use(work, f"{folder} {spec.reference}", [*runtime.kept, *(f"{FOLDER}/{name}" for name in fetched)])
    return runtime
