"""Weights in NF4 back to floating point: the definition in plain torch, bitsandbytes and the Triton kernel agree to the
bit, and what does not is not taken.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from manyhands.kernels.nf4 import reference, select

pytest.importorskip("bitsandbytes")

CPU = torch.device("cpu")
GPU = torch.device("cuda")
DEVICES = [CPU, pytest.param(GPU, marks=pytest.mark.gpu)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# one value, part of a row, one row, several with a padded one, blocks across rows of the weight, odd numbers of values
SHAPES = [(1, 1), (1, 5), (64, 64), (64, 256), (75, 96), (33, 75), (300, 200), (301, 256), (1024, 4096)]


def define(
    codes: torch.Tensor,
    statistics: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    upper_first: bool = True,
    rounded_once: bool = False,
    offset_added: bool = True,
) -> torch.Tensor:
    """The definition, with what a kernel may get wrong."""
    codes = codes.view(torch.uint8)
    halves = [codes >> 4, codes & 15] if upper_first else [codes & 15, codes >> 4]
    level = reference.levels(codes.device)[torch.stack(halves, -1).long()].view(-1, 64)
    if statistics.shape[1] * statistics.element_size() == 1024:  # absolute maxima in float32
        maxima = statistics.view(torch.float32).view(-1, 1)
        return (level * maxima).view(-1)[: shape[0] * shape[1]].view(shape).to(dtype)
    second = statistics.view(torch.uint8)[:, :256].long()
    scales, offsets = statistics.view(torch.float32)[:, 64:65], statistics.view(torch.float32)[:, 65:66]
    wide = torch.float64 if rounded_once else torch.float32
    absmax = reference.dynamic_code(codes.device)[second].to(wide) * scales.to(wide)
    absmax = (absmax + offsets).float() if offset_added else absmax.float()
    return (level * absmax.view(-1, 1)).view(-1)[: shape[0] * shape[1]].view(shape).to(dtype)


@pytest.mark.ci
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_definition_passes_the_self_test(dtype: torch.dtype, device: torch.device) -> None:
    assert reference.count_unlike(define, device, dtype) == 0


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("wrong", [{"upper_first": False}, {"rounded_once": True}, {"offset_added": False}], ids=str)
def test_a_wrong_kernel_does_not(wrong: dict[str, bool], device: torch.device) -> None:
    """Nor one that fuses multiplication and addition, which in bfloat16 hardly a value shows."""
    assert reference.count_unlike(lambda *given: define(*given, **wrong), device, torch.bfloat16) > 0


def test_one_bit_is_seen_and_so_is_a_wrong_shape() -> None:
    def flipped(
        codes: torch.Tensor, statistics: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        weight = define(codes, statistics, shape, dtype)
        weight.view(-1)[-1:].view(torch.int32)[0] ^= 1
        return weight

    assert reference.count_unlike(flipped, CPU, torch.float32) == 2 * len(reference.TRIED_SHAPES)
    assert reference.count_unlike(lambda *given: define(*given).t(), CPU, torch.float32) > 0


def test_a_cpu_takes_bitsandbytes_whatever_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = select.choose_backend(CPU, torch.bfloat16)
    assert backend.name == "bitsandbytes" and select.describe(backend) == "bitsandbytes (the device is cpu)"
    monkeypatch.setitem(select._chosen, torch.float32, pytest.fail)
    codes, statistics = reference.draw_weight((75, 96), CPU)
    weight = select.dequantize(codes, statistics, (75, 96), torch.float64)
    assert torch.equal(weight, define(codes, statistics, (75, 96), torch.float32).double())
    select.use(backend, torch.float64)
    assert torch.float32 not in select._chosen


@pytest.mark.parametrize(
    ("module", "unlike", "reason"),
    [
        (None, 0, "Triton cannot be imported"),
        (SimpleNamespace(), 0, "Triton failed on this device: AttributeError"),
        (SimpleNamespace(dequantize_triton=None), 3, "Triton gave 3 values of its self-test with other bits"),
        (
            SimpleNamespace(dequantize_triton=None),
            ZeroDivisionError("no"),
            "Triton failed on this device: ZeroDivisionError: no",
        ),
        (SimpleNamespace(dequantize_triton=None), 0, ""),
    ],
)
def test_the_choice_and_its_reason(
    module: SimpleNamespace | None, unlike: int | Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(*_: object) -> int:
        if isinstance(unlike, Exception):
            raise unlike
        return unlike

    monkeypatch.setitem(sys.modules, "manyhands.kernels.nf4.triton", module)
    monkeypatch.setattr(select, "count_unlike", count)
    backend = select.choose_backend.__wrapped__(GPU, torch.bfloat16)
    assert backend.name == ("bitsandbytes" if reason else "triton") and backend.reason.startswith(reason)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_gives_bitsandbytes_bits_as_triton_interprets_it() -> None:
    """In a process of its own, as Triton decides at import. Not in bfloat16, which its interpreter cuts off where a GPU
    rounds.
    """
    code = (
        "import torch; from manyhands.kernels.nf4 import reference, triton; cpu = torch.device('cpu'); "
        "print(reference.count_unlike(triton.dequantize_triton, cpu, torch.float16))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.splitlines()[-1] == "0"


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("viewed", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_gives_bitsandbytes_bits(dtype: torch.dtype, viewed: torch.dtype) -> None:
    from manyhands.kernels.nf4.triton import dequantize_triton

    for shape in SHAPES:
        codes, statistics = (stored.view(viewed) for stored in reference.draw_weight(shape, GPU))
        found, wanted = (
            way(codes, statistics, shape, dtype) for way in (dequantize_triton, reference.dequantize_reference)
        )
        assert found.shape == wanted.shape and found.dtype == dtype
        assert torch.equal(reference._bits(found), reference._bits(wanted)), shape


@pytest.mark.gpu
def test_a_gpu_takes_triton_for_the_dtype_that_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = select.choose_backend(GPU, torch.bfloat16)
    assert backend.name == "triton", backend.reason
    monkeypatch.setattr(select, "_chosen", {})
    select.use(backend, torch.bfloat16)
    plain: list[torch.dtype] = []
    monkeypatch.setattr(
        select,
        "dequantize_reference",
        lambda codes, statistics, shape, dtype: plain.append(dtype) or torch.empty(shape),
    )
    codes, statistics = reference.draw_weight((301, 256), GPU)
    weight = select.dequantize(codes.view(torch.bfloat16), statistics.view(torch.bfloat16), (301, 256), torch.bfloat16)
    assert torch.equal(weight, define(codes, statistics, (301, 256), torch.bfloat16))
    assert not plain
    select.dequantize(codes, statistics, (301, 256), torch.float16)
    assert plain == [torch.float16]


@pytest.mark.gpu
def test_more_values_than_32_bits_count() -> None:
    """Rows stand alone, so the last ones are compared by themselves."""
    from manyhands.kernels.nf4.triton import dequantize_triton

    num_rows, columns = 2**31 // reference.ROW_VALUES + 3, 256
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("8 GiB of GPU memory are not free")
    codes, statistics = (
        stored.repeat(num_rows // 9 + 1, 1)[:num_rows] for stored in reference.draw_weight((9 * 64, columns), GPU)
    )
    shape = (num_rows * 64 - 7, columns)
    weight = dequantize_triton(codes, statistics, shape, torch.bfloat16)
    for rows in (slice(0, 4), slice(num_rows - 4, num_rows)):
        part = weight[rows.start * 64 : rows.stop * 64]
        wanted = reference.dequantize_reference(codes[rows], statistics[rows], tuple(part.shape), torch.bfloat16)
        assert torch.equal(reference._bits(part), reference._bits(wanted))
