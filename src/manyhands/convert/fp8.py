"""Linear layers of a model's blocks in fp8: which layers, when, and what is quantized once. Must not know ranks.

A layer keeps its weight, the same parameter under the same name in the same dtype, or as fp8 values alone
(``model.frozen_dtype``); training passes alone compute in fp8 with it. Evaluation, generation, export and verification
multiply in the compute dtype with the same weights: the model that will be used. The head, embeddings, layers whose
sides are not multiples of 16, and stacks of experts that are not kept in fp8 stay in the compute dtype.

Whether fp8 is accurate enough for this model and this data is measured before the first step on a real micro-batch.
Every rank computes the same passes in the same order, so that it works where weights are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from manyhands.convert.fused_modules import FusedAttention, FusedMlp
from manyhands.convert.grouped import Grouped, hold, multiply_stack, sides_of
from manyhands.convert.protocol import BaseConverter, Finding, TrainedModel
from manyhands.core.errors import UserError
from manyhands.core.holding import is_full, local
from manyhands.kernels.fp8.linear import (
    QuantizedWeights,
    count_quantized_bytes,
    dequantize_rows,
    fp8_linears,
    quantize_weights,
    stored_linear,
)
from manyhands.kernels.fp8.ops import has_features, quantize_stacked, transpose_stack
from manyhands.kernels.fp8.reference import ALIGNMENT
from manyhands.kernels.fp8.select import describe, describe_groups, has_scaled_mm, why_no_group_mm
from manyhands.kernels.lora import Layer
from manyhands.model.structure import block_linears, find_blocks
from manyhands.model.weights import Storage


class Fp8Linear(nn.Linear):
    """A linear layer whose matmuls are in fp8 while it is trained: x W^T, and backward dY W and dY^T X."""

    uses_fp8 = True  # the layer's own attribute is set by ``set_matmuls``
    quantized: QuantizedWeights | None = None  # its frozen weight, quantized once

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        for name, parameter in base._parameters.items():
            self.register_parameter(name, parameter)

    @property
    def in_fp8(self) -> bool:
        """Whether a forward pass would now compute in fp8."""
        return self.training and self.uses_fp8

    @property
    def operand(self) -> torch.Tensor:
        """What stands for the weight (o, i) where fp8 values of it are given."""
        return self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., i) -> (..., o)"""
        if not self.in_fp8:
            return F.linear(x, self.weight, self.bias)
        return fp8_linears(x, [Layer((self.operand,), self.bias)], self.quantized)[0]


class StoredFp8Linear(Fp8Linear):
    """The same frozen, with its weight kept as fp8 values and scales alone. Empty until ``fill``; not for shards.

    ``weight`` is no parameter here but the dequantized weight in the compute dtype, computed at each access.
    """

    storage: Storage = "fp8"
    weight_pieces = ("weight_values", "weight_scales")  # model.weights.QuantizedLayer
    weight_values: nn.Parameter  # (o, i), e4m3
    weight_scales: nn.Parameter  # (o, 1), float32

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight_dtype = base.weight.dtype
        options: dict[str, Any] = {"device": base.weight.device}
        values = torch.empty(base.weight.shape, dtype=torch.float8_e4m3fn, **options)
        scales = torch.empty((base.out_features, 1), dtype=torch.float32, **options)
        for name, tensor in zip(self.weight_pieces, (values, scales), strict=True):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", base.bias)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return dequantize_rows(self.weight_values.detach(), self.weight_scales.detach(), self.weight_dtype)

    @property
    def operand(self) -> torch.Tensor:
        return self.weight_values

    @property
    def quantized(self) -> QuantizedWeights:  # type: ignore[override]
        """Its own values, also where they are part of a group's: its operand alone has no scales."""
        return QuantizedWeights(self.weight_values.detach(), self.weight_scales.detach(), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., i) -> (..., o)"""
        if not self.in_fp8:
            return stored_linear(x, self.weight_values, self.weight_scales, self.bias)
        return super().forward(x)

    @torch.no_grad()
    def fill(self, weight: Any) -> None:
        """Quantize ``weight`` (o, i), a tensor or a slice of a safetensors file, cast to the compute dtype before."""
        device = self.weight_values.device
        values, scales = quantize_stacked([weight[:].to(device, self.weight_dtype)])
        self.weight_values.copy_(values)
        self.weight_scales.copy_(scales)

    @staticmethod
    def dequantize(pieces: Sequence[torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return dequantize_rows(pieces[0], pieces[1], dtype)

    def gather_weight(self) -> torch.Tensor:
        return self.weight


@torch.no_grad()
def round_to_fp8(model: nn.Module) -> None:
    """Give the blocks' linear layers the values that ``StoredFp8Linear`` keeps of them, in place and in their dtype."""
    for linear in block_linears(model).values():
        if has_features(*sides_of(linear)):
            held = StoredFp8Linear(linear)
            held.fill(linear.weight.detach())
            linear.weight.copy_(held.weight)


def store_in_fp8(model: nn.Module) -> list[str]:
    """Put a ``StoredFp8Linear`` in the place of every linear layer of the blocks whose sides fit; their names.

    For a model on meta, whose linear layers are all frozen: ``materialize`` fills them.
    """
    stored = []
    for name, linear in block_linears(model).items():
        if has_features(*sides_of(linear)):
            model.set_submodule(name, hold(linear, StoredFp8Linear))
            stored.append(name)
    return stored


def use_fp8(model: nn.Module, *, groups: bool = True) -> tuple[list[str], list[str]]:
    """Put an ``Fp8Linear`` in the place of the blocks' linear layers but for stacks; names of those, and of those whose
    sides do not fit. With ``groups`` stacks that are kept in fp8 compute in it, too.

    For a model on meta, before adapters. UserError where there is no layer that fits.
    """
    swapped, left = [], []
    for name, linear in block_linears(model).items():
        if isinstance(linear, Grouped):
            linear.has_fp8_products = groups and isinstance(linear, StoredFp8Linear)
            continue
        if not has_features(*sides_of(linear)):
            left.append(name)
            continue
        if not isinstance(linear, Fp8Linear):
            model.set_submodule(name, Fp8Linear(linear))
        swapped.append(name)
    if not swapped:
        raise UserError(
            "no linear layer of the blocks can compute in fp8",
            where="kernels.linear: fp8",
            why=f"inputs and outputs must be multiples of {ALIGNMENT}",
            fix="set kernels.linear: compute_dtype",
            details=left[:20],
        )
    return swapped, left


def fp8_layers(model: nn.Module) -> dict[str, Fp8Linear]:
    """The layers that can compute in fp8, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Fp8Linear) and getattr(module, "has_fp8_products", True)
    }


def set_matmuls(model: nn.Module, kind: str) -> None:
    """Matmuls of later training passes: ``fp8``, or ``compute_dtype``."""
    for layer in fp8_layers(model).values():
        layer.uses_fp8 = kind == "fp8"


@torch.no_grad()
def quantize_frozen(model: nn.Module) -> int:
    """Quantize once the weights that are frozen and not sharded, group by group; the bytes that this takes.

    What is sharded or trained is quantized at each use. The model's weights must be loaded.
    """
    quantized: list[QuantizedWeights] = []
    grouped: set[int] = set()
    for module in model.modules():
        groups: list[tuple[Any, str, list[Any]]] = []
        if isinstance(module, (FusedAttention, FusedMlp)):
            groups = [
                (module.quantized, names[0], [getattr(module, name) for name in names]) for names in module.GROUPS
            ]
        elif isinstance(module, Fp8Linear) and id(module) not in grouped and not isinstance(module, Grouped):
            groups = [(module.__dict__, "quantized", [module])]
        for holder, key, layers in groups:
            grouped.update(map(id, layers))
            if all(isinstance(layer, StoredFp8Linear) for layer in layers):
                holder[key] = _stack(layers)
            elif all(isinstance(layer, Fp8Linear) and _is_still(layer.operand) for layer in layers):
                holder[key] = quantize_weights([layer.weight for layer in layers])
                quantized.append(holder[key])
    return count_quantized_bytes(quantized)


def _stack(layers: Sequence[StoredFp8Linear]) -> QuantizedWeights:
    """The values of a group one above the other; those of the layers become parts of it, so nothing is held twice."""
    if len(layers) == 1:
        return QuantizedWeights(layers[0].weight_values.detach(), layers[0].weight_scales.detach(), None)
    values = torch.cat([layer.weight_values.view(torch.uint8) for layer in layers]).view(torch.float8_e4m3fn)
    scales = torch.cat([layer.weight_scales for layer in layers])
    begin = 0
    for layer in layers:
        rows = slice(begin, begin + layer.out_features)
        layer.weight_values.data, layer.weight_scales.data = values[rows], scales[rows]
        begin = rows.stop
    return QuantizedWeights(values, scales, None)


@torch.no_grad()
def keep_transposed(model: nn.Module) -> int:
    """Keep the values of stacks that multiply in fp8 transposed, too, for the way back; the bytes that this takes.

    Plain tensors that no file and no other rank sees. The model's weights must be loaded.
    """
    num_bytes = 0
    for stack in fp8_layers(model).values():
        if isinstance(stack, Grouped) and isinstance(stack, StoredFp8Linear):
            stack.transposed_values = transpose_stack(stack.weight_values.detach().unflatten(0, (stack.num_groups, -1)))
            num_bytes += stack.transposed_values.nbytes
    return num_bytes


def _is_still(weight: torch.Tensor) -> bool:
    return not weight.requires_grad and is_full(weight)


# What rounding alone can do. A matmul errs by 0.037 of its result (kernels/fp8), at random. A layer that errs by more
# than the largest rounding error of a value, 2**-4, has outliers that leave too few fp8 values to the rest, or is
# wrong.
LAYER_TOLERANCE = 2**-4
# The error of an attention or MLP, some 0.065 of its result, adds to those of the others in squares: over L blocks,
# forward and backward, 0.065 sqrt(4 L) of a gradient where errors of blocks do not cancel. Measured: 0.29 at 4
# blocks, 0.46 at 8 and 0.88 at all 32 of an 8B shape with random weights, 0.39 at the 30 of a trained model of 135M
# (the demo's); 0.07 there for bfloat16. Half as much again is allowed, but no error longer than the gradient itself.
# Of random weights nothing is asked of the gradient, which is chaotic in a deep model: 1.31 at the 80 blocks of a 70B
# shape, where no layer errs by more than 2.7 % and the loss by 0.3 %.
SUBLAYER_ERROR, SLACK, GRADIENT_LIMIT = 0.065, 1.5, 1.0
LOSS_TOLERANCE = 0.05  # measured: 0.15 % with random weights, 2 to 4 % of a few hundred tokens with the demo's model
COMPARED_TOKENS = 1024  # at once
COMPARED_ROWS = 8192  # of tokens' experts at once: for each a stack is dequantized
NUM_SAMPLED = 2**16  # elements of each gradient that are compared: full gradients would be held twice


@dataclass(frozen=True)
class Fp8Deviation:
    """What fp8 changes: the mean loss, as a share of it; the gradient, |g8 - g| / |g|; the result of a single layer."""

    loss: float
    gradient: float
    layer: float
    worst_layer: str
    num_loss_tokens: float

    def __str__(self) -> str:
        return (
            f"fp8 moves the loss of {self.num_loss_tokens:,.0f} tokens by {self.loss:.2%},"
            f" their gradient by {self.gradient:.1%} of its length,"
            f" a layer's result by at most {self.layer:.1%} ({self.worst_layer})"
        )


def check_fp8(
    engine: TrainedModel, model: nn.Module, batch: Mapping[str, Any], seed: int, *, random_weights: bool = False
) -> Fp8Deviation:
    """Loss and gradients of ``batch`` (each rank its own), with matmuls in fp8 and in the compute dtype; UserError
    where they are too far apart; with ``random_weights`` only loss and layers count.

    Forward and backward both ways, as in training but uncompiled; of each gradient some elements are kept. In the pass
    in the compute dtype each layer computes in fp8 too, on the same inputs. Leaves the layers in fp8.
    """
    found, layers, hooks = {}, fp8_layers(model), []
    errors: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        if isinstance(layer, Grouped):
            layer.observe = partial(_compare_stack, errors, name, layer)
        else:
            hooks.append(layer.register_forward_hook(partial(_compare_layer, errors, name)))
    try:
        for kind in ("compute_dtype", "fp8"):
            set_matmuls(model, kind)
            found[kind] = _sample_gradients(engine, model, batch, seed)
            while hooks:
                hooks.pop().remove()
            for layer in layers.values():
                vars(layer).pop("observe", None)
    finally:
        set_matmuls(model, "fp8")
    loss, weight, reference = found["compute_dtype"]
    loss_fp8, _, quantized = found["fp8"]
    squares = torch.zeros(2, dtype=torch.float64, device=loss.device)
    for name, (gradient, share) in reference.items():
        pair = torch.stack([gradient.double().square().sum(), (quantized[name][0] - gradient).double().square().sum()])
        squares += share * pair.to(squares.device)
    of_layers = torch.stack([errors.get(name, squares.new_zeros(2)) for name in layers])
    sums = engine.all_reduce_sum(torch.cat([torch.stack([loss, loss_fp8, weight]), squares, of_layers.flatten()]))
    loss_sum, loss_sum_fp8, num_loss_tokens, square, square_gap = sums[:5].tolist()
    of_layers = sums[5:].view(-1, 2)
    ratios = (of_layers[:, 0] / of_layers[:, 1].clamp(min=1e-300)).sqrt().nan_to_num(nan=math.inf)
    worst = int(ratios.argmax())
    deviation = Fp8Deviation(
        loss=abs(loss_sum_fp8 / loss_sum - 1),
        gradient=math.sqrt(square_gap / square) if square else math.nan,
        layer=ratios[worst].item(),
        worst_layer=list(layers)[worst],
        num_loss_tokens=num_loss_tokens,
    )
    allowed = min(GRADIENT_LIMIT, SLACK * SUBLAYER_ERROR * math.sqrt(4 * len(find_blocks(model))))
    if random_weights and math.isfinite(deviation.gradient):
        allowed = math.inf
    # written so that it also refuses nan
    if not (deviation.loss <= LOSS_TOLERANCE and deviation.gradient <= allowed and deviation.layer <= LAYER_TOLERANCE):
        bound = "any of random weights" if allowed == math.inf else f"{allowed:.0%}"
        raise UserError(
            f"matmuls in fp8 are not accurate enough for {type(model).__name__}",
            where="kernels.linear: fp8",
            why=f"{deviation}; allowed are {LOSS_TOLERANCE:.0%}, {bound} and {LAYER_TOLERANCE:.1%}",
            fix="set kernels.linear: compute_dtype",
        )
    return deviation


@torch.no_grad()
def _compare_layer(
    errors: dict[str, torch.Tensor], name: str, layer: Fp8Linear, inputs: tuple[torch.Tensor, ...], _: torch.Tensor
) -> None:
    """The square of what fp8 changes in x W^T and that of the result, added up. Forward alone: the backward pass uses
    the same fp8 values. Unseen by selective activation checkpointing, which would keep every result of a matmul.
    """
    with _disable_current_modes():
        weight, pair = layer.weight, torch.zeros(2, dtype=torch.float64, device=inputs[0].device)
        for x in inputs[0].detach().flatten(0, -2).split(COMPARED_TOKENS):  # float64 of all would take gigabytes
            reference = F.linear(x, weight).double()
            (result,) = fp8_linears(x, [Layer((layer.operand,))], layer.quantized)
            pair += torch.stack([(result.double() - reference).square().sum(), reference.square().sum()])
    errors[name] = errors[name] + pair if name in errors else pair


@torch.no_grad()
def _compare_stack(errors: dict[str, torch.Tensor], name: str, stack: Any, x: torch.Tensor, ends: torch.Tensor) -> None:
    """The same of the products of groups."""
    with _disable_current_modes():
        x, pair = x.detach(), torch.zeros(2, dtype=torch.float64, device=x.device)
        for begin in range(0, len(x), COMPARED_ROWS):
            rows = x[begin : begin + COMPARED_ROWS]
            own = (ends - begin).clamp(0, len(rows))
            reference = multiply_stack(stack, rows, own, transposed=False).double()
            result = multiply_stack(stack, rows, own, transposed=False, in_fp8=True)
            pair += torch.stack([(result.double() - reference).square().sum(), reference.square().sum()])
    errors[name] = errors[name] + pair if name in errors else pair


Sample = dict[str, tuple[torch.Tensor, float]]  # elements of a gradient, and how many each represents


def _sample_gradients(
    engine: TrainedModel, model: nn.Module, batch: Mapping[str, Any], seed: int
) -> tuple[torch.Tensor, torch.Tensor, Sample]:
    """Sum and weight (float64) of the first loss term, and elements of all gradients, evenly spread; of shards those of
    this rank. No gradient remains.
    """
    device = batch["input_ids"].device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.compiler.set_stance("force_eager"),
    ):
        torch.manual_seed(seed)  # the same dropout both times
        loss, weight = next(iter(engine.forward(batch).values()))
        engine.backward(loss / weight.clamp(min=1), last=True)
    samples: Sample = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        flat = local(parameter.grad).detach().flatten()
        step = max(1, flat.numel() // NUM_SAMPLED)
        sampled = flat[::step].to(torch.float32, copy=True)
        samples[name] = (sampled, flat.numel() / max(1, sampled.numel()))
    engine.drop_gradients()
    return loss.detach().double(), weight.double(), samples


class Fp8Weights(BaseConverter):
    """Frozen weights of the blocks' linear layers kept in fp8 alone (``model.frozen_dtype``)."""

    def on_meta(self, model: nn.Module) -> None:
        self.lines.append(f"frozen: {len(store_in_fp8(model))} layers are kept as fp8 values with a scale per output")


class Fp8Blocks(BaseConverter):
    """Linear layers of the blocks in fp8 while they train; before the first step their accuracy is measured."""

    def on_meta(self, model: nn.Module) -> None:
        device, dtype = self.context.device, self.context.dtype
        if device.type == "cuda" and not has_scaled_mm(device):
            raise UserError(
                f"{torch.cuda.get_device_name(device)} has no fp8 matmuls with a scale for each row",
                where="kernels.linear: fp8",
                why="torch._scaled_mm failed its test; it needs compute capability 8.9 and a new cuBLAS",
                fix="set kernels.linear: compute_dtype",
            )
        why_not = why_no_group_mm(device) if dtype == torch.bfloat16 else "they need bfloat16"
        groups = device.type != "cuda" or not why_not
        swapped, left = use_fp8(model, groups=groups)
        beside = f"; {len(left)} do not, as their sides are no multiples of 16" if left else ""
        self.lines.append(f"linear: {len(swapped)} layers in fp8 while training, {describe(device)}{beside}")
        stacks: list[Any] = [linear for linear in block_linears(model).values() if isinstance(linear, Grouped)]
        if stacks:
            num_in_fp8 = sum(stack.has_fp8_products for stack in stacks)
            how = describe_groups(device) if num_in_fp8 else why_not if not groups else "model.frozen_dtype is not fp8"
            self.lines.append(f"linear: {num_in_fp8} of {len(stacks)} stacks of experts in fp8 while training ({how})")

    def after_load(self, model: nn.Module) -> None:
        if num_bytes := quantize_frozen(model):
            self.lines.append(f"linear: frozen weights quantized once, {num_bytes / 2**30:.1f} GiB beside them")
        if self.context.plan.layout.keeps_transposed and (num_bytes := keep_transposed(model)):
            self.lines.append(f"linear: stacks of experts kept transposed too, {num_bytes / 2**30:.1f} GiB")

    def before_first_step(self, model: nn.Module, trained: TrainedModel, batch: Mapping[str, Any]) -> Finding:
        is_random = self.context.config.model.init == "random" and not self.context.resumes
        found = check_fp8(trained, model, batch, self.context.seed, random_weights=is_random)
        measured = {"fp8_loss_deviation": found.loss, "fp8_gradient_deviation": found.gradient}
        return Finding(f"linear: {found}", measured)
