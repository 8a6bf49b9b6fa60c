"""The host contract: C library, C++ runtime, CPU level, and the driver that must not be shadowed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from oci_builder.model.errors import SpecError, show
from oci_builder.payload.readiness.arch import Target
from oci_builder.payload.readiness.libraries import Loader, is_os, libraries
from oci_builder.payload.readiness.packages import Packages
from oci_builder.payload.readiness.report import ERROR, NOTE, WARNING, Row
from oci_builder.payload.readiness.tree import Tree

Version = tuple[int, ...]
_VERSION = re.compile(r"(GLIBC|GLIBCXX|CXXABI)_([0-9]+(?:\.[0-9]+)*)\Z")
# glibc of a distribution -> the highest versions of the libstdc++ that it ships: Ubuntu 20.04, Debian 11, Ubuntu
# 22.04, Debian 12, Ubuntu 24.04, Debian 13 (libstdc++ manual, "ABI Policy and Guidelines": GCC 10, 10, 12, 12, 14, 14).
_CXX: tuple[tuple[Version, Version, Version], ...] = (
    ((2, 31), (3, 4, 28), (1, 3, 12)),
    ((2, 35), (3, 4, 30), (1, 3, 13)),
    ((2, 39), (3, 4, 33), (1, 3, 15)),
)
_DRIVER_FILE = re.compile(
    rb"(?:\A|/)(?:libcuda|libnvidia-(?!container)[a-z0-9-]+|libnvcuvid|libcudadebugger)\.so(?:\.[0-9.]+)?\Z"
)
# A loader never searches these for libcuda, or they are what a link editor needs.
_HARMLESS = re.compile(rb"/stubs/|(?:\A|/)compat/")
_COMPAT = re.compile(rb"(?:\A|/)cuda[^/]*/compat(?:/|\Z)|(?:\A|/)compat\Z")
_CUDA_LIBRARY = re.compile(r"lib(cudart|cublas|cublasLt|nvrtc|nvJitLink|cupti|nvJPEG|nvjpeg)\.so\.([0-9]+)\Z")
_CUDA_PACKAGE = re.compile(r"(.+)-cu(1[0-9])\Z")


@dataclass(frozen=True, slots=True)
class Glibc:
    """The oldest host: its glibc and, with it, the C++ runtime of its distribution."""

    text: str
    limits: dict[str, Version]

    @classmethod
    def parse(cls, text: str) -> Glibc:
        """``2.35`` as a contract.

        Raises:
            SpecError: ``spec.glibc``.
        """
        if not re.fullmatch(r"2\.[0-9]{1,2}", text):
            raise SpecError("spec.glibc", f"glibc {show(text)} is no version such as 2.35", actual=text)
        version = _version(text)
        cxx = [entry for entry in _CXX if entry[0] <= version] or [_CXX[0]]
        return cls(text, {"GLIBC": version, "GLIBCXX": cxx[-1][1], "CXXABI": cxx[-1][2]})


def _version(text: str) -> Version:
    return tuple(int(p) for p in text.split("."))


def highest(tree: Tree, loader: Loader) -> dict[str, tuple[Version, bytes]]:
    """The highest version of each family that the payload requires of a host, and the file that does."""
    out: dict[str, tuple[Version, bytes]] = {}
    for path, family, version in _required(tree, loader):
        if family not in out or version > out[family][0]:
            out[family] = (version, path)
    return out


def _required(tree: Tree, loader: Loader) -> Iterator[tuple[bytes, str, Version]]:
    for path, elf in libraries(tree):
        if elf.machine != "x64" or (loader.complete and is_os(path)):
            continue
        for library, versions in elf.requires:
            # A C++ runtime that travels with the file is no demand on the host.
            found = loader.find(path, elf, library) if library.startswith("libstdc++") else None
            if found and found.path and not is_os(found.path):
                continue
            for match in filter(None, map(_VERSION.match, versions)):
                yield path, match[1], _version(match[2])


def judge_host(tree: Tree, packages: Packages, loader: Loader, glibc: Glibc) -> Iterator[Row]:
    """Rows for files that need a newer C or C++ runtime than the oldest host has, or a newer CPU."""
    worst: dict[tuple[bytes, str], Version] = {}
    for path, family, version in _required(tree, loader):
        if version > glibc.limits[family]:
            worst[path, family] = max(version, worst.get((path, family), version))
    for (path, family), version in sorted(worst.items()):
        need, limit = (f"{family}_{'.'.join(map(str, v))}" for v in (version, glibc.limits[family]))
        message = f"needs {need}; a host with glibc {glibc.text} has {limit}. Build it on an older system"
        yield Row(ERROR, f"host.{family.lower()}", show(path)[1:-1], message, packages.owner(path), limit, need)
    for path, elf in libraries(tree):
        if elf.isa >= 3:
            message = f"needs a CPU of level x86-64-v{elf.isa}"
            severity = NOTE if elf.isa == 3 else WARNING
            yield Row(severity, "host.cpu", show(path)[1:-1], message, packages.owner(path), "", f"v{elf.isa}")


def judge_driver(tree: Tree, packages: Packages, loader: Loader, target: Target) -> Iterator[Row]:
    """Rows for driver libraries in the tree, and for search paths that would hide the host's."""
    for path, node in sorted(tree.nodes.items()):
        if node.kind in ("file", "link") and _DRIVER_FILE.search(path) and not _HARMLESS.search(path):
            where = show(path)[1:-1]
            message = "a driver library in the image would shadow the host's; remove it, the runtime injects its own"
            yield Row(ERROR, "driver.shadow", where, message, packages.owner(path), "none", where.rpartition("/")[2])
    if any(_COMPAT.search(p) and n.kind in ("dir", "link") for p, n in tree.nodes.items()):
        message = "CUDA compat libraries are shipped; they help older drivers only and stay off the search path"
        yield Row(NOTE, "driver.compat", "", message, actual="compat")
    for source, folders in (("LD_LIBRARY_PATH", loader.library_path), ("ld.so.conf", loader.configured)):
        for folder in folders:
            yield from _search_path(tree, source, folder, target)


def _search_path(tree: Tree, source: str, folder: bytes, target: Target) -> Iterator[Row]:
    real = tree.resolve(folder)
    shown = show(folder)[1:-1]
    for kind, bad in (("compat", _COMPAT), ("stubs", re.compile(rb"/stubs(?:/|\Z)"))):
        if bad.search(folder) or (real and bad.search(real)):
            trouble = (
                f"hides the host's newer driver R{target.driver} (CUDA error 803)"
                if kind == "compat"
                else "puts stub libraries before the driver's"
            )
            yield Row(ERROR, f"driver.{kind}_path", "", f"{source} holds {shown}, which {trouble}", actual=shown)


def judge_cuda(tree: Tree, packages: Packages, target: Target) -> Iterator[Row]:
    """Rows for libraries and packages of another CUDA major than the tree's own, or newer than the driver."""
    users: dict[int, list[tuple[bytes, str]]] = defaultdict(list)
    for path, elf in libraries(tree):
        for name in elf.needed:
            match = _CUDA_LIBRARY.match(name)
            if match and 10 < int(match[2]) < 30:
                users[int(match[2])].append((path, name))
    if not users:
        return
    main = _main_major(packages) or max(users, key=lambda m: len(users[m]))
    for major in sorted(users.keys() - {main}):
        for path, name in users[major]:
            message = f"needs {name} of CUDA {major} in a CUDA {main} image"
            yield Row(ERROR, "cuda.mix", show(path)[1:-1], message, packages.owner(path), f"cu{main}", name)
    for site, installed in sorted(packages.by_site.items()):
        for name, package in sorted(installed.items()):
            suffix = _CUDA_PACKAGE.match(name)
            if suffix and int(suffix[2]) != main:
                message = f"a package for CUDA {suffix[2]} in a CUDA {main} image"
                yield Row(WARNING, "cuda.mix", show(site)[1:-1], message, str(package), f"cu{main}", f"cu{suffix[2]}")
    if main > target.cuda[0]:
        message = f"CUDA {main} needs a newer driver than R{target.driver}, which brings CUDA {target.cuda[0]}"
        yield Row(ERROR, "driver.cuda", "", message, expected=f"CUDA {target.cuda[0]}", actual=f"CUDA {main}")


def _main_major(packages: Packages) -> int:
    """The CUDA major of the installed torch's runtime; 0 when there is none."""
    for package in packages.named("nvidia-cuda-runtime"):
        if match := re.match(r"[0-9]{1,3}(?=\.)", package.version):
            return int(match[0])
    for major in (13, 12, 11):
        if next(packages.named(f"nvidia-cuda-runtime-cu{major}"), None):
            return major
    return 0
