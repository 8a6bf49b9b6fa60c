"""A Debian root file system made by mmdebstrap.

Making it takes about half a minute and is done once for the temporary folder. OCI_BUILDER_DEBIAN names a root file
system that is used instead.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from chroot_exec.teardown import remove_tree

PACKAGES = "python3,gcc,libc6-dev"
MAKING_SECONDS = 400


def debian() -> Path:
    """The root file system; made at most once, whoever asks first.

    Raises:
        unittest.SkipTest: not root, no mmdebstrap, or no mirror in reach.
    """
    given = os.environ.get("OCI_BUILDER_DEBIAN")
    if given:
        return Path(given)
    if os.geteuid():
        raise unittest.SkipTest("needs root to make a Debian tree; OCI_BUILDER_DEBIAN can name one")
    if not shutil.which("mmdebstrap"):
        raise unittest.SkipTest("needs mmdebstrap")
    state = Path(tempfile.gettempdir()) / "oci-builder-debian"
    state.mkdir(mode=0o755, exist_ok=True)
    if state.is_symlink() or state.stat().st_uid != os.geteuid() or state.stat().st_mode & 0o022:
        raise unittest.SkipTest(f"{state} belongs to somebody else")
    with (state / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (state / "root").exists():
            _make(state / "partial")
            (state / "partial").rename(state / "root")
    return state / "root"


def _make(folder: Path) -> None:
    if folder.exists():
        remove_tree(str(folder))
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAKING_SECONDS)
    except subprocess.TimeoutExpired:
        raise unittest.SkipTest(f"Debian was not made within {MAKING_SECONDS} seconds: a slow mirror?") from None
    if done.returncode:
        remove_tree(str(folder))
        raise unittest.SkipTest(f"no Debian mirror in reach: {done.stderr.strip()[-200:]}")
