"""Low-rank adapters (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685) in PEFT's names.

An adapted layer keeps its weight, the same parameter under the same name, so that checkpoints and exports of the base
need no renaming; what is trained is beside it: ``lora_A.weight``, ``lora_B.weight``, with DoRA
``lora_magnitude_vector``. Knows nothing of files, ranks or the loop.

Shapes: an adapted layer has weight W (o, i), A (r, i), B (o, r), magnitudes m (o). Its output is x V^T with V = W + s B
A and s = alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732). With DoRA
(Liu et al. 2024, https://arxiv.org/abs/2402.09353) row j of V is scaled to the length m_j.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.config.patterns import matches
from manyhands.config.schema import MethodSection
from manyhands.convert.grouped import Grouped
from manyhands.convert.new_tokens import add_token_rows, fill_token_rows
from manyhands.convert.protocol import BaseConverter
from manyhands.convert.trainable import find_modules_to_save, train_fully
from manyhands.core.errors import UserError
from manyhands.core.holding import fill_from, full_shape, is_full, local
from manyhands.core.progress import advance
from manyhands.core.seeds import named_generator
from manyhands.kernels.grouped import grouped_matmul
from manyhands.model.loss import LossModel
from manyhands.model.structure import block_linears, find_blocks, inside, shared_gates
from manyhands.model.weights import QuantizedLayer

MIN_REACH = 0.9  # share of the blocks' matrix elements that all-linear must adapt


class LoraLinear(nn.Linear):
    """A frozen linear layer with trained LoRA A and B, and with ``dora`` the lengths of its weight's rows.

    What is trained is float32 (float64 beside a float64 weight) and cast to the input's dtype, so no autocast is needed
    and gradients are in the parameters' own dtype.
    """

    unstored_parameters = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")  # model.load.UNSTORED
    lora_magnitude_vector: nn.Parameter | None

    def __init__(self, base: nn.Linear, method: MethodSection) -> None:
        nn.Module.__init__(self)
        vars(self).update((name, value) for name, value in vars(base).items() if not name.startswith("_"))
        for name, parameter in base._parameters.items():  # the weight, or what holds its values, and the bias
            self.register_parameter(name, parameter)
        rank, self.dropout = method.rank, method.dropout
        self.adapts = True  # false while the model before training computes
        self.scaling = method.alpha / (math.sqrt(rank) if method.rslora else rank)
        dtype = torch.float64 if base.weight.dtype == torch.float64 else torch.float32
        device = base.weight.device
        num_groups = getattr(base, "num_groups", 1)
        self.lora_A = nn.Linear(base.in_features, num_groups * rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)
        lengths = nn.Parameter(torch.empty(base.out_features, device=device, dtype=dtype)) if method.dora else None
        self.register_parameter("lora_magnitude_vector", lengths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., i) -> (..., o)"""
        if not self.adapts:
            return super().forward(x)
        drops = self.dropout > 0 and self.training
        dropped = F.dropout(x, self.dropout) if drops else x
        low = F.linear(dropped, self.lora_A.weight.to(x.dtype)) * self.scaling  # scaled here, where it is r wide
        update = F.linear(low, self.lora_B.weight.to(x.dtype))
        base = super().forward(x)
        if self.lora_magnitude_vector is None:
            return base + update
        scale = self.lora_magnitude_vector / self.row_lengths()  # near 1: in half precision it would not move
        offset = 0 if self.bias is None else self.bias
        if drops:  # as in the authors' code and PEFT, the change of length sees the dropped input too
            out = base + (scale - 1) * (super().forward(dropped) - offset) + scale * update
        else:
            out = scale * (base + update) + (1 - scale) * offset
        return out.to(x.dtype)

    def merge(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """W + s B A"""
        return weight + self.scaling * (b @ a)

    @torch.no_grad()
    def row_lengths(self) -> torch.Tensor:
        """Lengths of the rows of W + s B A, (o) in A's dtype; a constant to the backward pass (section 4.3 of
        DoRA).

        By |w|^2 + 2 s b (A w) + s^2 b (A A^T) b for each row w of W and b of B, so that B A is never made.
        """
        weight, a, b = self.weight, self.lora_A.weight, self.lora_B.weight
        own = torch.linalg.vector_norm(weight, dim=1, dtype=a.dtype).square()
        across = F.linear(weight, a.to(weight.dtype)).to(a.dtype)  # (o, r)
        square = own + self.scaling * (b * (2 * across + self.scaling * (b @ (a @ a.T)))).sum(1)
        return square.clamp(min=torch.finfo(a.dtype).tiny).sqrt()


class LoraGrouped(LoraLinear):
    """A stack of them: A (g r, i), B (g o, r) and magnitudes (g o), one group above the other."""

    num_groups: int

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """(n, i) -> (n, o)"""
        multiply: Callable[..., torch.Tensor] = super(LoraLinear, self).forward
        if not self.adapts:
            return multiply(x, ends)
        drops = self.dropout > 0 and self.training
        dropped = F.dropout(x, self.dropout) if drops else x
        a, b = (factor.weight.to(x.dtype).unflatten(0, (len(ends), -1)) for factor in (self.lora_A, self.lora_B))
        low = grouped_matmul(dropped, a, ends) * self.scaling
        update = grouped_matmul(low, b, ends)
        base = multiply(x, ends)
        if self.lora_magnitude_vector is None:
            return base + update
        counts = ends.diff(prepend=ends.new_zeros(1))
        scale = self._split(self.lora_magnitude_vector / self.row_lengths()).repeat_interleave(counts, 0)
        return (base + (scale - 1) * (multiply(dropped, ends) if drops else base) + scale * update).to(x.dtype)

    @torch.no_grad()
    def row_lengths(self) -> torch.Tensor:
        a, b = self.lora_A.weight, self.lora_B.weight
        lengths = torch.linalg.vector_norm(self.merge(self.weight.to(a.dtype), a, b), dim=1)
        return lengths.clamp(min=torch.finfo(a.dtype).tiny)

    def merge(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return weight + self.scaling * (self._split(b) @ self._split(a)).flatten(0, 1)

    def _split(self, stacked: torch.Tensor) -> torch.Tensor:
        return stacked.unflatten(0, (self.num_groups, -1))


@cache
def lora_class(kind: Any) -> type[LoraLinear]:
    """The class of the layers that adapt those of ``kind``, whose ``forward`` multiplies with the frozen weight."""
    adapted = LoraGrouped if issubclass(kind, Grouped) else LoraLinear
    return LoraLinear if kind is nn.Linear else type(f"Lora{kind.__name__}", (adapted, kind), {})


def apply_lora(model: nn.Module, method: MethodSection, seed: int, token_ids: Iterable[int] = ()) -> list[str]:
    """Freeze ``model`` but for adapters on ``method.target_modules``, ``method.modules_to_save``, and the rows of
    ``token_ids``.

    Returns the adapted layers' names. Works on meta (``materialize`` fills what is new later) and on a loaded model,
    where it is filled at once. Raises ``UserError`` where a pattern matches nothing or ``all-linear`` does not reach
    the blocks' weights.
    """
    saved = find_modules_to_save(model, method.modules_to_save)
    linears = block_linears(model)
    by_name = linears if method.target_modules == "all-linear" else linears | shared_gates(model)
    candidates = {name: linear for name, linear in by_name.items() if not inside(name, saved)}
    targets = find_targets(candidates, method.target_modules)
    if method.target_modules == "all-linear":
        _check_reach(model, list(linears))
    model.requires_grad_(False)
    train_fully(model, saved)
    add_token_rows(model, token_ids)
    for name in targets:
        kind: Any = type(candidates[name])
        adapted = lora_class(kind)(candidates[name], method)
        model.set_submodule(name, adapted.train(candidates[name].training))
    if not any(parameter.is_meta for parameter in model.parameters()):
        initialize_adapters(model, seed)
        fill_token_rows(model)
    return targets


def find_targets(candidates: Mapping[str, nn.Linear], targets: str | tuple[str, ...]) -> list[str]:
    """Names among ``candidates`` that are asked for: all, or as ``config/patterns.py`` reads each."""
    if targets == "all-linear":
        return list(candidates)
    chosen: set[str] = set()
    for pattern in targets:
        hits = {name for name in candidates if matches(name, pattern)}
        if not hits:
            kinds = sorted({".".join(part for part in name.split(".")[-2:]) for name in candidates})
            raise UserError(
                f"no layer matches the target module {pattern!r}",
                where="method.target_modules",
                fix="name linear layers of the blocks, for example one of these, or use all-linear",
                details=kinds[:20],
            )
        chosen |= hits
    return [name for name in candidates if name in chosen]


class Lora(BaseConverter):
    """Low-rank adapters, with or without DoRA and rsLoRA, and modules that are trained fully beside them."""

    def on_meta(self, model: nn.Module) -> None:
        apply_lora(model, self.context.method, self.context.seed)

    def on_loss(self, loss_model: LossModel) -> None:
        loss_model.without_adapters = partial(without_adapters, tuple(adapted_layers(loss_model.model).values()))

    def after_load(self, model: nn.Module) -> None:
        initialize_adapters(model, self.context.seed)


def _check_reach(model: nn.Module, targets: list[str]) -> None:
    linears = block_linears(model)
    sizes = {name: linear.in_features * linear.out_features for name, linear in linears.items()}
    missed = {
        f"{block_name}.{name}": parameter
        for block_name, block in find_blocks(model).items()
        for name, parameter in block.named_parameters()
        if parameter.dim() >= 2 and not isinstance(block.get_submodule(name.rpartition(".")[0]), nn.Linear)
    }
    total = sum(sizes.values()) + sum(parameter.numel() for parameter in missed.values())
    reached = sum(sizes[name] for name in targets)
    if reached < MIN_REACH * total:
        raise UserError(
            f"adapters on all linear layers reach only {reached / max(total, 1):.0%} of the blocks' weights",
            where="method.target_modules: all-linear",
            why=f"{type(model).__name__} holds the rest in modules that are not linear layers, such as merged experts",
            fix="name the layers to adapt in method.target_modules, or use method.name=full",
            details=[f"{name}: {' x '.join(map(str, parameter.shape))}" for name, parameter in missed.items()][:20],
        )


@contextmanager
def without_adapters(layers: Sequence[LoraLinear]) -> Iterator[None]:
    """Within it ``layers`` compute what they computed before they were adapted."""
    for layer in layers:
        layer.adapts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapts = True


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The adapted layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """A from U(-1/sqrt(i), 1/sqrt(i)), which is PEFT's kaiming_uniform(a=sqrt(5)); B zero, so training starts at the
    base model.

    Magnitudes start at the weights, which are loaded already; a collective where these are sharded.
    A is drawn on the CPU from (seed, name), so it is the same for any device, sharding and number of processes.
    """
    for name, layer in adapted_layers(model).items():
        a = layer.lora_A.weight
        bound = 1 / math.sqrt(layer.in_features)
        full = torch.empty(full_shape(a), dtype=a.dtype).uniform_(
            -bound, bound, generator=named_generator(seed, f"{name}.lora_A.weight")
        )
        fill_from(a, full)
        local(layer.lora_B.weight).zero_()
        if layer.lora_magnitude_vector is not None:
            _fill_magnitudes(layer, layer.lora_magnitude_vector)
        advance()


def _fill_magnitudes(layer: LoraLinear, magnitudes: nn.Parameter) -> None:
    """Lengths of the weight's rows. FSDP2 cuts a weight and its magnitudes alike, by rows, so each rank has what it
    needs.
    """
    if isinstance(layer, QuantizedLayer) or is_full(layer.weight):
        weight = layer.gather_weight() if isinstance(layer, QuantizedLayer) else layer.weight
        fill_from(magnitudes, torch.linalg.vector_norm(weight, dim=1, dtype=magnitudes.dtype))
    else:
        own = local(layer.weight)
        local(magnitudes).copy_(torch.linalg.vector_norm(own, dim=1, dtype=magnitudes.dtype))
