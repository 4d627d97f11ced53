"""What is asked of a mixture's experts, against the model: refused where it would have no effect."""

from __future__ import annotations

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.types import ModelFacts


def check_experts(config: RunConfig, model: ModelFacts) -> None:
    """UserError where keys of experts meet a model without any."""
    if config.moe.balance and not model.has_groups:
        raise UserError(
            f"{model.model_type} has no experts to balance",
            where="moe.balance",
            why="its blocks have one MLP each, and no router",
            fix="remove moe.balance, or use a mixture of experts",
        )
