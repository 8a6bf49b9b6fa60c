"""The arithmetic that operators are compared with, and the comparison; torch on a CPU is enough for both."""

from __future__ import annotations

import math
from typing import Any

import checks_lab  # noqa: F401
import pytest

torch = pytest.importorskip("torch", reason="test_in_debian.py runs it, or OCI_BUILDER_TORCH: see conftest.py")

from nrl_checks import kernels  # noqa: E402


def leaves(*shapes: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def matmul(a: Any, b: Any) -> Any:
    return a @ b


def test_an_operator_that_is_right_has_small_errors_for_output_and_each_gradient() -> None:
    found = kernels.against(matmul, matmul, leaves((8, 16), (16, 4)))
    assert set(found) == {"output", "gradient 0", "gradient 1"}
    assert max(found.values()) < 1e-6


def test_bf16_stays_below_the_bound() -> None:
    given = [x.detach().to(torch.bfloat16).requires_grad_() for x in leaves((64, 256), (256, 64))]
    assert max(kernels.against(matmul, matmul, given).values()) < 2e-2


def test_a_wrong_output_and_a_wrong_gradient_show() -> None:
    found = kernels.against(lambda a, b: a @ b + b.detach().sum(), matmul, leaves((8, 16), (16, 4)))
    assert found["output"] > 2e-2
    found = kernels.against(lambda a, b: a @ (b * 0.9 + b.detach() * 0.1), matmul, leaves((8, 16), (16, 4)))
    assert found["output"] < 1e-6
    assert found["gradient 1"] > 2e-2


def test_a_gradient_that_is_not_there_shows() -> None:
    found = kernels.against(lambda a, b: a @ b.detach(), matmul, leaves((8, 16), (16, 4)))
    assert math.isinf(found["gradient 1"])
    found = kernels.against(lambda a, b: (a @ b).detach(), matmul, leaves((8, 16), (16, 4)))
    assert [math.isinf(error) for error in found.values()] == [False, True, True]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_near(value: float) -> None:
    right = torch.ones(4)
    assert not kernels.distance(torch.full((4,), value), right) <= 2e-2


def test_another_shape_is_not_near() -> None:
    assert math.isinf(kernels.distance(torch.ones(4), torch.ones(2, 2)))


def test_the_scan_is_the_closed_form_of_its_recurrence() -> None:
    """With one state and constant inputs h is a geometric series."""
    length, step, a = 6, math.log(1 + math.e), -0.5
    one = torch.ones(1, 1, length)
    found = kernels.scan(one, one, torch.full((1, 1), a), one, one, torch.zeros(1))
    decay = math.exp(step * a)
    wanted = [step * sum(decay**n for n in range(t + 1)) for t in range(length)]
    assert torch.allclose(found[0, 0], torch.tensor(wanted), rtol=1e-5)


def test_the_scan_adds_the_input_by_d() -> None:
    u = torch.randn(2, 3, 5)
    zero = torch.zeros(2, 4, 5)
    found = kernels.scan(u, torch.zeros(2, 3, 5), -torch.ones(3, 4), zero, zero, torch.tensor([1.0, 2.0, 3.0]))
    assert torch.allclose(found, u * torch.tensor([1.0, 2.0, 3.0])[:, None])
