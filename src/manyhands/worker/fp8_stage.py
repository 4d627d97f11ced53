"""Linear layers in fp8, at the three places of a rank's start: before adapters, with the weights there, before the
first step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from manyhands.convert.fp8 import code_frozen, use_fp8
from manyhands.convert.fp8_check import check_fp8
from manyhands.core.errors import UserError
from manyhands.data.batches import collate
from manyhands.data.collate import Shape
from manyhands.kernels.fp8 import MIN_CAPABILITY, describe, has_products
from manyhands.kernels.modules import fuse_lora
from manyhands.worker.loading import shape_of
from manyhands.worker.rank import Rank

GATE_TOKENS = 2048  # of the micro-batch that is computed both ways, uncompiled; one row at least


def begin_fp8(rank: Rank, model: Any) -> None:
    """Layers that can compute in fp8, on the meta model; how they do, and what stays plain, is said."""
    device = rank.world.device
    if device.type == "cuda" and not has_products(device):
        raise UserError(
            f"{torch.cuda.get_device_name(device)} does not multiply in fp8 with a scale a row",
            where="kernels.linear: fp8",
            why=f"torch._scaled_mm failed its test; it needs compute capability {'.'.join(map(str, MIN_CAPABILITY))} and a new cuBLAS",
            fix="set kernels.linear: compute_dtype",
        )
    swapped, left = use_fp8(model)
    beside = f"; {len(left)} stay plain, as their sides are no multiples of 16" if left else ""
    rank.say(f"linear: {len(swapped)} layers in fp8 while training, {describe(device)}{beside}")


def fuse_trained(rank: Rank, model: Any) -> None:
    """Layers on one input share its codes in known modules, where nothing is adapted; what stays as it is, is said."""
    rank.say(f"linear: {fuse_lora(model)}")


def code_weights_once(rank: Rank) -> None:
    """Frozen whole weights, now that they are loaded."""
    if num_bytes := code_frozen(rank.model):
        rank.say(f"linear: frozen weights coded once, {num_bytes / 2**30:.1f} GiB beside them")


def check_products(rank: Rank) -> None:
    """The gate: loss and gradients of a real micro-batch, with products in fp8 and plain ones."""
    found = check_fp8(rank.parallel, rank.model, _gate_batch(rank), rank.config.seed)
    rank.say(f"linear: {found}")
    rank.measured |= {"fp8_loss_deviation": found.loss, "fp8_gradient_deviation": found.gradient}


def _gate_batch(rank: Rank) -> dict[str, Any]:
    """This rank's rows of the first step, the shortest first, up to ``GATE_TOKENS``; where ranks outnumber rows they
    share.
    """
    rows, world = rank.order.rows(0, 0), rank.world
    mine = rows[world.rank % len(rows) :: world.world_size]
    mine = mine[np.argsort(rank.store.train.lengths[mine], kind="stable")]
    count = int(np.searchsorted(np.cumsum(rank.store.train.lengths[mine]), GATE_TOKENS, side="right"))
    batch = collate(rank.store.train, mine[: max(1, count)], Shape(packed=rank.plan.packing, tile=shape_of(rank).tile))
    return {name: value.to(world.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
