"""On each rank: loss and gradients of a pack that is whole, and of the same pack divided over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from manyhands.data.batch import divide
from manyhands.data.batch.batches import collate
from manyhands.data.batch.collate import BatchShape
from manyhands.kernels.attention import context
from manyhands.model import attention
from manyhands.model.loss import LossModel
from tests.data.fake_samples import FakeSamples
from tests.support.ropes import rope_fields
from tests.support.tiny import tiny_model

LENGTHS = (5, 33, 90, 1, 40, 17)
DTYPE = torch.float64


def attend_by_document(query, key, value, bounds, key_bounds, *_, scale, window_size, enable_gqa=False):  # type: ignore[no-untyped-def]
    """torch's varlen: the last query of a document sees its last key."""
    out, left = [], window_size[0]
    for begin, end, first, last in zip(bounds[:-1], bounds[1:], key_bounds[:-1], key_bounds[1:], strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (query[begin:end], key[first:last], value[first:last]))
        distance = torch.arange(last - end + begin - first, last - first)[:, None] - torch.arange(last - first)
        seen = (distance >= 0) & ((distance <= left) if left >= 0 else True)
        out.append(F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1))
    return torch.cat(out)


def compute(loss_model: LossModel, shape: BatchShape) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss's sum, its weight, hits and their number; and all gradients."""
    draw = np.random.default_rng(0)
    rows = [(draw.integers(0, 256, n).tolist(), (draw.random(n) < 0.7).astype(int).tolist()) for n in LENGTHS]
    loss_model.zero_grad()
    found = loss_model(collate(FakeSamples(tuple(rows)), np.arange(len(rows)), shape), metrics=True)
    found["lm"][0].backward()
    numbers = torch.stack([number.detach().double() for name in sorted(found) for number in found[name]])
    return numbers, {name: p.grad.clone() for name, p in loss_model.named_parameters() if p.grad is not None}


def count_own_positions(batch: Mapping[str, Any], *arguments: Any, **keys: Any) -> dict[str, Any]:
    parts = WHOLE(batch, *arguments, **keys)
    return parts | {"position_ids": np.arange(parts["position_ids"].shape[1])[None]}


def keep_own_gradient(gradient: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Those of other ranks' queries dropped."""
    whole = gradient.new_zeros(num_tokens * dist.get_world_size(), *gradient.shape[1:])
    parts = context._part(whole.index_add(0, positions, gradient), dist.get_world_size())
    return parts[dist.get_rank()].flatten(0, 1)


def ignore_order(parts: torch.Tensor) -> torch.Tensor:
    """Chunks as ranks have them, not as they lie in the pack."""
    return parts.flatten(0, 2)


WHOLE = divide.divide_pack
FAULTS = {
    "positions": ("manyhands.data.batch.collate.divide_pack", count_own_positions),
    "gradients": ("manyhands.kernels.attention.context.scatter_keys", keep_own_gradient),
    "order": ("manyhands.kernels.attention.context._join", ignore_order),
    "halos": ("manyhands.model.documents.gather_keys", lambda part, _: torch.zeros_like(part)),
    "heads": ("manyhands.model.attention.rank_in_group", lambda: 0),
}
TORCH_2_11 = {
    "manyhands.kernels.attention.context._all_gather": dist.all_gather_into_tensor,
    "manyhands.kernels.attention.context._reduce_scatter": dist.reduce_scatter_tensor,
    "manyhands.model.attention.TAKES_GROUPS": False,
}


def deviations(
    family: str, implementation: str, rope: str, heads: bool, fault: str, old: bool = False
) -> tuple[float, float]:
    """The largest relative deviation of the terms, and of a parameter's gradient by its norm. ``heads``: ranks exchange
    heads. ``old``: by what torch 2.11 has: collectives of other names, and no groups of heads in varlen.
    """
    rank, degree = dist.get_rank(), dist.get_world_size()
    fields = rope_fields(family, rope) if rope else {}
    attention.register_attention()
    fields |= {"num_local_experts": 4} if family == "gpt_oss" else {}
    fields |= {"layer_types": ["conv", "full_attention"]} if family == "lfm2" else {}
    fields |= {"num_attention_heads": 8, "num_key_value_heads": 2 if family == "gpt_oss" else 4}
    model = tiny_model(family, "float64", num_hidden_layers=2, **fields).eval()
    model.set_attn_implementation(implementation)
    model.set_experts_implementation("eager")  # others have no float64
    loss_model = LossModel(model)
    shape = BatchShape(True, tile=2 * divide.HALO * degree, tells_documents=loss_model.needs_documents)
    with ExitStack() as stack:
        stack.enter_context(patch.object(attention, "varlen_attn", attend_by_document))
        stack.enter_context(patch.object(attention, "TAKES_GROUPS", True))
        whole, expected = compute(loss_model, shape)
        context.use_group(dist.group.WORLD)
        own = replace(shape, context=degree, context_rank=rank, exchanges_heads=heads)
        for name, value in (TORCH_2_11 if old else {}).items():
            stack.enter_context(patch(name, value))
        if fault:
            stack.enter_context(patch(*FAULTS[fault]))
        found, gradients = compute(loss_model, own)
    context.use_group(None)
    for tensor in (found, *gradients.values()):
        dist.all_reduce(tensor)
    assert expected.keys() == gradients.keys()
    worst = max(float((gradients[name] - g).norm() / g.norm()) for name, g in expected.items())
    return float(((found - whole).abs() / whole.abs().clamp(min=1)).max()), worst
