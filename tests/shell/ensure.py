"""ensure_runtime.sh, run on archives: quick ones, and such as are made up."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.shell.hub import Hub

SCRIPT = Path(__file__).parents[2] / "layers/files/ensure_runtime.sh"
# The helper must work where nothing of ours is installed: with the interpreter alone.
PYTHON = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def script(
    *argv: object, cwd: Path | None = None, run_as: Path = SCRIPT, **env: str
) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "NRL_PYTHON": PYTHON, "NRL_RETRY_SECONDS": "0"}
    return subprocess.run(
        ["bash", str(run_as), *map(str, argv)], cwd=cwd, env={**base, **env}, capture_output=True, text=True, timeout=300
    )


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Path -> type, mode, content or target, and time of everything but the installer's own records."""
    out: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if name.startswith(".nrl-install"):
            continue
        found = path.lstat()
        content: object = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        when = 0 if path.is_symlink() else int(found.st_mtime)
        out[name] = (stat.S_IFMT(found.st_mode), stat.S_IMODE(found.st_mode), content, when)
    return out


def by_tar(archive: Path, folder: Path) -> dict[str, tuple[object, ...]]:
    folder.mkdir()
    subprocess.run(["tar", "-xpzf", archive, "-C", folder], check=True)
    return tree(folder / "opt/rt")


def archive_of(folder: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    path = folder / "made.tar.gz"
    with tarfile.open(path, "w:gz") as out:
        for info, data in members:
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o755
    return info, data


def fetch(hub: Hub, prefix: Path, url: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    digest = hashlib.sha256(hub.data).hexdigest()
    more = {"PROXY": hub.proxy, "CURL_CA_BUNDLE": str(hub.ca), **env}
    prefix.parent.mkdir(exist_ok=True)
    return script(url or hub.url, digest, prefix, **more)
