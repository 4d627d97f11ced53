"""Every ``rope_type`` of transformers, for tiny models whose frequencies change, if at all, at 64 tokens."""

from __future__ import annotations

import copy
from typing import Any

BOUND = 64
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": BOUND},
    "longrope": {"original_max_position_embeddings": BOUND, "short_factor": [1.0] * 8,
                 "long_factor": [1.0 + index for index in range(8)]},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": BOUND},
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip
ROPE_CASES = [(family, kind) for kind in ROPES for family in ("llama", "gemma3")] + [("phi3", "longrope")]


def rope_fields(family: str, kind: str, longest: int = 2 * BOUND) -> dict[str, Any]:
    """Fields of the model's config; ``longest`` is its ``max_position_embeddings``, at which ``dynamic`` begins.

    gemma3 has its own frequencies for each kind of layer.
    """
    own: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, **copy.deepcopy(ROPES[kind])}
    if family == "gemma3":
        own = {"full_attention": own, "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}
    more: dict[str, Any] = {"original_max_position_embeddings": BOUND} if family == "phi3" else {}
    return {"rope_parameters": own, "max_position_embeddings": BOUND if kind == "dynamic" else longest, **more}
