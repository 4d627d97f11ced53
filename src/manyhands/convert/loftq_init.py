"""LoftQ's decompositions, distributed over ranks: one rank decomposes a weight, and all ranks take their parts of it.

So no rank holds more than one full weight, and the result depends neither on the number of ranks nor on what is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from manyhands.config.schema import RunConfig
from manyhands.convert.loftq import best_low_rank, nf4_adapters, quantization_error, set_lora_weights, weight_reader
from manyhands.convert.lora import LoraNf4Linear
from manyhands.convert.protocol import BaseConverter, Context
from manyhands.core.collective_errors import this_rank
from manyhands.core.holding import gather
from manyhands.core.progress import advance
from manyhands.core.seeds import named_generator
from manyhands.plan.types import Plan


@torch.no_grad()
def initialize_with_loftq(model: Any, plan: Plan, config: RunConfig, device: torch.device) -> float:
    """Initialize LoRA A and B beside every weight in NF4 as ``convert/loftq.py`` does; returns the share of the squared
    quantization error that they make up for.

    ``model`` is the transformers model, filled, its parameters sharded or not. All ranks must call it. In each round
    every rank has one weight: its NF4 codes are gathered, so the values are the stored ones; the file is read by this
    rank alone, computed on ``device``; and A and B are sent to all in float32.
    """
    rank, world_size = this_rank()
    layers, weight_of = list(nf4_adapters(model).items()), weight_reader(model, plan, config)
    whole = rest = 0.0
    for begin in range(0, len(layers), world_size):
        batch = layers[begin : begin + world_size]
        own: torch.Tensor | None = None
        pieces = None
        for index, (_, layer) in enumerate(batch):
            gathered = gather(layer.weight_codes), gather(layer.weight_statistics)
            pieces = gathered if index == rank else pieces
        if pieces is not None:
            name, layer = batch[rank]
            error = quantization_error(layer, *pieces, weight_of(name), device)
            found = best_low_rank(error, layer.lora_A.out_features, named_generator(config.seed, f"{name}.loftq"))
            own = torch.cat([part.reshape(-1) for part in found])
            del error, found
        for index, (_, layer) in enumerate(batch):
            whole_one, rest_one = _receive(layer, own if index == rank else None, index, device)
            whole, rest = whole + whole_one, rest + rest_one
        advance()
    return 1 - rest / whole if whole else 0.0


def _receive(layer: LoraNf4Linear, own: torch.Tensor | None, source: int, device: torch.device) -> tuple[float, float]:
    """Copy what rank ``source`` has computed into ``layer``; the two squared norms of ``LowRank``."""
    num_out, num_in = layer.out_features, layer.in_features
    size = min(layer.lora_A.out_features, num_out, num_in)
    sizes = [num_out * size, size * num_in, 1, 1]
    sent = torch.empty(sum(sizes), device=device) if own is None else own
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(sent, source)
    b, a, whole, rest = sent.split(sizes)
    set_lora_weights(layer, b.view(num_out, size), a.view(size, num_in))
    return whole.item(), rest.item()


class LoftQ(BaseConverter):
    """The first values of LoRA's A and B, for a run that begins; a resumed one has them in its checkpoint."""

    name = "loftq"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.share: float | None = None

    def after_load(self, model: Any) -> None:
        context = self.context
        if context.resumes:
            return
        self.share = initialize_with_loftq(model, context.plan, context.config, context.device)
        if context.device.type == "cuda":  # what training takes is measured from here
            torch.cuda.empty_cache()

    def describe(self) -> Sequence[str]:
        if self.share is None:
            return ()
        rank = self.context.config.method.rank
        return (
            f"adapters: LoftQ, rank {rank}: {self.share:.0%} of the squared quantization error of NF4 is made up for",
            "adapters: the adapter belongs to the weights in 4 bits; beside those in 16 bits, which have no such error, "
            "it would be wrong",
        )
