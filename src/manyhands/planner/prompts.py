"""Whether the prompt of a pair is computed once for both answers, and the lengths of samples that follow. Pure."""

from __future__ import annotations

from manyhands.config.schema import RunConfig
from manyhands.config.tasks import TASKS
from manyhands.core.errors import UserError
from manyhands.facts.types import Facts
from manyhands.planner.types import Reason, reason


def choose_prompts(config: RunConfig, facts: Facts, attention: str) -> tuple[Facts, bool, tuple[Reason, ...]]:
    """(facts with the lengths of a pack that has each prompt once, whether it has, the reason). UserError where sharing
    is asked for and something stands against it.
    """
    task, asked, data = TASKS[config.task], config.preference.share_prompts, facts.data
    if task.section != "preference" or task.num_documents == 1:
        return facts, False, ()
    obstacle = _find_obstacle(config, facts, attention)
    if asked is True and obstacle:
        raise UserError(
            "the prompt of a pair cannot be computed once for both answers",
            where="preference.share_prompts",
            why=obstacle,
            fix="remove preference.share_prompts: each answer then has a copy of the prompt, with the same loss",
        )
    shared = data.shared
    if shared is None or obstacle or asked is False:
        return facts, False, (reason("prompts", shared=False, asked=asked is False, why=obstacle),)
    why = reason("prompts", shared=True, asked=asked is True, tokens=shared.num_tokens, copied=data.num_tokens)
    fields = {name: getattr(shared, name) for name in type(shared).model_fields}
    return facts.model_copy(update={"data": data.model_copy(update={**fields, "shared": None})}), True, (why,)


def _find_obstacle(config: RunConfig, facts: Facts, attention: str) -> str:
    """Why prompts cannot be shared, or need not; empty where they can."""
    model, shared = facts.model, facts.data.shared
    obstacles = {
        "no prompt is longer than one token": shared is None or shared.num_tokens == facts.data.num_tokens,
        "layers have a sliding window": model.sliding_window is not None and model.num_windowed_layers != 0,
        "layers carry a state along a row": model.num_mixer_layers > 0,
        "heads have attention sinks": model.attention_sinks,
        "attention is computed blockwise": attention not in ("varlen", "sdpa"),
        "rotary frequencies depend on the length of each answer": model.rotates_by_length,
        "the model has parts for images": model.is_multimodal,
        "noise on embeddings depends on the length of each answer": bool(config.method.neftune_alpha),
        "the balance loss is one of each answer with its prompt": config.moe.balance > 0,
    }
    return next((text for text, stands in obstacles.items() if stands), "")
