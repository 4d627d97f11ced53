"""Attention over rows of one length: which kernel is chosen, what it computes, and which batches say that they have
such rows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from manyhands.core import limits
from manyhands.data.batch.collate import BatchShape, collate_samples
from manyhands.data.store.streams import MASK, TOKENS, Sample, make_sample
from manyhands.engine.activations import attention_contexts
from manyhands.kernels.attention import dense as dense_attention
from manyhands.kernels.attention.dense import attend_dense, attend_in_parts, choose_dense, compare
from manyhands.kernels.attention.reference import ALLOWED

CPU = torch.device("cpu")


def draw(
    heads: int, length: int = 37, dim: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    return torch.randn(2, heads, length, dim, generator=torch.Generator().manual_seed(seed + heads)).to(dtype)


def attend_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Three lines in float64."""
    key, value = (x.double().repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    return (query.double() @ key.mT * scaling).masked_fill(hidden, -torch.inf).softmax(-1) @ value


# -- choice


@pytest.mark.parametrize(
    "device, dtype, reason",
    [
        ("cpu", torch.bfloat16, "the device is cpu"),
        ("cuda", torch.float32, "float32 is computed by torch's own attention"),
    ],
)
def test_where_none_is_tried_the_reason_is_given(device: str, dtype: torch.dtype, reason: str) -> None:
    chosen = choose_dense(torch.device(device), dtype, 4, 2, 16)
    assert chosen.name == "" and chosen.reason == reason


def test_where_sums_keep_an_order_cudnn_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass has none, and torch checks that only where it chooses itself."""
    monkeypatch.setattr(dense_attention, "compare", lambda *_: 0.0)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    chosen = choose_dense.__wrapped__(torch.device("cuda"), torch.bfloat16, 4, 2, 16)
    assert chosen.name == "flash" and chosen.reason == "cudnn sums gradients in no fixed order"


def test_a_kernel_that_does_not_run_raises_what_the_choice_catches() -> None:
    with pytest.raises(RuntimeError):
        compare("cudnn", CPU, torch.bfloat16, 4, 2, 16)


def test_the_self_test_sees_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare("flash", CPU, torch.bfloat16, 2, 2, 64) <= ALLOWED

    def attend_wrongly(query, key, value, scaling, name):  # type: ignore[no-untyped-def]
        return attend_dense(query, key, value, scaling, name) * 1.02

    monkeypatch.setattr(dense_attention, "attend_dense", attend_wrongly)
    assert compare("flash", CPU, torch.bfloat16, 2, 2, 64) > ALLOWED


# -- computation


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_flash_agrees_with_float64_forward_and_backward(groups: int, dtype: torch.dtype, bound: float) -> None:
    inputs = [draw(heads, dtype=dtype, seed=seed).requires_grad_() for seed, heads in enumerate((4, groups, groups))]
    given = draw(4, dtype=dtype, seed=9)
    out = attend_dense(*inputs, 0.3, "flash")
    expected = attend_reference(*inputs, 0.3)
    found = [out, *torch.autograd.grad(out, inputs, given)]
    wanted = [expected, *torch.autograd.grad(expected, inputs, given.double())]
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other.double()).norm() <= bound * other.double().norm()


# -- a part of the heads at a time


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("heads, groups, parts", [(8, 4, 2), (8, 4, 4), (4, 4, 2), (6, 3, 3), (8, 2, 2), (4, 1, 1)])
def test_heads_in_parts_give_what_they_give_together(
    heads: int,
    groups: int,
    parts: int,
    transposed: bool,
    copied: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_STRIDED_VALUES", 0 if copied else 2**31)
    inputs = [draw(n, dtype=dtype, seed=seed) for seed, n in enumerate((heads, groups, groups))]
    given = draw(heads, dtype=dtype, seed=9)
    if transposed:  # in memory (b, t, heads, d), as models have them
        *inputs, given = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*inputs, given))
    inputs = [x.requires_grad_() for x in inputs]
    whole, in_parts = attend_dense(*inputs, 0.3, "flash"), attend_in_parts(*inputs, 0.3, "flash", parts)[0]
    torch.testing.assert_close(in_parts, whole)
    found, expected = (torch.autograd.grad(out, inputs, given) for out in (in_parts, whole))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("length, parts", [(37, 1), (64, 1), (65, 2), (128, 2), (129, 4), (300, 4)])
def test_the_parts_follow_from_the_length(length: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limited to the workspace of 64 tokens with 8 heads over 4 of 16 dimensions, in float32."""
    monkeypatch.setattr(limits, "MAX_ATTENTION_WORKSPACE", 64 * 8 * 16 * (4 + 2 * 4))
    run, ran = dense_attention._run_forward, []

    def noted(query: torch.Tensor, *others: Any, **more: Any) -> Any:
        ran.append(query.shape)
        return run(query, *others, **more)

    monkeypatch.setattr(dense_attention, "_run_forward", noted)
    inputs = [draw(n, length) for n in (8, 4, 4)]
    out = attend_dense(*inputs, None, "flash")
    assert ran == [(2, 8 // parts, length, 16)] * parts and parts == limits.count_head_parts(length, 8, 4, 16, 4)
    expected = attend_reference(*inputs, 0.25)
    assert (out.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_parts_run_once_where_results_of_attention_are_kept(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run, num_runs = dense_attention._run_forward, []
    monkeypatch.setattr(dense_attention, "_run_forward", lambda *x, **y: num_runs.append(1) or run(*x, **y))
    inputs = [draw(n).requires_grad_() for n in (8, 4, 4)]

    def block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend_in_parts(query * 2, key, value, None, "flash", 2)[0].transpose(1, 2).flatten(2).sin()

    def recomputed(*x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, *x, use_reentrant=False, context_fn=attention_contexts)

    out = (torch.compile(recomputed, fullgraph=True) if compiled else recomputed)(*inputs)
    found = torch.autograd.grad(out.sum(), inputs)
    assert len(num_runs) == 2
    torch.testing.assert_close(found, torch.autograd.grad(block(*inputs).sum(), inputs))


# -- which batches have rows of one length


class SamplesOf:
    """Samples of the given lengths, all trained."""

    streams = (TOKENS, MASK)

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def sample(self, index: int) -> Sample:
        length = self.lengths[index]
        return make_sample(np.arange(length, dtype=np.int32), np.ones(length, dtype=bool))


def collated(lengths: tuple[int, ...], tokens: int, row_length: int | None) -> SimpleNamespace:
    shape = BatchShape(packed=True, tokens=tokens, longest=max(lengths, default=8), documents=4, row_length=row_length)
    batch = collate_samples(SamplesOf(*lengths), range(len(lengths)), shape)
    return SimpleNamespace(row_length=batch.get("row_length"), tokens=batch["input_ids"].shape[1])


@pytest.mark.parametrize(
    "lengths, tokens, row_length, said",
    [
        ((8, 8, 8), 24, 8, 8),  # full
        ((8, 8), 24, 8, 8),  # padding is one more row
        ((), 24, 8, 8),  # nothing but padding
        ((8, 8), 20, 8, 8),  # and here too short for one
        ((), 4, 8, None),
        ((8, 5), 24, 8, None),  # a shorter row, as in validation
        ((8, 8), 24, None, None),  # the run's rows differ
    ],
)
def test_a_batch_says_its_row_length_only_where_all_rows_have_it(
    lengths: tuple[int, ...], tokens: int, row_length: int | None, said: int | None
) -> None:
    batch = collated(lengths, tokens, row_length)
    assert (batch.tokens, batch.row_length) == (tokens, said)


# -- the real kernels


@pytest.mark.gpu
@pytest.mark.parametrize("heads, groups, dim", [(32, 8, 128), (9, 3, 64)])
def test_a_gpu_has_a_kernel_for_rows(heads: int, groups: int, dim: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    device = torch.device("cuda", 0)
    chosen = choose_dense(device, torch.bfloat16, heads, groups, dim)
    assert chosen.name, chosen.reason
    inputs = [draw(n, 300, dim, torch.bfloat16, seed).to(device) for seed, n in enumerate((heads, groups, groups))]
    out = attend_dense(*inputs, None, chosen.name)
    expected = attend_reference(*(x.cpu() for x in inputs), dim**-0.5)
    assert (out.cpu().double() - expected).norm() <= 5e-3 * expected.norm()


def draw_on_gpu(length: int, *heads: int) -> list[torch.Tensor]:
    """In memory (1, t, heads, 128), as models have them."""
    gpu = torch.Generator("cuda").manual_seed(length)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": gpu}
    return [torch.randn(1, length, n, 128, **options).transpose(1, 2).requires_grad_() for n in heads]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "flash"])
@pytest.mark.parametrize("parts", [2, 8])
def test_parts_of_heads_agree_on_a_gpu(name: str, parts: int) -> None:
    *inputs, given = draw_on_gpu(16384, 32, 8, 8, 32)
    whole, in_parts = attend_dense(*inputs, None, name), attend_in_parts(*inputs, None, name, parts)[0]
    found, expected = ((out, *torch.autograd.grad(out, inputs, given)) for out in (in_parts, whole))
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() <= 5e-3 * other.float().norm()


@pytest.mark.gpu
def test_parts_of_heads_spare_the_workspace_of_the_others() -> None:
    """131,072 tokens: 4 GiB for all heads, and an eighth of that with one part's gradients beside all heads'."""
    length, parts = 131072, 8
    if choose_dense(torch.device("cuda", 0), torch.bfloat16, 32, 8, 128).name != "cudnn":
        pytest.skip("needs cuDNN, whose workspace the plan counts")
    *inputs, given = draw_on_gpu(length, 32, 8, 8, 32)

    def peak(num_parts: int) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = (
            attend_in_parts(*inputs, None, "cudnn", num_parts)[0]
            if num_parts > 1
            else attend_dense(*inputs, None, "cudnn")
        )
        torch.autograd.grad(out, inputs, given)
        return torch.cuda.max_memory_allocated() - before

    workspace = length * limits.attention_workspace(32, 8, 128, 2)
    assert workspace == 4 * 2**30
    gradients_of_part = length * 2 * (32 + 2 * 8) * 128 // parts
    rounding = 4 * 2**21  # the allocator's blocks are whole multiples of 2 MiB
    assert peak(1) - peak(parts) >= workspace - workspace // parts - gradients_of_part - rounding
