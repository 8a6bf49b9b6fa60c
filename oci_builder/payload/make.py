"""The payload of a spec, whole: sources fetched, environments made, brought together under one prefix."""

from __future__ import annotations

from pathlib import Path

from oci_builder.model.events import Emit, silent
from oci_builder.model.spec import Spec
from oci_builder.payload.fetch import fetch_sources
from oci_builder.payload.runtime import Runtime, assemble_runtime
from oci_builder.payload.tiers import realize_tiers
from oci_builder.payload.uv import Programs


def make_runtime(spec: Spec, folder: Path, work: Path, jobs: int, emit: Emit = silent) -> Runtime:
    """What goes under the prefix. Idempotent: what is unchanged stays.

    Args:
        folder: relative paths of the spec are relative to it.
        work: where sources, environments and what becomes of them are kept.
        jobs: threads.

    Raises:
        OciBuilderError: as ``fetch_sources``, ``realize_tiers`` and ``assemble_runtime``.
    """
    here, programs = fetch_sources(spec, work, emit), Programs(work)
    tiers = realize_tiers(here, folder, work, emit, programs)
    return assemble_runtime(here, folder, work, tiers, jobs, emit, programs)
