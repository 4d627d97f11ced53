"""One copy of a model at work: how many prompts fit into a batch, and their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from manyhands import families
from manyhands.core.errors import EXIT_FAILED, OUT_OF_MEMORY, UserError
from manyhands.core.machine import memory_bytes
from manyhands.infer.decode import Completion, OnText, can_pad, complete
from manyhands.infer.prompts import PromptTokens
from manyhands.infer.settings import GenerationSettings

if TYPE_CHECKING:
    from manyhands.infer.load import Answerer

MAX_ROWS_GPU, MAX_ROWS_CPU = 256, 16
SHARE_OF_FREE = 0.7  # the rest is fragmentation, and what a step needs besides
MAX_CPU_BYTES = 4 << 30
BYTES_A_LOGIT = 40  # float32 logits and copies; sorted, with their order and cumulative float64, where sampled


@dataclass(frozen=True)
class BatchCapacity:
    """How large a batch may be. Bytes: ``num_bytes`` there are, ``token_bytes`` of the cache for a token,
    ``prompt_token_bytes`` more while a prompt passes, ``row_bytes`` for a row's logits. ``max_tokens``: of prompt and
    answer together. ``pads``: prompts of unequal lengths may share a batch.
    """

    num_bytes: int
    token_bytes: int
    prompt_token_bytes: int
    row_bytes: int
    max_rows: int
    max_tokens: int | None
    pads: bool

    def count_rows(self, longest: int, max_new_tokens: int) -> int:
        """Rows of a batch whose longest prompt has so many tokens, at least 1."""
        mask_bytes = 3 * longest * longest if self.pads else 0  # bool, and as a bias in the compute dtype
        row = (
            (longest + max_new_tokens) * self.token_bytes
            + longest * self.prompt_token_bytes
            + self.row_bytes
            + mask_bytes
        )
        return max(1, min(self.max_rows, self.num_bytes // row))


def measure_capacity(model: Any, max_rows: int | None = None, num_processes: int = 1) -> BatchCapacity:
    """Of a loaded model on its devices; ``num_processes`` share the host's memory where that is the CPU's."""
    text = model.config.get_text_config()
    values = text.to_dict()
    values |= {name: values[own] for name, own in text.attribute_map.items() if own in values}
    blocks = [families.config_of_block(values, index) for index in range(text.num_hidden_layers)]
    parameter = next(model.parameters())
    if parameter.device.type == "cuda":
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        free = min(torch.cuda.mem_get_info(device)[0] for device in devices) * len(devices)
        num_bytes = int(SHARE_OF_FREE * free)
    else:
        num_bytes = min(MAX_CPU_BYTES, memory_bytes()[1] // 4) // num_processes
    default_rows = MAX_ROWS_GPU if parameter.device.type == "cuda" else MAX_ROWS_CPU
    inner = max(block.get("intermediate_size") or 4 * text.hidden_size for block in blocks)
    wide = 4 * text.hidden_size + 3 * inner
    return BatchCapacity(
        num_bytes=num_bytes,
        token_bytes=2 * sum(map(_key_values, blocks)) * parameter.element_size(),
        prompt_token_bytes=wide * parameter.element_size(),
        row_bytes=BYTES_A_LOGIT * text.vocab_size,
        max_rows=max_rows or default_rows,
        max_tokens=getattr(text, "max_position_embeddings", None),
        pads=can_pad(model.config),
    )


def _key_values(block: Mapping[str, Any]) -> int:
    """Values of a token's keys in a block, by its fields of config.json."""
    heads = block["num_attention_heads"]
    return (block.get("num_key_value_heads") or heads) * (block.get("head_dim") or block["hidden_size"] // heads)


class PromptQueue:
    """Prompts that wait, longest first: what does not fit shows at once, and the last batches are quick."""

    def __init__(self, prompts: Sequence[PromptTokens], max_new_tokens: int, num_replicas: int = 1) -> None:
        self._waiting = sorted(prompts, key=lambda prompt: len(prompt.ids))  # taken from the end
        self._max_new_tokens, self._num_replicas = max_new_tokens, num_replicas

    def take(self, capacity: BatchCapacity) -> list[PromptTokens] | None:
        """The next batch for a copy with this capacity; None once there is no prompt left."""
        if not self._waiting:
            return None
        longest = len(self._waiting[-1].ids)
        fair = -(-len(self._waiting) // self._num_replicas)  # at the end every copy gets its share
        rows = min(capacity.count_rows(longest, self._max_new_tokens), fair)
        batch = self._waiting[-rows:]
        if not capacity.pads:
            batch = [prompt for prompt in batch if len(prompt.ids) == longest]
        if any(prompt.images for prompt in batch):  # images belong to a row: such a prompt is answered alone
            last_with = max(place for place, prompt in enumerate(batch) if prompt.images)
            batch = batch[max(0, last_with + (last_with < len(batch) - 1)) :]
        del self._waiting[-len(batch) :]
        return batch[::-1]


class Worker:
    """A model that answers batches of prompts."""

    def __init__(
        self,
        answerer: Answerer,
        settings: GenerationSettings,
        *,
        max_rows: int | None = None,
        num_processes: int = 1,
        on_text: OnText | None = None,
    ) -> None:
        self.answerer, self._settings, self._on_text = answerer, settings, on_text
        self.capacity = measure_capacity(answerer.model, max_rows, num_processes)

    def run(self, task: list[PromptTokens]) -> list[tuple[int, Completion]]:
        """Answers of a batch with the prompts' numbers. A batch too large for the GPU is halved."""
        numbers = [prompt.number for prompt in task]
        on_text, inputs = self._on_text, {}
        if task[0].images:
            assert self.answerer.images is not None
            inputs = self.answerer.images.inputs(self.answerer.model, task[0].ids, task[0].images)
        try:
            answers = complete(
                self.answerer.model,
                self.answerer.tokenizer,
                [prompt.ids for prompt in task],
                self._settings,
                self.answerer.end_ids,
                numbers,
                None if on_text is None else lambda position, text: on_text(numbers[position], text),
                inputs,
            )
        except torch.OutOfMemoryError as error:
            if len(task) == 1 or on_text is not None:
                raise UserError(
                    "a single prompt does not fit into the GPU's memory",
                    where=f"prompt {task[0].number}, {len(task[0].ids):,} tokens",
                    why=str(error).split("\n")[0],
                    fix="lower --max-new-tokens, or divide the model over more GPUs: --device-map balanced",
                    exit_code=EXIT_FAILED,
                    kind=OUT_OF_MEMORY,
                ) from error
        else:
            return list(zip(numbers, answers, strict=True))
        torch.cuda.empty_cache()  # outside of the handler, whose traceback keeps the batch's tensors
        half = len(task) // 2
        return [*self.run(task[:half]), *self.run(task[half:])]

    def answer_all(self, prompts: Sequence[PromptTokens]) -> dict[int, Completion]:
        """Answers by the prompts' numbers, batch after batch."""
        queue = PromptQueue(prompts, self._settings.max_new_tokens)
        found: dict[int, Completion] = {}
        while (batch := queue.take(self.capacity)) is not None:
            found.update(self.run(batch))
        return found
