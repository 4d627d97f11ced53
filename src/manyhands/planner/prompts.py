"""Whether the prompt of a pair is computed once for both answers, and the lengths of samples that follow. Pure."""

from __future__ import annotations

from manyhands.config.schema import RunConfig
from manyhands.config.tasks import TASKS
from manyhands.core.errors import UserError
from manyhands.facts.types import Facts
from manyhands.planner.text import sentence_of
from manyhands.planner.types import Reason, reason

MIN_SAVED = 1 / 8  # of the tokens, from which sharing pays off: saving 1/4 was 1.22 times as fast on an H200, not 1.33


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
            why=sentence_of(reason("prompts", shared=False, asked=False, why=obstacle)),
            fix="remove preference.share_prompts: each answer then has a copy of the prompt, with the same loss",
        )
    shared = data.shared
    if shared and not obstacle and asked == "auto" and shared.num_tokens > (1 - MIN_SAVED) * data.num_tokens:
        obstacle = "few"
    if shared is None or obstacle or asked is False:
        return facts, False, (reason("prompts", shared=False, asked=asked is False, why=obstacle),)
    why = reason("prompts", shared=True, asked=asked is True, tokens=shared.num_tokens, copied=data.num_tokens)
    fields = {name: getattr(shared, name) for name in type(shared).model_fields}
    return facts.model_copy(update={"data": data.model_copy(update={**fields, "shared": None})}), True, (why,)


def _find_obstacle(config: RunConfig, facts: Facts, attention: str) -> str:
    """The code of why prompts cannot be shared, or need not; empty where they can."""
    model, shared = facts.model, facts.data.shared
    obstacles = {
        "short": shared is None or shared.num_tokens == facts.data.num_tokens,
        "window": model.sliding_window is not None and model.num_windowed_layers != 0,
        "state": model.num_mixer_layers > 0,
        "sinks": model.attention_sinks,
        "blockwise": attention not in ("varlen", "sdpa"),
        "rope": model.rotates_by_length,
        "images": model.is_multimodal,
        "noise": bool(config.method.neftune_alpha),
        "balance": config.moe.balance > 0,
    }
    return next((code for code, stands in obstacles.items() if stands), "")
