"""Packs of gated delta networks, the mixers whose family names ``DELTA_RULE``, by the kernels of ``fla-core``.

transformers' own forward passes transpose before and after the convolution, repeat queries and keys for each value
head, and compute gates and the norm by single operations of torch. ``compute_pack`` calls the same layers and hands
their outputs to kernels that need none of this and take the bounds of documents. ``model/checks.py`` compares it, on
packed documents, with transformers' forward pass of each alone.

Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464. Shapes: t tokens, h heads of keys, v heads of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from manyhands import families
from manyhands.families.family import DELTA_RULE


class Inputs(NamedTuple):
    """What the layers of a mixer make of hidden states (1, t, e)."""

    query: torch.Tensor  # (1, t, h * d), before the convolution, as keys and values are
    key: torch.Tensor
    value: torch.Tensor  # (1, t, v * d)
    gate: torch.Tensor  # (1, t, v * d), of the norm
    decay: torch.Tensor  # (1, t, v), before softplus
    beta: torch.Tensor  # (1, t, v), before the sigmoid


class Kernels(NamedTuple):
    convolve: Any
    apply_rule: Any
    normalize: Any


def find_kernels(mixer: nn.Module) -> Kernels | None:
    """``fla-core``'s kernels for ``mixer``; None if they cannot compute it or cannot be imported."""
    if families.mixer_kernels(type(mixer).__name__) != DELTA_RULE or mixer.activation not in ("silu", "swish"):
        return None
    try:  # another package's code may fail in any way, such as for want of a Triton driver
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception:
        return None
    return Kernels(causal_conv1d, chunk_gated_delta_rule, rms_norm_gated)


def compute_pack(kernels: Kernels, mixer: Any, hidden_states: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """(1, t, e) -> (1, t, e): each document from a state of zero. ``bounds`` (d + 1) int64: where documents begin, and
    where the last ends, no two the same. Raises what the kernels raise.
    """
    inputs = _project(mixer, hidden_states)
    # in parts, so that each result is contiguous, as the delta rule wants it
    weights = mixer.conv1d.weight.squeeze(1).split([x.shape[-1] for x in inputs[:3]])
    query, key, value = (
        kernels.convolve(x, weight, activation="silu", cu_seqlens=bounds)[0].unflatten(-1, (-1, dim))
        for x, weight, dim in zip(
            inputs[:3], weights, (mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim), strict=True
        )
    )
    out, _ = kernels.apply_rule(
        query,
        key,
        value,
        g=inputs.decay,
        beta=inputs.beta,
        use_gate_in_kernel=True,
        A_log=mixer.A_log,
        dt_bias=mixer.dt_bias,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=getattr(mixer, "allow_neg_eigval", False),
        cu_seqlens=bounds,
    )
    norm = mixer.o_norm if hasattr(mixer, "o_norm") else mixer.norm
    gate = inputs.gate.unflatten(-1, (-1, mixer.head_v_dim))
    out = kernels.normalize(out, gate, norm.weight, None, activation="swish", eps=norm.variance_epsilon).flatten(2)
    return (mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj)(out)  # type: ignore[no-any-return]


def _project(mixer: Any, hidden_states: torch.Tensor) -> Inputs:
    if hasattr(mixer, "in_proj_qkvz"):  # whose outputs are sorted by heads of keys
        projected = mixer.in_proj_qkvz(hidden_states), mixer.in_proj_ba(hidden_states)
        query, key, value, gate, beta, decay = mixer.fix_query_key_value_ordering(*projected)
        return Inputs(query.flatten(2), key.flatten(2), value.flatten(2), gate.flatten(2), decay, beta)
    if hasattr(mixer, "in_proj_qkv"):
        mixed = mixer.in_proj_qkv(hidden_states)
        query, key, value = mixed.split((mixer.key_dim, mixer.key_dim, mixer.value_dim), dim=-1)
        gate, decay, beta = (layer(hidden_states) for layer in (mixer.in_proj_z, mixer.in_proj_a, mixer.in_proj_b))
        return Inputs(query, key, value, gate, decay, beta)
    layers = mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj, mixer.a_proj, mixer.b_proj
    return Inputs(*(layer(hidden_states) for layer in layers))
