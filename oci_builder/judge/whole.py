"""One image of an archive that is read whole, or what is wrong with it: for verbs that keep no bytes."""

from __future__ import annotations

from pathlib import Path

from oci_builder.judge.archive import judge
from oci_builder.judge.hashing import Hashers
from oci_builder.judge.image import ImageView
from oci_builder.judge.options import Findings, JudgeOptions
from oci_builder.judge.outer import read_archive
from oci_builder.judge.survey import require_image


def read_image(path: Path, options: JudgeOptions) -> ImageView:
    """The image that is meant, every byte of the archive judged as ``verify`` does.

    Args:
        options: its ``entries`` is told what the layers hold.

    Raises:
        SpecError: ``spec.path``. FormatError, PolicyError, IntegrityError: the most telling of what ``verify`` finds;
            ``platform.ambiguous`` for several images. TransportError: ``io.*``.
    """
    findings = Findings(str(path))
    with Hashers() as hashers:
        judged = judge(read_archive(path, options, findings, hashers))
    return require_image(judged, findings, options)
