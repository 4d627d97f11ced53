"""Build the model that a plan names: on meta, changed by the plan's converters in their order, then filled.

No feature is named here: ``planner/converters.py`` lists them. Must not know how parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from manyhands import families
from manyhands.config.tasks import TASKS
from manyhands.convert.protocol import BaseConverter, Context, Converter
from manyhands.core.errors import UserError
from manyhands.core.holding import full_numel
from manyhands.core.references import import_reference
from manyhands.model.load import build_meta, materialize
from manyhands.model.loss import LossModel
from manyhands.model.structure import hugging_face_model
from manyhands.model.weights import quantized_layers
from manyhands.planner.converters import CONVERTERS


def make(name: str, context: Context) -> Converter:
    """The converter that a plan names: one of ``CONVERTERS``, or a class of the user's own. UserError."""
    if name not in CONVERTERS and ":" not in name:
        raise UserError(
            f"no converter is called {name!r}",
            where="the plan's converters",
            fix=f"name one of {', '.join(CONVERTERS)}, or a class as module:Class",
        )
    kind = import_reference(CONVERTERS[name].place if name in CONVERTERS else name)
    if not isinstance(kind, type) or not issubclass(kind, BaseConverter):
        raise UserError(
            f"{name!r} is not a converter",
            where="model.converters",
            fix="name a subclass of manyhands.convert.protocol.BaseConverter",
        )
    return kind(context)


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
    terms = (*TASKS[context.config.task].make_terms(context.config), *families.find(model.config.model_type).terms)
    loss_model = LossModel(model, terms=terms)
    for converter in converters:
        converter.on_loss(loss_model)
    return loss_model


def load_weights(context: Context, converters: Sequence[Converter], module: nn.Module, device: torch.device) -> None:
    """Give ``module``, the loss model or the transformers model, memory on ``device`` and its weights; then converters
    fill what no file holds.
    """
    materialize(module, context.plan, context.config, device, draw_on=context.device)
    for converter in converters:
        converter.after_load(hugging_face_model(module))


def describe_new(converters: Sequence[Converter], reported: set[str]) -> list[str]:
    """Lines for the log that are not among ``reported``, to which they are added."""
    lines = [line for converter in converters for line in converter.describe() if line not in reported]
    reported.update(lines)
    return lines


def count_parameters(model: nn.Module) -> int:
    """Parameters of the model; those that hold a weight in another form count as that weight."""
    layers = quantized_layers(model)
    pieces = {f"{name}.{piece}" for name, layer in layers.items() for piece in layer.weight_pieces}
    others = sum(full_numel(parameter) for name, parameter in model.named_parameters() if name not in pieces)
    return others + sum(layer.in_features * layer.out_features for layer in layers.values())
