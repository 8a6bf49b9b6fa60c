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
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from oci_builder.payload import compiler_worker, download_notice
from oci_builder.payload.compiler_worker import NOTES

FORMAT = 2  # a number more when what is compiled the same way becomes something else
_WORKER = Path(compiler_worker.__file__)
_TARGET = r"(?:[a-z0-9_]+-(?:[a-z0-9_]+-)?linux-[a-z0-9]+-)?"
_COMPILER = re.compile(
    _TARGET + r"(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|gfortran|f77|f95)(?:-[0-9.]+)?\Z"
    r"|(?P<rust>rustc\Z)|(?P<nvcc>nvcc\Z)"
)
# What build systems look for beside a compiler.
_COMPANION = re.compile(
    _TARGET + r"(?:gcc-|llvm-)?(?:ar|as|ld(?:\.[a-z]+)?|nm|objcopy|objdump|ranlib|readelf|strip)(?:-[0-9.]+)?\Z"
)
_NAMING = ("CC", "CXX", "FC", "F77", "F90", "CUDACXX", "CUDAHOSTCXX", "NVCC_CCBIN", "PYTORCH_NVCC", "RUSTC")
# Build scripts that otherwise take a finished wheel from GitHub, which no list and no lock has a hash of.
_FROM_SOURCE = dict.fromkeys(
    ("CAUSAL_CONV1D_FORCE_BUILD", "FLASH_ATTENTION_FORCE_BUILD", "GROUPED_GEMM_FORCE_BUILD", "MAMBA_FORCE_BUILD",
     "NVTE_PYTORCH_FORCE_BUILD"), "TRUE",
)  # fmt: skip
# Of such a name every shell, make and ninja makes one word, and PATH one folder.
_PLAIN = re.compile(r"[A-Za-z0-9_./+@-]+")
# uv's layout, that of the pinned version: a package's unpacked sources, a repository's, an isolated build environment.
_OF_CACHE = {
    r"/sdists-v\d+/(?:[^/\s\"']+/)+?src(?![^/\s\"'])": "/build/source",
    r"/git-v\d+/checkouts/[^/\s\"']+/[^/\s\"']+": "/build/source",
    r"/builds-v\d+/[^/\s\"']+": "/build/isolated",
    r"/archive-v\d+/[^/\s\"']+": "/build/archive",
}
# A folder of Python's tempfile: scikit-build-core builds in one.
_TEMPORARY = r"/tmp[a-z0-9_]{8}(?![^/\s\"'])"


def with_compilers(folder: Path, cache: Path, target: Path, said: Mapping[str, str]) -> dict[str, str]:
    """Make the folder, and return the variables of a build with those that lead to it.

    gcc, clang, gfortran, rustc and nvcc are covered where they are found by name on ``PATH``, and where ``said`` names
    one by its path in a variable that is there for that (``CC``, ``CUDACXX`` …). One that a build script calls by its
    path is run as it is.

    Args:
        folder: is empty, or is not there yet; goes when everything is built. Has a plain name (``plain_name``).
        cache: uv's.
        target: the environment, in a scratch folder.
        said: the tier's ``build_env``, filled in.

    Raises:
        OSError: the disk.
    """
    folder.mkdir(exist_ok=True)
    settings = folder / "settings.json"
    settings.write_text(json.dumps(_settings(cache, target, said)))
    (folder / NOTES).touch()
    path = said.get("PATH") or os.environ.get("PATH", os.defpath)
    words = [sys.executable, "-IS", str(_WORKER), str(settings)]
    for name, real in _found(path):
        if name != "nvcc":
            compiler_worker.write_shim(folder / name, [*words, _kind(name), real])
    named = {name: _by_path(folder, words, said[name]) for name in _NAMING if said.get(name)}
    out = {**_FROM_SOURCE, **said, **named, "PATH": f"{folder}{os.pathsep}{path}"}
    if (folder / "rustc").exists():
        out = {"RUSTC": str(folder / "rustc"), **out}  # rustup's cargo goes by a PATH of its own
    if any(said.get(name) for name in ("CUDA_HOME", "CUDA_PATH")) or shutil.which("nvcc", path=path):
        nvcc = folder / "nvcc"
        compiler_worker.write_shim(nvcc, [*words, "nvcc", ""])
        # Else it makes up names for its files, which objects keep.
        flags = f"--objdir-as-tempdir {said.get('NVCC_PREPEND_FLAGS', '')}".strip()
        out = {"PYTORCH_NVCC": str(nvcc), "CUDACXX": str(nvcc), **out, "NVCC_PREPEND_FLAGS": flags}
    return out | _watched(folder, said)


@contextmanager
def plain_name(folder: Path) -> Iterator[Path]:
    """Make the folder, and a name of it that any command line can hold: its own, else that of a link meanwhile.

    A cache may lie below a name with a space; torch writes ``PYTORCH_NVCC`` into files of ninja as it is.

    Raises:
        OSError: the disk.
    """
    folder.mkdir()
    if _PLAIN.fullmatch(str(folder)):
        yield folder
        return
    aside = Path(tempfile.mkdtemp(prefix="oci-builder-"))
    try:
        (aside / folder.name).symlink_to(folder.absolute())
        yield aside / folder.name
    finally:
        (aside / folder.name).unlink(missing_ok=True)
        aside.rmdir()


def notes(folder: Path) -> list[str]:
    """What compilers and build scripts did that nobody will see in the result. Raises OSError."""
    return sorted(set((folder / NOTES).read_text(errors="backslashreplace").splitlines()))


def _watched(folder: Path, said: Mapping[str, str]) -> dict[str, str]:
    """Python's own start-up in builds brings the notice of downloads along."""
    place = folder / "watch"
    place.mkdir()
    text = Path(download_notice.__file__).read_text()
    (place / "sitecustomize.py").write_text(f"{text}\nwatch({str(place)!r}, {str(folder / NOTES)!r})\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(place), said.get("PYTHONPATH", ""))))}


def _kind(name: str) -> str:
    match = _COMPILER.match(name)
    return next((kind for kind, group in (("rustc", "rust"), ("nvcc", "nvcc")) if match and match[group]), "cc")


def _by_path(folder: Path, words: list[str], said: str) -> str:
    """The value of a variable with each compiler's path replaced by one of ours, which runs it."""
    parts = [said] if os.path.isfile(said) else said.split(" ")
    for at, part in enumerate(parts):
        name = os.path.basename(part)
        if os.path.isabs(part) and _COMPILER.match(name) and os.access(part, os.X_OK) and os.path.isfile(part):
            beside = folder / f"named-{len(list(folder.glob('named-*')))}"
            beside.mkdir()
            for other in filter(_COMPANION.match, os.listdir(os.path.dirname(part))):
                (beside / other).symlink_to(os.path.join(os.path.dirname(part), other))
            compiler_worker.write_shim(beside / name, [*words, _kind(name), part])
            parts[at] = str(beside / name)
    return " ".join(parts)


def _settings(cache: Path, target: Path, said: Mapping[str, str]) -> dict[str, dict[str, str]]:
    scratch = target.parent
    places = {scratch: "/build", scratch / "checkout": "/build/project", target: "/build/environment"}
    # Headers of the interpreter hold assertions, which name their file.
    python = (target / "bin/python").resolve().parent.parent
    places |= {path: f"/build/python/include/{path.name}" for path in python.glob("include/python3*")}
    for name, folder, called in (("CARGO_HOME", ".cargo", "cargo"), ("RUSTUP_HOME", ".rustup", "rustup")):
        # Where nobody knows a home (a user without an entry), this is no absolute path and fits nothing.
        places[Path(said.get(name) or os.path.expanduser(f"~/{folder}"))] = f"/build/{called}"
    real = [(path, name) for path, name in places.items() if path.is_absolute()]
    both = {str(form): name for path, name in real for form in (path, path.resolve())}
    tops = "|".join(sorted({re.escape(str(form)) for form in (cache, cache.resolve())}))
    temporary = re.escape(said.get("TMPDIR") or tempfile.gettempdir())
    patterns = {f"(?:{tops}){below}": name for below, name in _OF_CACHE.items()}
    return {"places": both, "patterns": patterns | {temporary + _TEMPORARY: "/build/temporary"}}


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
