"""Which code runs on which GPU: the compatibility rules of the CUDA documentation, as a table."""

from __future__ import annotations

import pytest

from oci_builder.model.errors import SpecError
from oci_builder.payload.fatbin import Arch, Code
from oci_builder.payload.readiness.arch import Target


@pytest.mark.parametrize(
    ("code", "gpu", "expected"),
    [
        ("sass sm_100", "sm_100", "native"),
        ("sass sm_100", "sm_103", "native"),
        ("sass sm_103", "sm_100", "none"),
        ("sass sm_90", "sm_100", "none"),
        ("sass sm_80", "sm_86", "native"),
        ("sass sm_80", "sm_87", "none"),
        ("sass sm_100a", "sm_100", "native"),
        ("sass sm_100a", "sm_103", "none"),
        ("sass sm_90a", "sm_100", "none"),
        ("sass sm_100f", "sm_100", "native"),
        ("sass sm_100f", "sm_103", "native"),
        ("sass sm_103f", "sm_100", "none"),
        ("sass sm_120f", "sm_100", "none"),
        ("sass sm_100f", "sm_120", "none"),
        ("ptx sm_80", "sm_100", "ptx"),
        ("ptx sm_90", "sm_70", "none"),
        ("ptx sm_120", "sm_100", "none"),
        ("ptx sm_90a", "sm_100", "none"),
        ("ptx sm_90a", "sm_90", "ptx"),
        ("ptx sm_100f", "sm_103", "ptx"),
        ("ptx sm_100f", "sm_120", "none"),
        ("other sm_100", "sm_100", "none"),
    ],
)
def test_compatibility(code: str, gpu: str, expected: str) -> None:
    kind, arch = code.split()
    parsed = Arch.parse(arch)
    assert parsed is not None
    assert Target.parse(gpu).runs(Code(kind, parsed)) == expected


def test_ptx_of_a_newer_isa_than_the_driver_compiles_does_not_run() -> None:
    code = Code("ptx", Arch(90), (9, 1))
    assert Target.parse("sm_100", 580).runs(code) == "none"
    assert Target.parse("sm_100", 590).runs(code) == "ptx"


def test_the_best_entry_of_a_module_counts() -> None:
    codes = [Code("sass", Arch(90)), Code("ptx", Arch(80)), Code("sass", Arch(100))]
    assert Target.parse("sm_100").best(codes) == "native"
    assert Target.parse("sm_120").best(codes) == "ptx"


@pytest.mark.parametrize("text", ["sm_100a", "100", "sm_", "", "compute", "sm_1000", "sm_9x"])
def test_a_target_that_is_no_gpu_is_refused(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        Target.parse(text)
    assert caught.value.code == "spec.target"


def test_an_unknown_driver_branch_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        Target.parse("sm_100", 123)
    assert caught.value.code == "spec.driver"
