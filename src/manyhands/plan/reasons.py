"""Why a plan is as it is: a code with values for every decision, rejection and warning. No prose: ``sentences.py``
turns a reason into a sentence, and nothing reads a sentence.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

# Decisions, in the order of a plan's ``why``; then notes and warnings; then why a candidate was not chosen.
Code = Literal[
    "device", "processes", "packing", "smaller", "strategy", "activation_checkpointing", "reduction", "offload",
    "memory", "batch", "efficiency", "compute", "masters", "frozen", "linear", "towers", "attention", "compile",
    "data_workers", "new_tokens", "adapter", "validation", "unread", "steps", "warmup", "evaluation", "checkpoints",
    "early_end", "disk", "learning_rate", "output_dtype",
    "long_samples", "large_batch", "high_learning_rate", "high_rank",
    "not_next_smaller", "exceeds_memory", "exceeds_host_memory", "near_limit", "idle_device", "computes_again",
    "computes_more_again", "shards_needlessly", "gathers_again", "smaller_micro_batch", "no_faster",
]  # fmt: skip


class Reason(BaseModel):
    """``values`` are plain JSON: what the sentence needs, in bytes, tokens, samples and names of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    code: Code
    values: dict[str, Any] = {}


def reason(code: Code, **values: Any) -> Reason:
    return Reason(code=code, values=values)
