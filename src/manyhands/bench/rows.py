"""The rows of the speed table: what is measured, how the peers do the same work, and which figure is the goal. Plain
values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """One piece of work. ``rows`` is rows of one GPU in one step; micro-batches are the plan's (``auto``).

    ``keys`` are keys of the run that belong to the work itself (blocks recomputed, fp8), never tuning. ``goal`` is
    tokens/s for each GPU on H200s. ``peer`` is what the peers' processes do differently: ``recompute`` blocks, shard by
    ``fsdp``.
    """

    name: str
    what: str
    shape: str
    method: Literal["full", "lora", "qlora"]
    gpus: int
    goal: int
    rows: int = 2
    length: int = 4096
    data: Literal["full", "mix"] = "full"
    keys: dict[str, Any] = field(default_factory=dict)
    peer: dict[str, Any] = field(default_factory=dict)
    max_gib: float | None = None  # the work must stay below, where the goal says so


RECOMPUTED = {"parallel.activation_checkpointing": "full"}
FP8 = {"kernels.linear": "fp8"}

# The most valuable first: what most people run.
TABLE = (
    Row("8b-lora", "Llama-8B LoRA", "llama8b", "lora", 1, 16_000),
    Row("8b-qlora", "Llama-8B QLoRA", "llama8b", "qlora", 1, 15_300, rows=4),
    Row("1b-full", "Llama-1B full", "llama1b", "full", 1, 66_000, rows=4),
    Row("8b-lora-recompute", "Llama-8B LoRA, blocks recomputed", "llama8b", "lora", 1, 11_500, keys=RECOMPUTED,
        peer={"recompute": True}, max_gib=17.5),
    Row("8b-qlora-recompute", "Llama-8B QLoRA, blocks recomputed", "llama8b", "qlora", 1, 11_200, keys=RECOMPUTED,
        peer={"recompute": True}, max_gib=7.8),
    Row("8b-lora-mix", "Llama-8B LoRA, lengths 64 to 4,096, packed", "llama8b", "lora", 1, 0, data="mix", rows=16),
    Row("27b-qlora", "Gemma-3-27B QLoRA", "gemma27b", "qlora", 2, 4_300, rows=1),
    Row("32b-qlora", "Qwen3-32B QLoRA", "qwen32b", "qlora", 4, 3_400, rows=1),
    Row("70b-qlora", "Llama-70B QLoRA", "llama70b", "qlora", 2, 1_650, rows=1, peer={"recompute": True}),
    Row("8b-lora-ddp", "Llama-8B LoRA, replicated", "llama8b", "lora", 8, 15_700),
    Row("8b-full", "Llama-8B full, 8,192 tokens a row", "llama8b", "full", 8, 11_300, rows=1, length=8192,
        peer={"recompute": True, "fsdp": True}),
    Row("70b-lora", "Llama-70B LoRA", "llama70b", "lora", 8, 1_650, rows=1, peer={"recompute": True, "fsdp": True}),
    Row("8b-lora-fp8", "Llama-8B LoRA, products in fp8", "llama8b", "lora", 1, 20_000, keys=FP8),
    Row("8b-full-fp8", "Llama-8B full, products in fp8", "llama8b", "full", 8, 15_000, rows=1, length=8192, keys=FP8),
)  # fmt: skip

BY_NAME = {row.name: row for row in TABLE}


def mix_lengths(num_samples: int, seed: int = 5) -> list[int]:
    """A long-tailed mix: log-normal around 400 tokens, cut to 64 .. 4,096, as instruction data has it."""
    import random

    choose = random.Random(seed)
    return [min(4096, max(64, round(choose.lognormvariate(6.0, 1.0)))) for _ in range(num_samples)]
