"""A few validation prompts, answered in each evaluation so that a person can read what the model has learned."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from manyhands.config.schema import RunConfig
from manyhands.core.world import World
from manyhands.data.batch.batches import Batch, collate, to_device
from manyhands.data.batch.collate import BatchShape
from manyhands.data.chat.template import chat_template_kwargs_of
from manyhands.data.images.batch import open_batcher
from manyhands.data.store.store import TokenStore
from manyhands.data.store.streams import StoredImage, images_within, make_sample, prompt_of, to_streams
from manyhands.infer.decode import complete, end_token_ids, greedy, special_ids
from manyhands.infer.images import image_inputs
from manyhands.infer.settings import GenerationSettings
from manyhands.model.image_checks import HeldSamples
from manyhands.model.inputs import image_work
from manyhands.planner.types import Plan


@dataclass(frozen=True)
class SamplePrompt:
    ids: list[int]
    text: str
    images: tuple[StoredImage, ...] = ()


class Answering(Protocol):
    """What is called of an engine."""

    @property
    def is_local(self) -> bool: ...

    def next_token_logits(self, input_ids: torch.Tensor, entries: Batch | None = None) -> torch.Tensor: ...


class SamplePrompts:
    """``chosen``: the first ``evaluate.prompts`` of ``rows`` that have a prompt, up to the first loss token."""

    def __init__(self, config: RunConfig, plan: Plan, store: TokenStore, tokenizer: Any, rows: np.ndarray) -> None:
        self.config, self.plan, self.tokenizer = config, plan, tokenizer
        self.chosen: list[SamplePrompt] = []
        self._work = image_work(config, plan, store)  # the images of prompts are always computed
        token_id = -1 if self._work is None else open_batcher(self._work).token_id
        for row in rows:
            if len(self.chosen) == config.evaluate.prompts:
                break
            sample = store.validation.sample(int(row))
            ids = prompt_of(sample).tolist()
            if ids:
                images = () if self._work is None else images_within(sample, ids.count(token_id))
                text = "".join(f"[image {_name(image)}] " for image in images) + _question(ids, tokenizer, token_id)
                self.chosen.append(SamplePrompt(ids, text, images))

    def answer(
        self, model: Any, engine: Answering, world: World, show_progress: Callable[[str, int, int], None]
    ) -> tuple[tuple[str, str], ...]:
        """Greedy answers; () on ranks that did not need to help.

        A whole model answers on rank 0 with a cache. Sharded weights are gathered by all ranks or by none, so there all
        ranks go through the same forwards.
        """
        ends = end_token_ids(self.plan.model_folder, self.tokenizer, chat_template_kwargs_of(self.config))
        if "eos" in self.config.model.special_tokens:
            ends |= {self.tokenizer.eos_token_id}  # which the base's files do not name
        if engine.is_local and not world.is_first:
            return ()
        answers = []
        with torch.compiler.set_stance("force_eager"):  # a length seen once is not worth a compilation
            for done, prompt in enumerate(self.chosen):
                show_progress("samples", done, len(self.chosen))
                if engine.is_local:
                    answer = self._answer_here(model, prompt, ends)
                else:
                    answer = self._answer_together(engine, prompt, ends, world.device)
                answers.append((prompt.text, answer))
        show_progress("samples", len(self.chosen), len(self.chosen))
        return tuple(answers)

    def _answer_here(self, model: Any, prompt: SamplePrompt, ends: frozenset[int]) -> str:
        settings, inputs = GenerationSettings(max_new_tokens=self.config.evaluate.max_new_tokens), None
        if prompt.images and self._work is not None:
            inputs = image_inputs(open_batcher(self._work), model, prompt.ids, prompt.images)
        return complete(model, self.tokenizer, [prompt.ids], settings, ends, inputs=inputs)[0].text

    def _answer_together(
        self, engine: Answering, prompt: SamplePrompt, ends: frozenset[int], device: torch.device
    ) -> str:
        def next_token_logits(ids: torch.Tensor) -> torch.Tensor:
            return engine.next_token_logits(ids, self._batch_images(ids, prompt.images) if prompt.images else None)

        num_tokens = self.config.evaluate.max_new_tokens
        ids = greedy(next_token_logits, prompt.ids, num_tokens, ends, device, agree=_broadcast)
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def _batch_images(self, ids: torch.Tensor, images: Sequence[StoredImage]) -> Batch:
        """The entries of a batch of one row ``ids`` (1, t) about its images, as in training without packing."""
        row = ids[0].cpu().numpy().astype(np.int32)
        sample = {**make_sample(row, np.zeros(len(row), np.bool_)), **to_streams(images)}
        batch = collate(HeldSamples([sample]), np.arange(1), BatchShape(packed=False, images=self._work))
        del batch["input_ids"]
        return to_device(batch, ids.device)


def _name(image: StoredImage) -> str:
    name = Path(image.place).name if image.place else "of the row"
    return "".join(character if character.isprintable() else "?" for character in name)


def _question(ids: list[int], tokenizer: Any, image_token: int = -1) -> str:
    """The longest of a prompt's last four parts between special tokens, without its role: the last question."""
    special = {image_token} | special_ids(tokenizer)
    parts: list[list[int]] = [[]]
    for token in ids:
        if token in special:
            parts.append([])
        else:
            parts[-1].append(token)
    longest = max(parts[-4:], key=len)
    text = tokenizer.decode(longest).strip()
    return text.removeprefix("user\n").strip()


def _broadcast(token: torch.Tensor) -> torch.Tensor:
    dist.broadcast(token, src=0)
    return token
