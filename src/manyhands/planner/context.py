"""Context parallelism, ``parallel.context_degree``: what a divided sample cannot be yet is refused by name. Pure."""

from __future__ import annotations

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.types import Facts
from manyhands.planner.types import Reason, reason

KEY = "parallel.context_degree"


def check_context(config: RunConfig, facts: Facts, world_size: int, shard_degree: int) -> tuple[Reason, ...]:
    """The reason that a plan shows, if packs are divided. ``config`` is resolved. UserError where they cannot be."""
    degree, model = config.parallel.context_degree, facts.model
    if degree == 1:
        return ()
    number = shard_degree if config.parallel.strategy == "hsdp" and world_size % degree == 0 else world_size
    what = "of the run" if number == world_size else "that hold a copy"
    obstacles = {
        f"it does not divide the ranks {what}, {number}": number % degree > 0,
        f"only packs are divided, and {model.model_type} does not pack ({model.packing_reason})": (
            not config.data.packing
        ),
        f"{model.model_type} has layers that carry a state along the sample, which ranks would hand on to each other: "
        "that is not built": model.num_mixer_layers > 0,
        f"{model.model_type} reads images, and a rank's part of a sample may begin in one: that is not built": (
            model.is_multimodal
        ),
    }
    for why, applies in obstacles.items():
        if applies:
            fix = f"set {KEY} to a divisor of {number}" if number % degree else f"remove {KEY}"
            raise UserError(f"{KEY}: {degree} cannot be carried out", where=KEY, why=why, fix=fix)
    return (reason("context", degree=degree, groups=world_size // degree),)
