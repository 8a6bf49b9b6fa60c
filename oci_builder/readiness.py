"""The ``readiness`` verb: does an image, a portable archive or a folder fit a GPU node? Answered without a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from oci_builder.judge.path import is_layout
from oci_builder.model.errors import SpecError
from oci_builder.model.events import Emit, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.payload.readiness.allow import Rules
from oci_builder.payload.readiness.arch import Target
from oci_builder.payload.readiness.archives import Reading, image_tree, read_file
from oci_builder.payload.readiness.collect import folder_delta
from oci_builder.payload.readiness.host import Glibc
from oci_builder.payload.readiness.judge import Contract, judge
from oci_builder.payload.readiness.report import ReadinessReport
from oci_builder.payload.readiness.tree import Tree, overlay

__all__ = ["ReadinessOptions", "ReadinessReport", "readiness"]


@dataclass(frozen=True, slots=True)
class ReadinessOptions:
    """What a subject is judged against, and how it is read.

    Attributes:
        target: the GPU, ``sm_NN``.
        glibc: of the oldest host.
        driver: branch of the oldest driver.
        allow: a rule file of the project's own, in the form of ``payload/readiness/allow.toml``.
        platform: which image of a multi-platform index.
        image: name or digest of the one that is meant, where there are several.
        threads: for decompression and reading; 0 for one a CPU.
        limits: bounds on an untrusted archive.
    """

    target: str = "sm_100"
    glibc: str = "2.35"
    driver: int = 580
    allow: Path | None = None
    platform: str = "linux/amd64"
    image: str = ""
    threads: int = 0
    limits: Limits = DEFAULT_LIMITS


def readiness(subject: Path, options: ReadinessOptions = ReadinessOptions(), *, emit: Emit = silent) -> ReadinessReport:
    """Judge one subject; it is only read, and the same subject gives the same report.

    Args:
        subject: an OCI or Docker archive, an OCI layout folder, a tar of a tree (the portable archive), or a folder.

    Raises:
        SpecError: ``spec.target``, ``spec.glibc``, ``spec.driver``, ``spec.allow``, ``spec.path``.
        FormatError, PolicyError, IntegrityError: what ``verify`` finds in an archive.
        TransportError: ``io.*``.
    """
    contract = Contract(
        Target.parse(options.target, options.driver), Glibc.parse(options.glibc), Rules.load(options.allow)
    )
    threads = options.threads or len(os.sched_getaffinity(0))
    reading = Reading(options.limits, threads, options.platform, emit, options.image)
    return judge(_tree(subject, reading), str(subject), contract)


def _tree(subject: Path, reading: Reading) -> Tree:
    if subject.is_file():
        return read_file(subject, reading)
    if not subject.is_dir():
        raise SpecError("spec.path", f"{subject} is neither a file nor a folder", where=str(subject))
    if is_layout(subject):
        return image_tree(subject, reading)
    return Tree(overlay([folder_delta(subject, threads=reading.threads, emit=reading.emit)]))
