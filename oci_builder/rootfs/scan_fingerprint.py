"""The identity of a whole tree from ``lstat`` alone: answers "has anything changed?" without reading a file.

Any write to a file changes its ctime, which no program can set; renames and removals change the directory's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from oci_builder.rootfs import scan_quick
from oci_builder.rootfs.scan import input_failure
from oci_builder.rootfs.scan_quick import SETTLE_NS

__all__ = ["SETTLE_NS", "fingerprint", "fingerprints"]

_AT_ONCE = 8
_VALUE = re.compile(rb"[0-9a-f]{64}(-[0-9]+)?\n")


def fingerprint(root: Path, exclude: Sequence[str] = (), *, linked: bool = False) -> str:
    """SHA-256 (hex) over name, type, mode, owner, size, times, inode and link count of everything below ``root``.

    What ``exclude`` names (``ScanPolicy.exclude``) is not looked into: /proc of a running machine never stands still.

    A tree that was being written until a moment ago is looked at twice; one with times in the future never gives the
    same answer again, so that nothing stale is trusted.

    Args:
        linked: files get and lose names elsewhere, as those of environments that share uv's files do: their link counts
            and ctimes do not count.

    Raises:
        SpecError: ``scan.changed`` when something vanishes meanwhile, or the root is no folder.
        TransportError: ``io.error``.
    """
    place = os.fsencode(root.resolve())
    try:
        return scan_quick.identity(place, exclude, linked)
    except OSError as error:
        raise input_failure(error, os.fsencode(error.filename or place)) from None


def fingerprints(roots: Sequence[Path], linked: Collection[Path] = ()) -> list[str]:
    """``fingerprint`` of several trees, at the same time: each in a process of its own.

    Args:
        linked: those of the trees whose files get and lose names elsewhere.

    Raises:
        OciBuilderError: as ``fingerprint``.
    """
    if len(roots) < 2:
        return [fingerprint(root, linked=root in linked) for root in roots]
    with ThreadPoolExecutor(min(len(roots), _AT_ONCE), "fingerprint") as pool:
        return list(pool.map(lambda root: _elsewhere(root, root in linked), roots))


def _elsewhere(root: Path, linked: bool) -> str:
    argv = [sys.executable, "-I", "-S", scan_quick.__file__, str(root.resolve()), *(["linked"] if linked else [])]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:
        return fingerprint(root, linked=linked)
    # Whatever went wrong over there goes wrong here too, and is said in our words, or does not matter.
    return done.stdout.decode().strip() if _VALUE.fullmatch(done.stdout) else fingerprint(root, linked=linked)
