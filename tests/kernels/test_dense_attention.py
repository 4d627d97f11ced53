"""Attention over rows of one length: which kernel is chosen, what it computes, and which batches say that they have
such rows.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from manyhands.data.batch.collate import BatchShape, collate_samples
from manyhands.data.store.streams import MASK, TOKENS, Sample, make_sample
from manyhands.kernels.attention import dense as dense_attention
from manyhands.kernels.attention.dense import attend_dense, choose_dense, compare
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
