"""Which code runs on which GPU.

Sources: CUDA programming guide, "Compute capabilities" and "Binary compatibility"; CUDA compatibility guide, tables of
drivers; PTX ISA, release notes. Machine code runs on the same major capability with an equal or higher minor one, not
between desktop and Tegra parts; ``a`` code on exactly its own GPU; ``f`` code in its family, from its minor up. PTX
without a suffix is compiled for any GPU at or above it by a driver that knows its ISA version.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oci_builder.model.errors import SpecError, show
from oci_builder.payload.fatbin import Arch, Code

# Integrated GPUs: their machine code and that of cards are not interchangeable.
_TEGRA = frozenset({53, 62, 72, 87, 101, 110})
NATIVE, PTX, NONE = "native", "ptx", "none"

# Driver branch -> (CUDA version it brings, newest PTX ISA it compiles).
DRIVERS: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {
    525: ((12, 0), (8, 0)),
    530: ((12, 1), (8, 1)),
    535: ((12, 2), (8, 2)),
    545: ((12, 3), (8, 3)),
    550: ((12, 4), (8, 4)),
    555: ((12, 5), (8, 5)),
    560: ((12, 6), (8, 5)),
    565: ((12, 7), (8, 6)),
    570: ((12, 8), (8, 7)),
    575: ((12, 9), (8, 8)),
    580: ((13, 0), (9, 0)),
    590: ((13, 1), (9, 1)),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU and the driver branch on the node."""

    arch: Arch
    driver: int = 580

    @classmethod
    def parse(cls, text: str, driver: int = 580) -> Target:
        """``sm_100`` as a target.

        Raises:
            SpecError: ``spec.target``, ``spec.driver``.
        """
        arch = Arch.parse(text)
        if arch is None or arch.suffix:
            raise SpecError(
                "spec.target", f"target {show(text)} is no GPU: write sm_ and the compute capability, such as sm_100",
                where="--target", expected="sm_NN", actual=text,
            )  # fmt: skip
        if driver not in DRIVERS:
            known = ", ".join(f"R{d}" for d in DRIVERS)
            raise SpecError(
                "spec.driver", f"driver branch {driver} is not in the table ({known})", where="--driver", actual=driver
            )
        return cls(arch, driver)

    @property
    def cuda(self) -> tuple[int, int]:
        """The CUDA version that the driver brings."""
        return DRIVERS[self.driver][0]

    @property
    def ptx_isa(self) -> tuple[int, int]:
        """The newest PTX ISA that the driver compiles."""
        return DRIVERS[self.driver][1]

    def runs(self, code: Code) -> str:
        """``native``, ``ptx`` or ``none``: how this target runs one piece of code."""
        if code.kind == "sass":
            return NATIVE if _sass_runs(code.arch, self.arch) else NONE
        if code.kind == "ptx" and _ptx_compiles(code.arch, self.arch) and code.isa <= self.ptx_isa:
            return PTX
        return NONE

    def best(self, codes: Iterable[Code]) -> str:
        """How this target runs a module of which it may pick any entry."""
        found = {self.runs(code) for code in codes}
        return NATIVE if NATIVE in found else PTX if PTX in found else NONE


def _sass_runs(code: Arch, gpu: Arch) -> bool:
    if code.suffix == "a" or gpu.number in _TEGRA or code.number in _TEGRA:
        return code.number == gpu.number
    return code.major == gpu.major and code.number <= gpu.number


def _ptx_compiles(code: Arch, gpu: Arch) -> bool:
    if code.suffix == "a":
        return code.number == gpu.number
    if code.suffix == "f":
        return code.major == gpu.major and code.number <= gpu.number
    return code.number <= gpu.number
