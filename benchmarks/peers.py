"""The speed table's goals and what the peers do differently, by the name of a row. Plain values."""

from __future__ import annotations

from typing import Any

# Tokens/s for each GPU on H200s, on as many GPUs as the row names; 0 where none was set.
GOALS: dict[str, int] = {
    "8b-lora": 16_000,
    "8b-qlora": 15_300,
    "1b-full": 66_000,
    "8b-lora-recompute": 11_500,
    "8b-qlora-recompute": 11_200,
    "8b-lora-mix": 0,
    "27b-qlora": 4_300,
    "32b-qlora": 3_400,
    "70b-qlora": 1_650,
    "8b-lora-ddp": 15_700,
    "8b-full": 11_300,
    "70b-lora": 1_650,
    "8b-lora-fp8": 20_000,
    "8b-full-fp8": 15_000,
}

# ``recompute``: with activation checkpointing of all layers; ``fsdp``: sharded, where there are several GPUs.
PEER: dict[str, dict[str, Any]] = {
    "8b-lora-recompute": {"recompute": True},
    "8b-qlora-recompute": {"recompute": True},
    "70b-qlora": {"recompute": True},
    "8b-full": {"recompute": True, "fsdp": True},
    "70b-lora": {"recompute": True, "fsdp": True},
}


def peer_options(row_name: str) -> dict[str, Any]:
    return PEER.get(row_name, {})
