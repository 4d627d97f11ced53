"""Kernels around the grouped products of experts: what differs from the definition is not taken.

The definition is compared with transformers' loop over experts in tests/convert/test_experts.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.core.limits import MAX_EXPERT_RANK
from manyhands.core.machine import GpuArchitecture
from manyhands.kernels.backend import Backend
from manyhands.kernels.experts import ops, reference, select

CPU = torch.device("cpu")
NAMES = ("gather_low", "gate_low", "gate_low_backward", "gathered_outer", "multiply_and_add", "combine")
NAMES += ("multiply_rows_and_add",)
ROWS = {"gather_low_rows": ops.gather_low_rows, "gate_low_rows": ops.gate_low_rows}


def kernels(**replaced: Any) -> Any:
    return SimpleNamespace(**{name: getattr(reference, name) for name in NAMES} | ROWS | replaced)


def test_the_definition_passes_its_own_test() -> None:
    assert select.find_fault(kernels(), CPU, torch.float32) == ""


def scale_by_the_next_group(x: Any, tokens: Any, ends: Any, a: Any, scale: float, factors: Any) -> Any:
    factors = None if factors is None else factors.roll(1, 0)
    return ops.gather_low_rows(x, tokens, ends, a, scale, factors)


def forget_stack_scales(values: Any, scales: Any, stack: Any, stack_scales: Any, *others: Any) -> Any:
    return reference.multiply_rows_and_add(values, scales, stack, torch.ones_like(stack_scales), *others)


def forget_scales(*arguments: Any) -> Any:
    values, scales, following = ops.gate_low_rows(*arguments)
    return values, torch.ones_like(scales), following


@pytest.mark.parametrize(
    ("replaced", "is_wrong"),
    [
        ({}, False),
        ({"gather_low_rows": scale_by_the_next_group}, True),
        ({"gate_low_rows": forget_scales}, True),
        ({"multiply_rows_and_add": forget_stack_scales}, True),
    ],
)
def test_rows_in_fp8_are_compared_with_those_they_are_made_from(
    replaced: dict[str, Any], is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "architecture_of", lambda device: GpuArchitecture("nvidia", (9, 0)))
    assert ("missed the comparison" in select.find_fault(kernels(**replaced), CPU, torch.float32)) == is_wrong


def shift_weights(both: torch.Tensor, places: torch.Tensor, num_chosen: int, weights: Any) -> torch.Tensor:
    return reference.combine(both, places, num_chosen, None if weights is None else weights.flip(1))


def forget_a_bias(both: Any, low: Any, b: Any, a: Any, bias: Any, *others: Any) -> Any:
    return reference.gate_low(both, low, b, a, None, *others)


def forget_weights(
    both: Any, low: Any, b: Any, a: Any, bias: Any, v: Any, following: Any, weights: Any, *more: Any
) -> Any:
    return reference.gate_low_backward(both, low, b, a, bias, v, following, torch.ones_like(weights), *more)


def add_the_next_group(x: Any, weight: Any, low: Any, wide: torch.Tensor, ends: Any) -> torch.Tensor:
    return reference.multiply_and_add(x, weight, low, wide.roll(1, 0), ends)


@pytest.mark.parametrize(
    "wrong",
    [
        {"combine": shift_weights},
        {"gate_low": forget_a_bias},
        {"gate_low_backward": forget_weights},
        {"multiply_and_add": add_the_next_group},
        {"gather_low": lambda x, tokens, ends, a, scale: reference.gather_low(x, tokens, ends, a, 2 * scale)},
        {"gathered_outer": lambda x, tokens, *rest, **kind: reference.gathered_outer(x, tokens.flip(0), *rest, **kind)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_kernel_is_not_taken(wrong: dict[str, Any]) -> None:
    assert "missed the comparison" in select.find_fault(kernels(**wrong), CPU, torch.float32)


def test_the_cpu_other_dtypes_and_high_ranks_take_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_kernels", kernels())
    for x in (torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, 4)):
        assert select.kernels_for(x, 16) is reference
    on_gpu: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert select.kernels_for(on_gpu, 16) is select._kernels
    assert select.kernels_for(on_gpu, 2 * MAX_EXPERT_RANK) is reference
    select.use(Backend("plain torch", "asked"))
    assert select.kernels_for(on_gpu, 16) is reference


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_agrees_as_its_interpreter_runs_it() -> None:
    code = (
        "import torch; from manyhands.kernels.experts import select, triton; "
        "print('fault:', select.find_fault(triton, torch.device('cpu'), torch.float32))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900, check=True
    )
    assert done.stdout.splitlines()[-1].strip() == "fault:"


@pytest.mark.gpu
def test_a_gpu_takes_triton() -> None:
    backend = select.choose_backend(torch.device("cuda"))
    assert backend.name == "triton", backend.reason
