"""All judgements over one final tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from oci_builder.payload.readiness.allow import Rules
from oci_builder.payload.readiness.arch import Target
from oci_builder.payload.readiness.gpu import judge_gpu
from oci_builder.payload.readiness.host import Glibc, highest, judge_cuda, judge_driver, judge_host
from oci_builder.payload.readiness.jit import judge_jit, judge_versions
from oci_builder.payload.readiness.libraries import (
    Loader,
    judge_duplicates,
    judge_hygiene,
    judge_libraries,
    libraries,
)
from oci_builder.payload.readiness.packages import Packages
from oci_builder.payload.readiness.report import GpuFile, ReadinessReport, Row
from oci_builder.payload.readiness.tree import Tree


@dataclass(frozen=True, slots=True)
class Contract:
    """What a tree is judged against: GPU and driver, oldest host, and what is known beforehand."""

    target: Target
    glibc: Glibc
    rules: Rules


def judge(tree: Tree, subject: str, contract: Contract) -> ReadinessReport:
    """Judge a final tree; pure, and the same rows in the same order for the same tree."""
    packages = Packages.of(tree)
    loader = Loader(tree, contract.rules)
    target = contract.target
    gpu, rows = judge_gpu(tree, packages, target)
    rows += [
        *judge_libraries(tree, packages, loader),
        *judge_duplicates(tree, packages),
        *judge_hygiene(tree, packages),
        *judge_host(tree, packages, loader, contract.glibc),
        *judge_driver(tree, packages, loader, target),
        *judge_cuda(tree, packages, target),
        *judge_jit(tree, packages, contract.rules, complete=loader.complete),
        *judge_versions(tree, packages, contract.rules, target),
    ]
    applied: list[Row] = contract.rules.apply(rows, str(target.arch))
    return ReadinessReport(
        subject=subject,
        target=str(target.arch),
        driver=f"R{target.driver}",
        glibc=contract.glibc.text,
        complete=loader.complete,
        facts=_totals(tree, packages, loader),
        gpu=tuple(_allowed(gpu, applied)),
        rows=tuple(sorted(applied, key=Row.key)),
    )


def _allowed(gpu: Iterable[GpuFile], rows: Iterable[Row]) -> Iterator[GpuFile]:
    reasons = {(r.where, r.package): r.allowed for r in rows if r.allowed and r.code.startswith("gpu.")}
    for file in gpu:
        reason = reasons.get((file.where, file.package))
        yield replace(file, allowed=reason) if reason else file


def _totals(tree: Tree, packages: Packages, loader: Loader) -> dict[str, Any]:
    need = {
        family: {"version": ".".join(map(str, version)), "where": path.decode("utf-8", "backslashreplace")}
        for family, (version, path) in sorted(highest(tree, loader).items())
    }
    return {
        "files": sum(n.kind == "file" for n in tree.nodes.values()),
        "bytes": sum(n.size for n in tree.nodes.values()),
        "libraries": sum(1 for _ in libraries(tree)),
        "packages": sum(len(p) for p in packages.by_site.values()),
        "requires": need,
    }
