"""Run-time compilation: are the tools that packages call present, and do the versions fit together?"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from oci_builder.model.errors import show
from oci_builder.payload.names import normalize
from oci_builder.payload.readiness.allow import Rules, Tool
from oci_builder.payload.readiness.arch import Target
from oci_builder.payload.readiness.packages import Packages
from oci_builder.payload.readiness.report import ERROR, NOTE, WARNING, Row
from oci_builder.payload.readiness.tree import Tree

_GCC = re.compile(rb"usr/lib/gcc/x86_64-linux-gnu/([0-9]{1,3})\Z")
_CUDA_VERSION = re.compile(r"CUDA_VERSION ([0-9]{1,9})\b")


def judge_jit(tree: Tree, packages: Packages, rules: Rules, *, complete: bool) -> Iterator[Row]:
    """Rows for packages that compile at run time without what they need.

    Where the tree has no system of its own (``complete`` false), the host may bring a tool: a warning that says so.
    """
    have = _present(tree, rules.tool)
    for rule in rules.jit:
        for package in packages.named(rule.package):
            missing = [n for n in rule.needs if n not in have]
            if missing:
                listed = ", ".join(missing)
                host = "" if complete else " here; the host must provide them"
                message = f"compiles at run time ({rule.reason}) but finds no {listed}{host}"
                severity = rule.severity if complete else WARNING
                yield Row(severity, "jit.missing", show(package.site)[1:-1], message, str(package), "", listed)
            newest = _newest_gcc(tree)
            if rule.gcc and newest and newest < int(rule.gcc):
                message = f"its kernels need GCC {rule.gcc} or later, and GCC {newest} is the newest here"
                yield Row(WARNING, "jit.compiler", "", message, str(package), rule.gcc, str(newest))
    if packages.by_site:
        absent = ", ".join(sorted({t.name for t in rules.tool} - have)) or "nothing"
        yield Row(NOTE, "jit.tools", "", f"of the run-time compilers, {absent} is absent", actual=absent)
    yield from _empty_values(tree)


def _newest_gcc(tree: Tree) -> int:
    """The major version of the newest GCC in the tree, by the folder that each keeps; 0 when there is none."""
    return max((int(m[1]) for m in map(_GCC.match, tree.nodes) if m), default=0)


def _present(tree: Tree, tools: Iterable[Tool]) -> set[str]:
    """Names of the tools that the tree has; a dangling link is none."""
    globs = [(tool.name, pattern, pattern.rpartition("/")[2]) for tool in tools for pattern in tool.paths]
    exact = {last for _, _, last in globs if "*" not in last and "[" not in last}
    loose = tuple({last.split("*")[0].split("[")[0] for _, _, last in globs} - exact)
    found: set[str] = set()
    for path, node in tree.nodes.items():
        name = path.rpartition(b"/")[2].decode("utf-8", "replace")
        # Nearly every path of a tree fails this test on its last component.
        if node.kind == "dir" or not (name in exact or name.startswith(loose)):
            continue
        text = "/" + path.decode("utf-8", "replace")
        fitting = {tool for tool, pattern, _ in globs if fnmatchcase(text, pattern)} - found
        if fitting and tree.resolve(path):
            found |= fitting
    return found


def _empty_values(tree: Tree) -> Iterator[Row]:
    for key in ("CUDA_HOME", "CUDA_PATH", "CUDNN_HOME", "NVRTC_HOME"):
        value = tree.env.get(key)
        if value is not None and (":" in value or not value.startswith("/")):
            message = f"{key}={value!r} is not one absolute folder, so tools below it are not found"
            yield Row(ERROR, "jit.env", "", message, expected="an absolute folder", actual=show(f"{key}={value}")[1:-1])


def judge_versions(tree: Tree, packages: Packages, rules: Rules, target: Target) -> Iterator[Row]:
    """Rows for versions that must be equal and are not: package families, exact pins, one toolkit's tools."""
    for rule in rules.equal:
        for site, installed in sorted(packages.by_site.items()):
            found = {n: installed[normalize(n)].version for n in rule.packages if normalize(n) in installed}
            if len({_public(v) for v in found.values()}) > 1:
                listed = ", ".join(f"{n} {v}" for n, v in found.items())
                yield Row(ERROR, "pkg.equal", show(site)[1:-1], f"{listed} must be equal: {rule.reason}", actual=listed)
    for site, installed in sorted(packages.by_site.items()):
        for package in installed.values():
            for name, version in package.pins:
                other = installed.get(name)
                if other and not _same(other.version, version):
                    message = f"requires {name}=={version}, and {other.version} is installed"
                    yield Row(WARNING, "pkg.pin", show(site)[1:-1], message, str(package), version, str(other))
    yield from _toolkits(tree, packages, target)
    yield from _manifests(tree, packages)


def _public(version: str) -> str:
    return version.partition("+")[0]


def _same(installed: str, pinned: str) -> bool:
    if pinned.endswith(".*"):
        return _public(installed).startswith(pinned[:-1]) or _public(installed) == pinned[:-2]
    return installed == pinned or _public(installed) == pinned


def _toolkits(tree: Tree, packages: Packages, target: Target) -> Iterator[Row]:
    """One CUDA folder's tools and headers are of one release; a newer one than the driver's makes PTX it refuses."""
    releases: dict[bytes, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, _, facts in tree.files():
        name = show(path.rpartition(b"/")[2])[1:-1]
        header = _CUDA_VERSION.search(facts.text) if path.endswith(b"/cuda.h") else None
        if header:
            number = int(header[1])
            home = path[: -len(b"/include/cuda.h")].partition(b"/targets/")[0]
            releases[home][f"{number // 1000}.{number % 1000 // 10}"].append(name)
        elif facts.tool:
            home = path.rpartition(b"/bin/")[0] or path.rpartition(b"/")[0]
            releases[home.removesuffix(b"/nvvm")][".".join(facts.tool.split(".")[:2])].append(name)
    for home, found in sorted(releases.items()):
        yield from _toolkit(show(home)[1:-1], packages.owner(home + b"/bin"), found, target)


def _toolkit(home: str, package: str, found: dict[str, list[str]], target: Target) -> Iterator[Row]:
    listed = "; ".join(f"{release}: {', '.join(sorted(names))}" for release, names in sorted(found.items()))
    compilers = {r for r, names in found.items() if {"nvcc", "cuda.h", "cicc"} & set(names)}
    if len(compilers) > 1:
        yield Row(ERROR, "jit.toolkit", home, f"tools of different CUDA releases in one folder: {listed}", package)
    else:
        yield Row(NOTE, "jit.toolkit", home, f"CUDA tools: {listed}", package, actual=listed)
    for release in compilers:
        major, minor = (int(p) for p in release.split("."))
        if (major, minor) > target.cuda and "nvcc" in found[release]:
            driver = f"driver R{target.driver} (CUDA {target.cuda[0]}.{target.cuda[1]})"
            message = f"nvcc {release} makes PTX that {driver} cannot compile"
            yield Row(WARNING, "jit.driver", home, message, package, "", release)


def _manifests(tree: Tree, packages: Packages) -> Iterator[Row]:
    """Prebuilt kernels are all there: a folder's checksum list names them."""
    for path, _, facts in tree.files():
        if not path.endswith(b"/checksums.txt"):
            continue
        folder = path.rpartition(b"/")[0]
        lines = [line.split(maxsplit=1) for line in facts.text.splitlines()]
        names = [parts[1].strip().lstrip("*") for parts in lines if len(parts) == 2]
        missing = [n for n in names if folder + b"/" + n.encode("utf-8", "replace") not in tree.nodes]
        if missing:
            message = f"{len(missing)} of {len(names)} prebuilt kernels are missing, first {show(missing[0])[1:-1]}"
            yield Row(ERROR, "jit.kernels", show(folder)[1:-1], message, packages.owner(path), "", str(len(missing)))
