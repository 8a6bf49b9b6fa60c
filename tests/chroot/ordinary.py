"""The command line of this checkout as an ordinary user: what root can read in places of its own shows at a short path."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UID = 12345
MAIN = "import sys; from oci_builder.cli import main; sys.exit(main())"
# As root in a mount namespace of its own: the interpreter, its packages and the checkout may lie where nobody else may
# look; bound to a folder that everybody reaches they can be used by the user that the process then becomes.
_SCRIPT = """set -e
mount --bind "$1" "$4/python"; mount --bind "$2" "$4/packages"; mount --bind "$3" "$4/source"
cd "$4/home"; shift 4
exec setpriv --reuid "$UID_" --regid "$UID_" --clear-groups --no-new-privs "$@"
"""


class Caller:
    """Runs ``oci-builder`` as root (this process) or as an ordinary user.

    Args:
        folder: reachable by everybody; the caller's home and cache are made in it.
    """

    def __init__(self, folder: Path, ordinary: bool) -> None:
        self.ordinary = ordinary
        self.isolation = "rootless" if ordinary or os.geteuid() else "root"
        self.folder = folder
        self.home = folder / "home"
        for name in ("home", "python", "packages", "source"):
            (folder / name).mkdir()
        if ordinary:
            os.chown(self.home, UID, UID)
        self.cache = self.home / "cache"

    def __call__(self, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, whatever its exit status."""
        verb, *rest = map(str, words)
        return subprocess.run(
            [*self._prefix(), "-c", MAIN, verb, "--cache", str(self.cache), *rest], capture_output=True, text=True,
            timeout=300, stdin=subprocess.DEVNULL, cwd=self.home, env={**os.environ, **self._env(), **env},
        )  # fmt: skip

    def _prefix(self) -> list[str]:
        if not self.ordinary:
            return [sys.executable]
        packages = sysconfig.get_path("purelib")
        program = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        inner = self.folder / "python" / "bin" / program.name
        start = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _SCRIPT, "sh"]
        return [*start, sys.base_prefix, packages, str(ROOT), str(self.folder), str(inner)]

    def _env(self) -> dict[str, str]:
        if not self.ordinary:
            return {"PYTHONPATH": str(ROOT)}
        return {
            "PYTHONPATH": f"{self.folder}/source:{self.folder}/packages", "HOME": str(self.home), "TMPDIR": "/tmp",
            "LD_LIBRARY_PATH": f"{self.folder}/python/lib", "UID_": str(UID),
        }  # fmt: skip
