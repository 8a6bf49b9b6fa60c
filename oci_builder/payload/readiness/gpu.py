"""GPU code: which files the target runs natively, which through PTX, and which not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from oci_builder.model.errors import show
from oci_builder.payload.fatbin import Code
from oci_builder.payload.readiness.arch import NATIVE, NONE, PTX, Target
from oci_builder.payload.readiness.facts import Entries, GpuCode
from oci_builder.payload.readiness.packages import Packages
from oci_builder.payload.readiness.report import ERROR, NOTE, WARNING, GpuFile, Row
from oci_builder.payload.readiness.tree import Tree

_ORDER = ("unreadable", "none", "partial", "ptx", "native")


@dataclass(slots=True)
class _Tally:
    """Modules by how the target runs them.

    ``plain`` counts those that it does not run although they hold portable code: a dispatcher that expects a kernel
    for every GPU would fail there, while one with ``a`` or ``f`` code was never meant for this GPU.
    """

    native: int = 0
    ptx: int = 0
    none: int = 0
    plain: int = 0
    codes: set[Code] = field(default_factory=set)
    newer: int = 0
    bad: str = ""
    files: int = 0

    def add(self, modules: tuple[tuple[Entries, int], ...], target: Target) -> None:
        for entries, times in modules:
            known = [c for c in entries if c.kind != "other"]
            if not known:
                continue
            self.codes.update(known)
            best = target.best(known)
            self.native += times * (best == NATIVE)
            self.ptx += times * (best == PTX)
            if best == NONE:
                self.none += times
                self.plain += times * (not any(c.arch.suffix for c in known))
                self.newer += times * any(c.kind == "ptx" and c.isa > target.ptx_isa for c in known)

    @property
    def verdict(self) -> str:
        if self.bad:
            return "unreadable"
        usable = self.native + self.ptx
        if not usable:
            return "none"
        if self.plain > usable:
            return "partial"
        return "native" if self.native else "ptx"


def judge_gpu(tree: Tree, packages: Packages, target: Target) -> tuple[list[GpuFile], list[Row]]:
    """Verdicts of every file with GPU code, worst first, and the rows that they give.

    Loose kernels (cubins, PTX, fat binaries as files) are judged together per package: code picks among them.
    """
    loose: dict[str, _Tally] = {}
    places: dict[str, bytes] = {}
    found: list[tuple[GpuFile, _Tally, bool]] = []
    for path, _, facts in tree.files():
        if facts.gpu is None:
            continue
        package = packages.owner(path)
        if facts.loose:
            key = package or show(path.rpartition(b"/")[0])[1:-1]
            _take(loose.setdefault(key, _Tally()), facts.gpu, target)
            places.setdefault(key, path if len(path) else b"")
        else:
            tally = _take(_Tally(), facts.gpu, target)
            if tally.codes or tally.bad:
                static = facts.elf is None or facts.elf.kind == "rel"
                found.append((_file(show(path)[1:-1], package, tally), tally, static))
    for key, tally in loose.items():
        folder = show(places[key].rpartition(b"/")[0])[1:-1]
        found.append((_file(folder, key if key != folder else "", tally), tally, False))
    found.sort(key=lambda f: (_ORDER.index(f[0].verdict), f[0].package, f[0].where))
    return [f for f, _, _ in found], [row for item in found for row in _rows(*item, target)]


def _take(tally: _Tally, code: GpuCode, target: Target) -> _Tally:
    tally.files += 1
    tally.bad = tally.bad or code.bad
    # A library that was device-linked keeps its inputs; only an unlinked one is judged by them.
    tally.add(code.modules or code.relocatable, target)
    tally.add(code.embedded, target)
    return tally


def _file(where: str, package: str, tally: _Tally) -> GpuFile:
    return GpuFile(where, package, tally.verdict, tally.native, tally.ptx, tally.none, _archs(tally.codes), tally.files)


def _archs(codes: set[Code]) -> str:
    parts = []
    for kind in ("sass", "ptx"):
        archs = sorted({c.arch for c in codes if c.kind == kind})
        if archs:
            parts.append(f"{kind} " + " ".join(str(a)[3:] for a in archs))
    return ", ".join(parts)


def _rows(file: GpuFile, tally: _Tally, static: bool, target: Target) -> Iterator[Row]:
    counts = Counter(native=tally.native, ptx=tally.ptx, none=tally.none)
    total = counts.total()
    what = f"{file.files} kernels" if file.files > 1 else f"{total} modules"
    gpu, has = str(target.arch), f"it has {file.archs or 'none'}"
    severity, message = {
        "unreadable": (ERROR, f"its GPU code cannot be read: {tally.bad}"),
        "none": (ERROR, f"no machine code or PTX that {gpu} runs; {has}. Build it for {gpu}, or leave it out"),
        "partial": (WARNING, f"only {total - tally.none} of {total} modules run on {gpu}; {has}"),
        "ptx": (NOTE, f"{what} run through PTX, compiled by the driver at first use; {has}"),
        "native": (NOTE, f"{tally.native} of {total} modules native, {tally.ptx} through PTX; {has}"),
    }[file.verdict]
    if file.verdict == "none" and tally.newer:
        isa = ".".join(map(str, target.ptx_isa))
        message += f"; some PTX is newer than ISA {isa}, the newest that driver R{target.driver} compiles"
    if static and severity != NOTE:
        severity, message = WARNING, "static library: " + message
    yield Row(severity, f"gpu.{file.verdict}", file.where, message, file.package, gpu, file.archs)
