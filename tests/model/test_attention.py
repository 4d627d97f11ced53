"""The arguments that varlen attention gets, by a stand-in that is a loop over documents; the real one on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.model import attention
from manyhands.model.attention import VARLEN, attend_varlen, attention_kwargs, register_attention
from manyhands.model.checks import pack_documents
from manyhands.model.loss import LossModel
from tests.support.tiny import FAMILIES, tiny_model

LENGTHS = (3, 30, 1, 17)


def documents() -> list[torch.Tensor]:
    return [torch.randint(0, 256, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def attend_in_a_loop(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, repeat):  # type: ignore[no-untyped-def]
    """Each document on its own, in float64. q (t, h, d), k and v (t, h or g, d)."""
    assert cu_q.dtype == torch.int32 and torch.equal(cu_q, cu_k) and max_q == max_k >= (cu_q[1:] - cu_q[:-1]).max()
    k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    out = torch.zeros_like(q)
    for start, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), k[start:end].double()) * scale
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]  # query minus key
        left, right = window_size
        hidden = (distance < -right) | (
            (distance > left) if left >= 0 else torch.zeros_like(distance, dtype=torch.bool)
        )
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v[start:end].double()).to(q.dtype)
    return out


def like_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):  # type: ignore[no-untyped-def]
    assert key.shape[1] == query.shape[1]
    return attend_in_a_loop(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, 1)


def like_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):  # type: ignore[no-untyped-def]
    assert enable_gqa or key.shape[1] == query.shape[1]
    repeat = query.shape[1] // key.shape[1]
    return attend_in_a_loop(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, repeat)


def stand_in(monkeypatch: pytest.MonkeyPatch, varlen: Any) -> None:
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "TAKES_GROUPS", varlen is like_2_13)


@pytest.mark.parametrize("varlen", [like_2_11, like_2_13])
@pytest.mark.parametrize("family", FAMILIES)
def test_varlen_gives_each_document_what_it_gets_alone(
    monkeypatch: pytest.MonkeyPatch, family: str, varlen: Any
) -> None:
    stand_in(monkeypatch, varlen)
    register_attention()
    model = tiny_model(family, "float64").eval()
    with torch.no_grad():
        alone = torch.cat([model(document, use_cache=False).logits for document in documents()], dim=1)
        model.set_attn_implementation(VARLEN)
        packed = LossModel(model).logits(pack_documents(documents()))
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-10)


def test_padded_rows_are_documents_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, like_2_13)
    register_attention()
    model = tiny_model("mistral", "float64").eval()
    ids = torch.cat([documents()[1], documents()[1].flip(1)])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        model.set_attn_implementation(VARLEN)
        torch.testing.assert_close(LossModel(model).logits({"input_ids": ids}), expected, rtol=1e-9, atol=1e-10)


def test_without_lengths_it_fails_closed() -> None:
    register_attention()
    model = tiny_model("llama")
    model.set_attn_implementation(VARLEN)
    with pytest.raises(RuntimeError, match="no cumulative lengths"):
        model(documents()[0], use_cache=False)


@pytest.mark.parametrize("wrong", [{"softcap": 50.0}, {"dropout": 0.1}, {"attention_mask": torch.ones(1)}])
def test_what_it_cannot_do_is_refused(wrong: dict[str, Any]) -> None:
    x = torch.zeros(1, 2, 4, 8)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    keys = {
        "attention_mask": None,
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": 4,
        "max_length_k": 4,
    } | wrong
    with pytest.raises(RuntimeError):
        attend_varlen(torch.nn.Identity(), x, x, x, **keys)


def test_lengths_travel_under_transformers_names_and_the_bound_is_a_power_of_two() -> None:
    batch = pack_documents(documents())
    kwargs = attention_kwargs(batch, VARLEN)
    assert (
        kwargs["cu_seq_lens_q"].tolist() == [0, 3, 33, 34, 51]
        and kwargs["max_length_q"] == kwargs["max_length_k"] == 32
    )
    assert list(attention_kwargs(batch, "sdpa")) == ["position_ids"]
    assert attention_kwargs({"input_ids": batch["input_ids"]}, "sdpa") == {}


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_the_real_varlen_agrees_with_sdpa_per_document(family: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    register_attention()
    model = tiny_model(family, "bfloat16").cuda()
    loss_model = LossModel(model)
    with torch.no_grad():
        alone = torch.cat([model(document.cuda(), use_cache=False).logits for document in documents()], dim=1).float()
        batch = {
            name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in pack_documents(documents()).items()
        }
        model.set_attn_implementation(VARLEN)
        packed = loss_model.logits(batch).float()
    assert (packed - alone).square().mean().sqrt() < 2e-2 * alone.std()
    batch["labels"] = batch["input_ids"].roll(-1, dims=1)
    loss_model(batch)["lm"][0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
