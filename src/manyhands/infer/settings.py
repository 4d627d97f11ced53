"""How answers are generated: lengths, sampling, where to stop. Torch-free, so that commands check their options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from manyhands.core.errors import UserError


@dataclass(frozen=True)
class GenerationSettings:
    """``temperature`` 0 is greedy; above it ``top_k`` (0: all tokens) and ``top_p``, in this order, choose what is
    sampled from. ``repetition_penalty`` divides positive and multiplies negative logits of tokens that the prompt or
    the answer has already. ``seed`` and the number of a prompt decide its random numbers, and nothing else: neither the
    batch nor the number of GPUs. An answer ends at an end token, before the first of the ``stop`` strings, or after
    ``max_new_tokens``. The sampling of a model's own ``generation_config.json`` is not used.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """UserError for a value that cannot be, or one that would have no effect."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)  # one text is not its characters
        object.__setattr__(self, "stop", stop)
        for name, is_fine, fault in (
            ("max-new-tokens", self.max_new_tokens >= 1, "must be at least 1"),
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "must be 0 or more"),
            ("top-p", 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            ("top-k", self.top_k >= 0, "must be 0 (all tokens) or more"),
            ("repetition-penalty", 0 < self.repetition_penalty < math.inf, "must be above 0"),
            ("seed", 0 <= self.seed < 2**63, "must be 0 or more, and below 2**63"),
            ("stop", all(self.stop), "must not be empty"),
        ):
            if not is_fine:
                raise UserError(f"{name} {fault}", where=f"--{name}")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise UserError(
                "top-p and top-k have no effect on greedy answers",
                where="--top-p" if self.top_p < 1 else "--top-k",
                why="the temperature is 0, so the most likely token is always taken",
                fix="add --temperature 1 to sample",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> GenerationSettings:
        known = {field.name for field in fields(GenerationSettings)}
        return GenerationSettings(**{name: value for name, value in values.items() if name in known})


SERVED = GenerationSettings(max_new_tokens=512)  # what `manyhands serve` does where neither command nor request says
