"""Attention and MLP modules on fused layers, in the place of a family's own: same children, same names, same numbers.

``fuse_modules`` is told which classes it may replace, and looks at adapted layers by what they hold: a frozen
``weight`` (and ``bias``), trained ``lora_A.weight`` and ``lora_B.weight``, ``scaling``, ``dropout`` and ``adapts``. A
layer whose weight is quantized offers ``fused_base() -> (pieces, matmuls)``, see ``lora.Layer``; one whose matmuls may
be in fp8, adapted or not, says by ``in_fp8`` whether they are now. Whatever does not fit stays as it is, and is
reported. Knows nothing of how adapters are made, of sharding or of runs.

Weights are read from the children in each forward pass, so what a sharded unit has gathered is what is used. Hooks on
the children themselves do not run; a module whose children have some is left.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from manyhands.convert.protocol import BaseConverter
from manyhands.core.errors import UserError
from manyhands.core.units import count_of
from manyhands.families import KnownModule, known_modules
from manyhands.kernels.fp8.linear import QuantizedWeights, fp8_linears, fp8_mlp
from manyhands.kernels.lora import Layer, activate, lora_linears, lora_mlp

INNER = {"attention": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}  # on one input
OUTER = {"attention": "o_proj", "mlp": "down_proj"}
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}  # transformers' -> ours
LORA_AB = ("lora_A", "lora_B")


@dataclass(frozen=True)
class FuseReport:
    """Names of the modules that were replaced, with their former class, and of those that might have been, with the
    reason.
    """

    fused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{count} {kind}" for kind, count in Counter(self.fused.values()).items()]
        text = f"fused: {', '.join(parts) or 'nothing'}"
        reasons = [f"{count_of(count, 'module')} ({reason})" for reason, count in Counter(self.left.values()).items()]
        return text + (f"; generic path: {', '.join(reasons)}" if reasons else "")


def fuse_modules(model: nn.Module, known: Mapping[str, KnownModule]) -> FuseReport:
    """Replace attention and MLP modules that hold adapters, or layers that may be in fp8, if their class is ``known``.

    ``model`` may be on meta; do so before it is compiled or sharded.

    Parameters, buffers and their names do not change. A module is left where a layer has dropout, trained weights of
    its own, parameters besides its factors (DoRA) or hooks, and where the family is not known.
    """
    report = FuseReport()
    for name, module in list(model.named_modules()):
        if not any(_is_adapted(child) or _has_fp8(child) for child in module.children()):
            continue
        kind = type(module).__name__
        reason = _why_not(module, known.get(kind))
        if reason:
            report.left[name] = reason
            continue
        form: Any = FusedAttention if known[kind].kind == "attention" else FusedMlp
        model.set_submodule(name, form(module, known[kind]))
        report.fused[name] = kind
    return report


class FusedAttention(nn.Module):
    """Grouped-query attention whose q, k and v share one pass over their input. Norms of queries and keys where the
    family has them.

    Called as transformers calls it: (b, t, e) -> (b, t, e) and the attention weights, if the implementation gives any.
    """

    GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",))  # layers on one input

    config: Any
    head_dim: int
    q_norm: Any
    k_norm: Any

    def __init__(self, original: nn.Module, known: KnownModule) -> None:
        super().__init__()
        _take_over(self, original)
        self.quantized: dict[str, QuantizedWeights] = {}  # frozen weights in fp8, by the first name of their group
        home = sys.modules[type(original).__module__]
        self._rotate: Callable[..., Any] = home.apply_rotary_pos_emb
        self._eager: Callable[..., Any] = home.eager_attention_forward
        self._functions: Any = home.ALL_ATTENTION_FUNCTIONS
        self._window: dict[str, Any] = {}
        if hasattr(original, "sliding_window"):
            self._window = {"sliding_window": original.sliding_window}
        elif known.window_in_config:
            self._window = {"sliding_window": getattr(original.config, "sliding_window", None)}
        self._norms_all_heads = known.norms_all_heads
        self._rotates = bool(getattr(original, "use_rope", True))  # some families leave a few layers without
        self._merged = known.merged

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, length, _ = hidden_states.shape
        query, key, value = self._project(hidden_states)
        if "q_norm" in self._modules and self._norms_all_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (states.view(rows, length, -1, self.head_dim) for states in (query, key, value))
        if "q_norm" in self._modules and not self._norms_all_heads:
            query, key = self.q_norm(query), self.k_norm(key)  # over the last dimension, transposed or not
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self._rotates:
            query, key = self._rotate(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = self._functions.get_interface(self.config._attn_implementation, self._eager)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **self._window, **kwargs
        )
        (out,) = _compute(out.reshape(rows, length, -1), [self.o_proj], self.quantized.get("o_proj"))
        return out, weights

    def _project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Queries, keys and values, (b, t, e) -> (b, t, heads * head_dim) of each."""
        if not self._merged:
            return _compute(x, [self.q_proj, self.k_proj, self.v_proj], self.quantized.get("q_proj"))
        (states,) = _compute(x, [self._modules[self._merged]], None)
        keys = self.config.num_key_value_heads * self.head_dim
        return states.split([states.shape[-1] - 2 * keys, keys, keys], dim=-1)


class FusedMlp(nn.Module):
    """down(act(gate(x)) * up(x)) as one function, (..., e) -> (..., e)."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any

    GROUPS = (("gate_proj", "up_proj"), ("down_proj",))

    def __init__(self, original: nn.Module, known: KnownModule) -> None:
        super().__init__()
        _take_over(self, original)
        self.quantized: dict[str, QuantizedWeights] = {}
        self._activation = ACTIVATION_NAMES[_activation_name(original, known)]
        self._merged = known.merged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._merged:
            gate_layer, up_layer = halves_of(layer_of(self._modules[self._merged]))
            return lora_mlp(x, gate_layer, up_layer, layer_of(self.down_proj), self._activation)
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if getattr(gate, "in_fp8", False):
            quantized, quantized_down = self.quantized.get("gate_proj"), self.quantized.get("down_proj")
            return fp8_mlp(
                x, _weight_of(gate), _weight_of(up), _weight_of(down), self._activation, quantized, quantized_down
            )
        if _is_adapted_alone(gate, up, down):
            return lora_mlp(x, layer_of(gate), layer_of(up), layer_of(down), self._activation)
        out: torch.Tensor = down(activate(gate(x), self._activation) * up(x))
        return out


def _compute(x: torch.Tensor, children: list[Any], quantized: QuantizedWeights | None) -> tuple[torch.Tensor, ...]:
    """Outputs of layers on one input: in fp8 where they say so, or by low-rank layers. Layers in fp8 are plain one by
    one.
    """
    if getattr(children[0], "in_fp8", False):
        return fp8_linears(x, [_weight_of(child) for child in children], quantized)
    if _is_adapted_alone(*children):
        return lora_linears(x, [layer_of(child) for child in children])
    return tuple(child(x) for child in children)


def _is_adapted_alone(*children: Any) -> bool:
    return any(map(_is_adapted, children)) and not _has_fp8(children[0])


def _weight_of(module: Any) -> Layer:
    """The same of a layer in fp8, whose weight may be trained."""
    if not _is_adapted(module):
        return Layer((module.operand,), module.bias)
    return Layer((module.operand,), module.bias, module.lora_A.weight, module.lora_B.weight, _scaling_of(module))


def layer_of(module: Any) -> Layer:
    """The tensors of a frozen linear layer with or without factors, as they are now."""
    base, matmuls = module.fused_base() if hasattr(module, "fused_base") else ((module.weight,), None)
    if not _is_adapted(module):
        return Layer(base, module.bias, matmuls=matmuls)
    return Layer(base, module.bias, module.lora_A.weight, module.lora_B.weight, _scaling_of(module), matmuls)


def _scaling_of(module: Any) -> float:
    """Zero while adapters are switched off: the same kernels then round as those of the adapted model do, so that a
    model that has not moved yet has the log-probabilities of its reference bit for bit.
    """
    return module.scaling if getattr(module, "adapts", True) else 0.0


def halves_of(layer: Layer) -> tuple[Layer, Layer]:
    """Gate and up projection from the merged layer that holds both: views of its weight, bias and B; they share A."""
    (weight,) = layer.base
    pairs = [(None, None) if part is None else part.chunk(2) for part in (weight, layer.bias, layer.b)]
    first, second = (Layer((w,), bias, layer.a, b, layer.scaling) for w, bias, b in zip(*pairs, strict=True))
    return first, second


def _take_over(new: nn.Module, original: nn.Module) -> None:
    """The children, parameters, buffers, mode and plain attributes of ``original``; its class's code is all that is
    left behind.
    """
    for name, value in vars(original).items():
        if not name.startswith("_") and name != "training":
            setattr(new, name, value)
    for registry in ("_parameters", "_buffers", "_modules"):
        getattr(new, registry).update(getattr(original, registry))
    new.training = original.training


def _is_adapted(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, factor, None), nn.Module) for factor in LORA_AB)


def _has_fp8(module: nn.Module) -> bool:
    return hasattr(module, "in_fp8")


def _why_not(module: nn.Module, known: KnownModule | None) -> str:
    """Why a module that holds adapted layers cannot be replaced; empty where it can."""
    kind = type(module).__name__
    if known is None or not type(module).__module__.startswith(known.package):
        return f"no fused form of {kind}"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return f"{kind} has hooks"
    if known.kind == "mlp" and _activation_name(module, known) not in ACTIVATION_NAMES:
        return f"activation {_activation_name(module, known)}"
    names = (*((known.merged,) if known.merged else INNER[known.kind]), OUTER[known.kind])
    for name in names:
        reason = _why_not_layer(getattr(module, name, None))
        if reason:
            return f"{name} {reason}"
    if len({_has_fp8(getattr(module, name)) for name in names}) > 1:
        return "has layers in fp8 and others beside them"
    if known.merged and _has_fp8(getattr(module, known.merged)):
        return f"{known.merged} is in fp8"
    if known.merged and known.kind == "mlp" and hasattr(getattr(module, known.merged), "fused_base"):
        return f"{known.merged} is in 4 bits"
    if len({hasattr(getattr(module, name), "fused_base") for name in names}) > 1:
        return "has layers in 4 bits and others beside them"
    return ""


def _why_not_layer(module: Any) -> str:
    if not isinstance(module, nn.Linear):
        return f"is a {type(module).__name__}"
    layer: Any = module  # what it holds is asked for, not known
    adapted = _is_adapted(layer)
    if not adapted and type(layer) is not nn.Linear and not hasattr(layer, "fused_base") and not _has_fp8(layer):
        return f"is a {type(layer).__name__}"
    if adapted and float(getattr(layer, "dropout", 0.0)):
        return "has dropout"
    if any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules()):
        return "has hooks"
    if hasattr(layer, "weight_pieces"):
        pieces = tuple(layer.get_parameter(name) for name in layer.weight_pieces)
    elif "weight" in layer._parameters:
        pieces = (layer.weight,)
    else:
        return "has a weight that is no parameter"
    known = {
        id(piece) for piece in (*pieces, layer.bias, *(getattr(layer, factor).weight for factor in LORA_AB if adapted))
    }
    others = [name for name, parameter in layer.named_parameters() if id(parameter) not in known]
    if others:
        return f"has parameters of another method ({', '.join(others)})"
    if not _has_fp8(layer) and any(piece.requires_grad for piece in (*pieces, layer.bias) if piece is not None):
        return "has trained weights of its own"
    return ""


def _activation_name(mlp: Any, known: KnownModule) -> str:
    return str(getattr(mlp.config, known.activation_field, ""))


class FusedModules(BaseConverter):
    """What is fused, and what is left and why, is in the log."""

    def on_meta(self, model: nn.Module) -> None:
        report = fuse_modules(model, known_modules())
        adapters = self.context.config.method.trains_adapters
        if adapters and self.context.config.kernels.lora == "fused" and not report.fused:
            raise UserError(
                "no adapted module can be fused", where="kernels.lora", why=str(report), fix="set kernels.lora: auto"
            )
        self.lines.append(f"{'adapters' if adapters else 'linear'}: {report}")
