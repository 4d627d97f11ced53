"""Models of hand-made plans, built as the worker builds them: the plan's converters on meta, weights, first values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from manyhands.config.schema import RunConfig
from manyhands.convert.build import build_on_meta, describe_new, load_weights, make_all
from manyhands.convert.protocol import Context
from manyhands.facts.model_config import text_part
from manyhands.families import num_experts, why_no_experts
from manyhands.model.loss import LossModel
from manyhands.planner.converters import Case, choose_converters
from manyhands.planner.types import Plan

CPU = torch.device("cpu")
Load = Callable[[nn.Module, torch.device], None]


def with_converters(plan: Plan, config: RunConfig) -> Plan:
    """``plan`` with the converters that the planner would name, unless it names some."""
    if plan.converters:
        return plan
    # As facts/model_config.py has it, but for what it refuses.
    model_config = json.loads((Path(plan.model_folder) / "config.json").read_text(encoding="utf-8"))
    case = Case(
        config,
        plan.layout.device,
        plan.attention,
        has_towers=text_part(model_config) is not model_config,
        has_groups=bool(num_experts(text := text_part(model_config))) and not why_no_experts(text),
        has_new_tokens=plan.new_tokens is not None,
        continues_adapter=plan.adapter is not None,
    )
    return plan.model_copy(update={"converters": choose_converters(case)})


def on_meta(
    plan: Plan,
    config: RunConfig,
    report: Callable[[str], object] = lambda _: None,
    *,
    resumes: bool = False,
    device: torch.device = CPU,
) -> tuple[LossModel, Load]:
    """The model of ``plan`` on meta with its loss around it, to train on ``device``, and what gives it its weights."""
    context = Context(config, with_converters(plan, config), device, resumes)
    converters = make_all(context)
    loss_model = build_on_meta(context, converters, report)
    for line in describe_new(converters, set()):
        report(line)
    return loss_model, lambda module, device: load_weights(context, converters, module, device)


def load_model(plan: Plan, config: RunConfig, report: Callable[[str], object] = lambda _: None) -> nn.Module:
    """The transformers model of ``plan`` with its weights, on the CPU, in training mode."""
    loss_model, load = on_meta(plan, config, report)
    load(loss_model.model, torch.device("cpu"))
    return loss_model.model
