"""Greedy generation, and which tokens end it. Independent of run folders, ranks and training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from manyhands.data.chat.template import ChatTemplate

SENTINEL = "\ue000"  # private use: in no template and in no content


@torch.no_grad()
def greedy(
    next_token_logits: Callable[[torch.Tensor], torch.Tensor],
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    end_ids: Collection[int],
    device: torch.device | str = "cpu",
    agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[int]:
    """The most likely token again and again; returns the new ids without the one that ended them.

    ``next_token_logits``: ids (1, t) -> logits of the next token, (1, v) or (v). It is called at most
    ``max_new_tokens`` times, without a cache, so that a sharded model answers where all ranks call this alike.
    ``agree`` makes a chosen token, (1, 1), the same on all ranks (a broadcast from rank 0): a tie decided in two ways
    would leave ranks waiting.
    """
    ids = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=device)
    new: list[int] = []
    for _ in range(max_new_tokens):
        token = next_token_logits(ids).reshape(-1).argmax().reshape(1, 1)
        if agree is not None:
            token = agree(token)
        if int(token) in end_ids:
            break
        new.append(int(token))
        ids = torch.cat([ids, token], dim=1)
    return new


def end_token_ids(
    model_folder: str | Path, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None
) -> frozenset[int]:
    """Every token that ends a turn.

    What generation_config.json (else config.json, else the tokenizer) names as end of sequence, and the token that the
    chat template puts after an assistant's words: many models name only one of the two.
    """
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(model_folder) / name
        stated = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if stated is not None:
            ends |= {stated} if isinstance(stated, int) else set(stated)
            break
    ends |= set(end_of_turn(tokenizer, chat_template_kwargs))
    if not ends and tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return frozenset(ends)


def end_of_turn(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """The special tokens that close an assistant's turn by the template: some close the last one otherwise than those
    before it. Of several in a row the first, at which an answer is complete. None of a conversation that the template
    refuses, such as one with a second question.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ()
    special = set(tokenizer.all_special_ids) | {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    template = ChatTemplate(tokenizer, chat_template_kwargs or {})
    user, assistant = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": SENTINEL}
    asked, last, inner = map(template.try_render, ([user], [user, assistant], [user, assistant, user]))

    def encode_tail(text: str | None) -> list[int]:
        """The tokens behind the answer; none where the template refuses the conversation or does not show it."""
        _, shown, tail = (text or "").rpartition(SENTINEL)
        return list(tokenizer.encode(tail.strip(), add_special_tokens=False)) if shown else []

    # What both end with is the second question. By tokens: ``<|im_start|>`` and ``<|im_end|>`` end in the same letters.
    between, question = encode_tail(inner if asked else None), encode_tail(SENTINEL + (asked or ""))
    pairs = zip(reversed(between), reversed(question), strict=False)
    num_common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    closing = encode_tail(last), between[: len(between) - num_common]
    first = (next((token for token in ids if token in special), None) for ids in closing)
    return tuple(dict.fromkeys(token for token in first if token is not None))
