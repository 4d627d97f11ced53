"""A few validation prompts, answered in each evaluation so that a person can read what the model has learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from manyhands.data.streams import prompt_of
from manyhands.data.template import chat_template_kwargs_of
from manyhands.infer.generate import end_token_ids, generate, greedy
from manyhands.worker.context import RankContext


@dataclass(frozen=True)
class SamplePrompt:
    ids: list[int]
    text: str


def choose_prompts(rank: RankContext, rows: np.ndarray) -> list[SamplePrompt]:
    """The first ``evaluate.prompts`` validation samples that have a prompt, up to their first loss token."""
    prompts: list[SamplePrompt] = []
    for row in rows:
        if len(prompts) == rank.config.evaluate.prompts:
            break
        ids = prompt_of(rank.store.validation.sample(int(row))).tolist()
        if ids:
            prompts.append(SamplePrompt(ids, _question(ids, rank.tokenizer)))
    return prompts


def _question(ids: list[int], tokenizer: Any) -> str:
    """What to show of a prompt: of the parts between special tokens, the longest of the last four, without its role.

    In the templates we know those are the last question, the role after it and line ends.
    """
    special = set(tokenizer.all_special_ids)
    parts: list[list[int]] = [[]]
    for token in ids:
        if token in special:
            parts.append([])
        else:
            parts[-1].append(token)
    longest = max(parts[-4:], key=len)
    text = tokenizer.decode(longest).strip()
    return text.removeprefix("user\n").strip()


def answer_prompts(rank: RankContext, prompts: list[SamplePrompt]) -> tuple[tuple[str, str], ...]:
    """Greedy answers; () on ranks that did not need to help.

    A whole model answers on rank 0 with a cache. Sharded weights are gathered by all ranks or by none, so there all
    ranks go through the same forwards.
    """
    max_new_tokens = rank.config.evaluate.max_new_tokens
    ends = end_token_ids(rank.plan.model_folder, rank.tokenizer, chat_template_kwargs_of(rank.config))
    if rank.engine.is_local and not rank.is_first:
        return ()
    answers = []
    with torch.compiler.set_stance("force_eager"):  # a length seen once is not worth a compilation
        for done, prompt in enumerate(prompts):
            rank.show_progress("samples", done, len(prompts))
            if rank.engine.is_local:
                answer = generate(rank.model, rank.tokenizer, prompt.ids, max_new_tokens, ends)
            else:
                ids = greedy(
                    rank.engine.next_token_logits, prompt.ids, max_new_tokens, ends, rank.world.device, agree=_broadcast
                )
                answer = rank.tokenizer.decode(ids, skip_special_tokens=True).strip()
            answers.append((prompt.text, answer))
    rank.show_progress("samples", len(prompts), len(prompts))
    return tuple(answers)


def _broadcast(token: torch.Tensor) -> torch.Tensor:
    dist.broadcast(token, src=0)
    return token
