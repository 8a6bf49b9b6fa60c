"""``verify``: one or two image archives, ours or anybody's, read once and trusted in nothing.

The judge (``oci_builder.judge``) finds what is wrong with each; ``twins`` compares two. All findings are reported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from oci_builder.judge.archive import Judged, judge
from oci_builder.judge.contents import Contents
from oci_builder.judge.hashing import Hashers
from oci_builder.judge.options import Findings
from oci_builder.judge.options import JudgeOptions as VerifyOptions
from oci_builder.judge.outer import read_archive
from oci_builder.judge.sameness import Shared
from oci_builder.model.report import Report
from oci_builder.model.spec import Spec
from oci_builder.verify.against import hold_to_spec
from oci_builder.verify.twins import compare
from oci_builder.wire.compress import sniff

__all__ = ["VerifyOptions", "verify_archives"]


def verify_archives(
    paths: Sequence[Path], options: VerifyOptions | None = None, spec: Spec | None = None
) -> Report:
    """Verify one archive, or two and that they are the same image.

    Takes OCI archives and layouts and Docker archives of any age, compressed outside or not. Each file is read once,
    from front to back; memory does not grow with it. Nothing is written.

    Args:
        spec: hold each archive to it too (``check.*``, exit status 1).

    Returns:
        The report: a subject for each path, in order, and everything that is wrong or unusual.

    Raises:
        ValueError: not one or two paths.
    """
    if len(paths) not in (1, 2):
        raise ValueError("one or two archives")
    options = options or VerifyOptions()
    findings = [Findings(str(path)) for path in paths]
    judged: list[Judged] = [Judged(Contents(path, "identity")) for path in paths]
    shared: Shared | None = None
    with Hashers() as hashers:
        # An uncompressed archive first: its layers are what a compressed one can share.
        for at in sorted(range(len(paths)), key=lambda n: _is_compressed(paths[n])):
            with findings[at].collecting():
                intake = read_archive(paths[at], options, findings[at], hashers, shared)
                judged[at] = judge(intake)
                if len(paths) == 2 and shared is None and intake.contents.outer == "identity":
                    shared = Shared.of(intake.contents)
        if shared:
            shared.close()
    found = [finding for one in findings for finding in one.found]
    if spec is not None:
        found += [finding for one in judged for finding in hold_to_spec(one, spec)]
    if len(paths) == 2:
        found += compare(judged[0], judged[1])
    return Report(tuple(one.to_json(options.profile) for one in judged), tuple(found))


def _is_compressed(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return sniff(os.pread(fd, 4, 0)) != "identity"
    except OSError:
        return False
    finally:
        os.close(fd)
