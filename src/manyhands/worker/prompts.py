"""A few validation prompts, answered in each evaluation so that a person can read what the model has learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from manyhands.data.batches import Batch, collate
from manyhands.data.collate import BatchShape
from manyhands.data.image_batch import ImageWork, open_batcher
from manyhands.data.streams import StoredImage, from_streams, make_sample, prompt_of, to_streams
from manyhands.data.template import chat_template_kwargs_of
from manyhands.infer.decode import complete
from manyhands.infer.generate import end_token_ids, greedy
from manyhands.infer.images import image_inputs
from manyhands.infer.settings import GenerationSettings
from manyhands.model.image_checks import HeldSamples
from manyhands.worker.batches import images_of
from manyhands.worker.context import RankContext


@dataclass(frozen=True)
class SamplePrompt:
    ids: list[int]
    text: str
    images: tuple[StoredImage, ...] = ()


def choose_prompts(rank: RankContext, rows: np.ndarray) -> list[SamplePrompt]:
    """The first ``evaluate.prompts`` validation samples that have a prompt, up to their first loss token."""
    prompts: list[SamplePrompt] = []
    work = _work_of(rank)
    token_id = -1 if work is None else open_batcher(work).token_id
    for row in rows:
        if len(prompts) == rank.config.evaluate.prompts:
            break
        sample = rank.store.validation.sample(int(row))
        ids = prompt_of(sample).tolist()
        if ids:
            images = () if work is None else _images_within(from_streams(sample), ids.count(token_id))
            text = "".join(f"[image {_name(image)}] " for image in images) + _question(ids, rank.tokenizer, token_id)
            prompts.append(SamplePrompt(ids, text, images))
    return prompts


def _images_within(images: Sequence[StoredImage], num_tokens: int) -> tuple[StoredImage, ...]:
    """The first of a sample's images, which have ``num_tokens`` placeholders together."""
    ends = np.cumsum([image.num_tokens for image in images])
    return tuple(image for image, end in zip(images, ends, strict=True) if end <= num_tokens)


def _name(image: StoredImage) -> str:
    name = Path(image.place).name if image.place else "of the row"
    return "".join(character if character.isprintable() else "?" for character in name)


def _question(ids: list[int], tokenizer: Any, image_token: int = -1) -> str:
    """What to show of a prompt: of the parts between special tokens, the longest of the last four, without its role.

    In the templates we know those are the last question, the role after it and line ends.
    """
    special = {*tokenizer.all_special_ids, image_token}
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
    ends = end_token_ids(rank.plan.model_folder, rank.tokenizer, chat_template_kwargs_of(rank.config))
    if "eos" in rank.config.model.special_tokens:
        ends |= {rank.tokenizer.eos_token_id}  # which the base's files do not name
    if rank.engine.is_local and not rank.is_first:
        return ()
    answers = []
    with torch.compiler.set_stance("force_eager"):  # a length seen once is not worth a compilation
        for done, prompt in enumerate(prompts):
            rank.show_progress("samples", done, len(prompts))
            answer = _answer_here if rank.engine.is_local else _answer_together
            answers.append((prompt.text, answer(rank, prompt, ends)))
    rank.show_progress("samples", len(prompts), len(prompts))
    return tuple(answers)


def _answer_here(rank: RankContext, prompt: SamplePrompt, ends: frozenset[int]) -> str:
    settings = GenerationSettings(max_new_tokens=rank.config.evaluate.max_new_tokens)
    inputs, work = None, _work_of(rank)
    if prompt.images and work is not None:
        inputs = image_inputs(open_batcher(work), rank.model, prompt.ids, prompt.images)
    return complete(rank.model, rank.tokenizer, [prompt.ids], settings, ends, inputs=inputs)[0].text


def _answer_together(rank: RankContext, prompt: SamplePrompt, ends: frozenset[int]) -> str:
    def next_token_logits(ids: torch.Tensor) -> torch.Tensor:
        return rank.engine.next_token_logits(ids, _batch_images(rank, ids, prompt.images) if prompt.images else None)

    num_tokens, device = rank.config.evaluate.max_new_tokens, rank.world.device
    ids = greedy(next_token_logits, prompt.ids, num_tokens, ends, device, agree=_broadcast)
    return rank.tokenizer.decode(ids, skip_special_tokens=True).strip()


def _work_of(rank: RankContext) -> ImageWork | None:
    """How the run prepares images, None in a run without. The images of prompts are always computed."""
    work = images_of(rank)
    return None if work is None else replace(work, features=None)


def _batch_images(rank: RankContext, ids: torch.Tensor, images: Sequence[StoredImage]) -> Batch:
    """The entries of a batch of one row ``ids`` (1, t) about its images, as in training without packing."""
    row = ids[0].cpu().numpy().astype(np.int32)
    sample = {**make_sample(row, np.zeros(len(row), np.bool_)), **to_streams(images)}
    batch = collate(HeldSamples([sample]), np.arange(1), BatchShape(packed=False, images=_work_of(rank)))
    return {
        name: value.to(ids.device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name != "input_ids"
    }


def _broadcast(token: torch.Tensor) -> torch.Tensor:
    dist.broadcast(token, src=0)
    return token
