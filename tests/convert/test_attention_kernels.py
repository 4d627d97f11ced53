"""Which kernel ``attend_varlen`` takes for a batch: rows of one length, packs, sliding windows, heads that no self-test
has seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from manyhands.kernels.attention import flash4
from manyhands.kernels.attention.flash4 import bind
from manyhands.kernels.attention.reference import attend_reference
from manyhands.kernels.backend import Backend
from manyhands.model import attention
from manyhands.model.attention import (
    VARLEN,
    AttentionKernels,
    attend_varlen,
    attention_kwargs,
    choose_attention_kernels,
)
from tests.kernels.flash4_stub import interface

HEADS, GROUPS, DIM = 4, 2, 16
NONE, VARLEN_PACKS = Backend(""), Backend("varlen", "a reason")
FLASH_ROWS, FLASH_PACKS = Backend("flash"), Backend("flash4")


@pytest.fixture(autouse=True)
def chosen() -> Iterator[None]:
    """What a test chooses holds for the process."""
    before, calls = attention._kernels, flash4._calls
    yield
    attention._kernels, flash4._calls = before, calls


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels ran: torch's varlen is a loop here, FlashAttention 4 a stand-in."""
    names: list[str] = []

    def varlen(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):  # type: ignore[no-untyped-def]
        names.append("varlen")
        return attend_reference(query, key, value, cu_seq_q, scale, window_size[0])

    def noted(name: str, function: Any) -> None:
        monkeypatch.setattr(
            attention, name, lambda *args: names.append(name.removeprefix("attend_")) or function(*args)
        )

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "TAKES_GROUPS", True)
    noted("attend_dense", attention.attend_dense)
    noted("attend_flash4", attention.attend_flash4)
    return names


def use(rows: Backend, packs: Backend, dtype: torch.dtype = torch.float32, heads: int = HEADS) -> AttentionKernels:
    calls = bind(interface())
    assert not isinstance(calls, str)
    flash4._calls = calls
    attention._kernels = AttentionKernels(rows, packs, heads, GROUPS, DIM, dtype)
    return attention._kernels


def attend(
    lengths: list[int], row_length: int | None = None, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Found and expected, (1, t, h, d)."""
    total = sum(lengths)
    q, k, v = (
        torch.randn(1, n, total, DIM, generator=torch.Generator().manual_seed(n)) for n in (HEADS, GROUPS, GROUPS)
    )
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    batch = {
        "input_ids": torch.zeros(1, total),
        "position_ids": torch.zeros(1, total),
        "cu_seq_lens": bounds,
        "max_length": max(lengths),
    }
    kwargs = attention_kwargs(batch | ({"row_length": row_length} if row_length else {}), VARLEN)
    del kwargs["position_ids"]
    found, _ = attend_varlen(torch.nn.Identity(), q, k, v, None, scaling=0.3, sliding_window=window, **kwargs)
    flat = [x[0].transpose(0, 1).double() for x in (q, k, v)]
    return found, attend_reference(*flat, bounds, 0.3, window - 1 if window else -1)[None]


@pytest.mark.parametrize(
    "rows, packs, lengths, row_length, window, taken",
    [
        (FLASH_ROWS, VARLEN_PACKS, [8, 8, 8], 8, None, "dense"),
        (FLASH_ROWS, FLASH_PACKS, [8, 8, 8], 8, None, "dense"),
        (FLASH_ROWS, VARLEN_PACKS, [8, 8, 5], 8, None, "dense"),  # what is left over is padding
        (FLASH_ROWS, FLASH_PACKS, [8, 8, 8], 8, 8, "dense"),  # a window as long as the rows hides nothing
        (FLASH_ROWS, FLASH_PACKS, [8, 8, 8], 8, 3, "flash4"),
        (FLASH_ROWS, VARLEN_PACKS, [8, 8, 8], 8, 3, "varlen"),
        (NONE, FLASH_PACKS, [8, 8, 8], 8, None, "flash4"),
        (FLASH_ROWS, FLASH_PACKS, [3, 20, 1, 0, 5], None, None, "flash4"),
        (FLASH_ROWS, FLASH_PACKS, [3, 20, 1, 0, 5], None, 4, "flash4"),
        (FLASH_ROWS, VARLEN_PACKS, [3, 20, 1, 0, 5], None, 4, "varlen"),
    ],
)
def test_each_batch_takes_its_kernel_and_is_right(
    ran: list[str],
    rows: Backend,
    packs: Backend,
    lengths: list[int],
    row_length: int | None,
    window: int | None,
    taken: str,
) -> None:
    use(rows, packs)
    found, expected = attend(lengths, row_length, window)
    assert ran == [taken]
    if row_length is not None and sum(lengths) % row_length:
        whole = sum(lengths) // row_length * row_length
        assert not found[:, whole:].any()
        found, expected = found[:, :whole], expected[:, :whole]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_heads_and_dtypes_that_no_self_test_has_seen_go_to_varlen(ran: list[str]) -> None:
    for unlike in ({"heads": 8}, {"dtype": torch.bfloat16}):
        use(FLASH_ROWS, FLASH_PACKS, **unlike)  # type: ignore[arg-type]
        attend([8, 8], 8)
        attend([8, 3])
    attention._kernels = None
    attend([8, 8], 8)
    assert ran == ["varlen"] * 5


def test_rows_of_one_length_are_computed_as_rows(ran: list[str]) -> None:
    """Gradients too: the rows side by side, and each of them in a batch of rows."""
    use(FLASH_ROWS, VARLEN_PACKS)
    q, k, v = (
        torch.randn(3, n, 8, DIM, generator=torch.Generator().manual_seed(n)).requires_grad_()
        for n in (HEADS, GROUPS, GROUPS)
    )
    side_by_side = [x.transpose(1, 2).reshape(1, 24, -1, DIM).transpose(1, 2) for x in (q, k, v)]
    bounds = torch.tensor([0, 8, 16, 24], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 8, "max_length_k": 8, "row_length": 8}
    packed, _ = attend_varlen(torch.nn.Identity(), *side_by_side, None, **lengths)
    rows = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    given = torch.randn_like(rows)
    found = torch.autograd.grad(packed, (q, k, v), given.reshape(packed.shape))
    expected = torch.autograd.grad(rows, (q, k, v), given)
    assert ran == ["dense"]
    torch.testing.assert_close(packed.view(rows.shape), rows)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("one_length", [True, False])
def test_a_cpu_keeps_varlen_and_says_why(one_length: bool) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    kernels = choose_attention_kernels(config, torch.device("cpu"), torch.bfloat16, one_length=one_length)
    assert attention._kernels is kernels and (kernels.num_heads, kernels.num_groups, kernels.dim) == (4, 2, 16)
    rows = ", samples of one length by varlen (the device is cpu)" if one_length else ""
    assert kernels.describe() == "packs by varlen (the device is cpu)" + rows


def test_flash4_comes_first_for_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = []
    found = [FLASH_PACKS, Backend("varlen", "flash-attn-4 is not installed")]

    def choose_packed(*arguments: Any) -> Backend:
        windows.append(arguments[-1])
        return found.pop(0)

    monkeypatch.setattr(attention, "choose_packed", choose_packed)
    monkeypatch.setattr(attention, "choose_dense", lambda *_: Backend("cudnn"))
    config = MistralConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, sliding_window=128)
    said = [
        choose_attention_kernels(config, torch.device("cpu"), torch.bfloat16, one_length=True).describe()
        for _ in range(2)
    ]
    assert said == [
        "packs by flash4",
        "packs by varlen (flash-attn-4 is not installed), samples of one length by cudnn",
    ]
    assert windows == [128, 128]
