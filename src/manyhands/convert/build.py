"""Build the model that a plan names: on meta, changed by the plan's converters in their order, then filled.

No feature is named here but in ``CONVERTERS``, which says where each one is, and in ``TESTS_WEIGHTS``. Must not know
how parameters are sharded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from manyhands import families
from manyhands.convert.protocol import Context, Converter
from manyhands.core.errors import UserError
from manyhands.core.holding import full_numel
from manyhands.data.tasks import TASKS
from manyhands.model.load import build_meta, layers_that_fill_themselves, materialize
from manyhands.model.loss import LossModel
from manyhands.model.structure import hugging_face_model
from manyhands.planner.types import Plan

# Name in a plan -> module and class, imported when a plan names it. A plan may also name ``module:Class`` itself.
CONVERTERS = {
    "parts": "manyhands.convert.parts:Parts",
    "nf4": "manyhands.convert.nf4:Nf4Blocks",
    "fp8_weights": "manyhands.convert.fp8:Fp8Weights",
    "fp8": "manyhands.convert.fp8:Fp8Blocks",
    "lora": "manyhands.convert.lora:Lora",
    "patterns": "manyhands.convert.trainable:TrainedPatterns",
    "new_tokens": "manyhands.convert.new_tokens:TrainedTokens",
    "adapter": "manyhands.convert.adapter:StartingAdapter",
    "loftq": "manyhands.convert.loftq:LoftQ",
    "neftune": "manyhands.convert.neftune:Neftune",
    "fused_modules": "manyhands.convert.fused_modules:FusedModules",
    "attention_kernels": "manyhands.convert.attention_kernels:FastAttention",
    "fused_loss": "manyhands.convert.fused_loss:FusedLoss",
}
TESTS_WEIGHTS = {"fp8"}  # of these the self-test's result depends on the weights


def make(spec: str, context: Context) -> Converter:
    """The converter that ``spec`` names: one of ``CONVERTERS``, or ``module:Class`` for a class that takes a
    ``Context``.
    """
    path = CONVERTERS.get(spec, spec)
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name) if module_name else None
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):  # itself, or a package around it
            raise _no_converter(spec, str(error)) from error
        raise UserError(
            f"the converter {spec!r} cannot be imported",
            where="the plan's converters",
            why=str(error),
            fix="install what is missing, or correct the module",
        ) from error
    kind = getattr(module, class_name, None) if class_name else None
    if kind is None:
        raise _no_converter(spec, f"{module_name or 'no module'} has no class {class_name!r}")
    converter: Converter = kind(context)
    return converter


def _no_converter(spec: str, why: str) -> UserError:
    return UserError(
        f"no converter is called {spec!r}",
        where="the plan's converters",
        why=why,
        fix=f"name one of {', '.join(CONVERTERS)}, or a class as module:Class",
    )


def tests_weights(plan: Plan) -> bool:
    """Whether a self-test of the plan's converters, or of others than those known here, depends on the weights."""
    return not set(plan.converters) <= CONVERTERS.keys() - TESTS_WEIGHTS


def make_all(context: Context) -> list[Converter]:
    """The converters of the plan, in its order."""
    return [make(spec, context) for spec in context.plan.converters]


def build_on_meta(
    context: Context, converters: Sequence[Converter], report: Callable[[str], object] = lambda _: None
) -> LossModel:
    """The model of the plan on meta, in training mode, changed by ``converters``, with its loss around it."""
    model: Any = build_meta(context.plan, context.config, report)
    for converter in converters:
        converter.on_meta(model)
    terms = (*TASKS[context.config.task].terms, *families.find(model.config.model_type).terms)
    loss_model = LossModel(model, terms=terms)
    for converter in converters:
        converter.on_loss(loss_model)
    return loss_model


def load_weights(context: Context, converters: Sequence[Converter], module: nn.Module, device: torch.device) -> None:
    """Give ``module``, the loss model or the transformers model, memory on ``device`` and its weights; then converters
    fill what no file holds.
    """
    named = hugging_face_model(module).named_parameters(remove_duplicate=False) if context.restores else ()
    skip = {name for name, parameter in named if parameter.requires_grad}
    materialize(module, context.plan, context.config, device, draw_on=context.device, skip=skip)
    for converter in converters:
        converter.after_load(hugging_face_model(module))


def describe_new(converters: Sequence[Converter], reported: set[str]) -> list[str]:
    """Lines for the log that are not among ``reported``, to which they are added."""
    lines = [line for converter in converters for line in converter.describe() if line not in reported]
    reported.update(lines)
    return lines


def count_parameters(model: nn.Module) -> int:
    """Parameters of the model; those that hold a weight in another form count as that weight."""
    layers = layers_that_fill_themselves(model)
    pieces = {f"{name}.{piece}" for name, layer in layers.items() for piece in layer.weight_pieces}
    others = sum(full_numel(parameter) for name, parameter in model.named_parameters() if name not in pieces)
    return others + sum(layer.in_features * layer.out_features for layer in layers.values())
