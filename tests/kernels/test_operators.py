"""Operators of our own are what torch.compile takes them for."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from manyhands.convert import nf4
from manyhands.kernels import matmul
from manyhands.kernels.fp8 import ops

X, Y = torch.randn(32, 16), torch.randn(16, 48)
LOW, B = torch.randn(32, 4), torch.randn(48, 4)
CODES, SCALES = ops._rows([X], None)
CASES: list[tuple[Any, tuple[Any, ...]]] = [
    (matmul._mm_wide_op, (X, Y)),
    (matmul._low_rank_linear_op, (X, Y.T.contiguous(), torch.randn(48), LOW, B)),
    (matmul._sum_of_matmuls_op, ([X, X], [Y, Y])),
    (ops._rows_op, ([X, X], None)),
    (ops._stacked_op, ([X, X],)),
    (ops._transpose_op, ([X], SCALES, False)),
    (ops._gated_op, (X, X, "silu")),
    (ops._gated_backward_op, (X, X, X, torch.ones(32, 1), "silu", True)),
    (ops._matmul_op, (CODES, SCALES, CODES, SCALES, torch.float32, None, [], [])),
]


@pytest.mark.parametrize(("operator", "arguments"), CASES, ids=[str(operator) for operator, _ in CASES])
def test_shapes_that_the_compiler_is_told_are_those_of_the_results(operator: Any, arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(operator, arguments, test_utils="test_faketensor")


def test_outside_an_autograd_function_no_gradient_is_lost_in_silence() -> None:
    with pytest.warns(UserWarning, match="manyhands::mm_wide: an autograd kernel was not registered"):
        matmul._mm_wide_op(X.clone().requires_grad_(), Y).sum().backward()


def test_a_module_may_be_imported_again() -> None:
    """As notebooks do, and processes that are forked with modules loaded."""
    importlib.reload(matmul)
    assert torch.allclose(matmul._mm_wide_op(X, Y), X @ Y)
    torch.library.opcheck(matmul._mm_wide_op, (X, Y), test_utils="test_faketensor")


def test_those_of_nf4_are_operators_too() -> None:
    assert {str(nf4.nf4_low_rank_linear), str(nf4.nf4_input_gradient)} == {
        "manyhands.nf4_low_rank_linear.default",
        "manyhands.nf4_input_gradient.default",
    }
