"""Compilers that forget where they ran: what builds from source see first on their PATH.

A compiled package must be the same bytes wherever and whenever it is built, and must not name the folder it was built
in: uv's build folders have random names, and an environment's headers lie below a folder with a process id in its name.
``compiler_worker`` tells how the names are replaced.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from oci_builder.payload import compiler_worker

FORMAT = 1  # a number more when what is compiled the same way becomes something else
_WORKER = Path(compiler_worker.__file__)
_COMPILER = re.compile(
    r"(?:[a-z0-9_]+-(?:[a-z0-9_]+-)?linux-[a-z0-9]+-)?(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+)(?:-[0-9.]+)?\Z"
)
# uv's layout, that of the pinned version: a package's unpacked sources, a repository's, an isolated build environment.
_OF_CACHE = {
    r"/sdists-v\d+/(?:[^/\s\"']+/)+?src(?![^/\s\"'])": "/build/source",
    r"/git-v\d+/checkouts/[^/\s\"']+/[^/\s\"']+": "/build/source",
    r"/builds-v\d+/[^/\s\"']+": "/build/isolated",
    r"/archive-v\d+/[^/\s\"']+": "/build/archive",
}


def with_compilers(folder: Path, cache: Path, target: Path, said: Mapping[str, str]) -> dict[str, str]:
    """Make the folder, and return the variables of a build with those that lead to it.

    gcc, clang and nvcc are covered where they are found by name on ``PATH``, nvcc through ``PYTORCH_NVCC`` and
    ``CUDACXX`` too; a compiler that ``said`` names by its path is run as it is.

    Args:
        folder: does not exist yet; goes when everything is built.
        cache: uv's.
        target: the environment, in a scratch folder.
        said: the tier's ``build_env``, filled in.

    Raises:
        OSError: the disk.
    """
    folder.mkdir()
    settings = folder / "settings.json"
    settings.write_text(json.dumps(_settings(cache, target)))
    path = said.get("PATH") or os.environ.get("PATH", os.defpath)
    words = [sys.executable, "-IS", str(_WORKER), str(settings)]
    for name, real in _found(path):
        compiler_worker.write_shim(folder / name, [*words, "cc", real])
    out = {**said, "PATH": f"{folder}{os.pathsep}{path}"}
    if any(said.get(name) for name in ("CUDA_HOME", "CUDA_PATH")) or shutil.which("nvcc", path=path):
        nvcc = folder / "nvcc"
        compiler_worker.write_shim(nvcc, [*words, "nvcc", ""])
        # Else it makes up names for its files, which objects keep.
        flags = f"--objdir-as-tempdir {said.get('NVCC_PREPEND_FLAGS', '')}".strip()
        out = {"PYTORCH_NVCC": str(nvcc), "CUDACXX": str(nvcc), **out, "NVCC_PREPEND_FLAGS": flags}
    return out


def _settings(cache: Path, target: Path) -> dict[str, dict[str, str]]:
    scratch = target.parent
    places = {scratch: "/build", scratch / "checkout": "/build/project", target: "/build/environment"}
    # Headers of the interpreter hold assertions, which name their file.
    python = (target / "bin/python").resolve().parent.parent
    places |= {path: f"/build/python/include/{path.name}" for path in python.glob("include/python3*")}
    both = {str(form): name for path, name in places.items() for form in (path, path.resolve())}
    tops = "|".join(sorted({re.escape(str(form)) for form in (cache, cache.resolve())}))
    return {"places": both, "patterns": {f"(?:{tops}){below}": name for below, name in _OF_CACHE.items()}}


def _found(path: str) -> Iterator[tuple[str, str]]:
    """Name and file of each compiler on a search path, the first of a name alone."""
    seen: set[str] = set()
    for folder in path.split(os.pathsep):
        try:
            names = sorted(os.listdir(folder)) if os.path.isabs(folder) else []
        except OSError:
            continue
        for name in names:
            file = os.path.join(folder, name)
            if name not in seen and _COMPILER.match(name) and os.access(file, os.X_OK) and os.path.isfile(file):
                seen.add(name)
                yield name, file
