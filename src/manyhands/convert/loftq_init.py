"""Share the work of LoftQ's factors among ranks: a weight is one rank's, and all ranks take their parts of what it
finds.

So no rank holds more than one weight whole, and the factors do not depend on how many ranks there are, nor on what is
sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from manyhands.config.schema import RunConfig
from manyhands.convert.loftq import best_low_rank, nf4_adapters, nf4_loss, put_factors, whole_weights
from manyhands.convert.lora import LoraNf4Linear
from manyhands.core.holding import gather
from manyhands.core.seeds import named_generator
from manyhands.core.world import World
from manyhands.plan.types import Plan


@torch.no_grad()
def begin_at_loss(model: Any, plan: Plan, config: RunConfig, world: World, beat: Callable[[], object]) -> float:
    """Fill the factors beside every weight in NF4 as ``convert/loftq.py`` says; returns the share of its squared error
    taken up.

    ``model`` is the transformers model, filled, its parameters sharded or not. All ranks must call it. In each round
    every rank has one weight: its codes are gathered, which makes the values the stored ones; the file is read by this
    rank alone; and the factors are sent to all in float32. ``beat`` is called after each round.
    """
    layers, weight_of = list(nf4_adapters(model).items()), whole_weights(model, plan, config)
    whole = rest = 0.0
    for begin in range(0, len(layers), world.world_size):
        together = layers[begin : begin + world.world_size]
        own: torch.Tensor | None = None
        pieces = None
        for index, (_, layer) in enumerate(together):
            gathered = gather(layer.weight_codes), gather(layer.weight_statistics)
            pieces = gathered if index == world.rank else pieces
        if pieces is not None:
            name, layer = together[world.rank]
            loss = nf4_loss(layer, *pieces, weight_of(name), world.device)
            found = best_low_rank(loss, layer.lora_A.out_features, named_generator(config.seed, f"{name}.loftq"))
            own = torch.cat([part.reshape(-1) for part in found])
            del loss, found
        for index, (_, layer) in enumerate(together):
            whole_one, rest_one = _receive(layer, own if index == world.rank else None, index, world)
            whole, rest = whole + whole_one, rest + rest_one
        beat()
    return 1 - rest / whole if whole else 0.0


def _receive(layer: LoraNf4Linear, own: torch.Tensor | None, source: int, world: World) -> tuple[float, float]:
    """Put the factors that rank ``source`` has found into ``layer``; the two squared norms of ``LowRank``."""
    num_out, num_in = layer.out_features, layer.in_features
    size = min(layer.lora_A.out_features, num_out, num_in)
    sizes = [num_out * size, size * num_in, 1, 1]
    sent = torch.empty(sum(sizes), device=world.device) if own is None else own
    if world.world_size > 1:
        dist.broadcast(sent, source)
    b, a, whole, rest = sent.split(sizes)
    put_factors(layer, b.view(num_out, size), a.view(size, num_in))
    return whole.item(), rest.item()
