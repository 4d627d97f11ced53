"""What a factory of the registry is given, and the factory of AdamW."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Group = dict[str, Any]  # "params": pairs of name and parameter; "lr", "weight_decay", "is_matrix"
MakeAdamW = Callable[..., torch.optim.Optimizer]  # of groups, with lr, betas and eps
TORCHS_ADAMW: MakeAdamW = partial(torch.optim.AdamW, fused=True)


@dataclass(frozen=True)
class Options:
    """``blocks``: names of the decoder's blocks. ``compute_dtype``: in which the model computes. ``adamw``: torch's
    fused AdamW, or an engine's kernel.
    """

    learning_rate: float  # peak
    betas: tuple[float, float]
    eps: float
    blocks: Collection[str] = ()
    compute_dtype: torch.dtype = torch.float32
    adamw: MakeAdamW = TORCHS_ADAMW


def make_adamw(groups: list[Group], options: Options) -> torch.optim.Optimizer:
    return options.adamw(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps)
