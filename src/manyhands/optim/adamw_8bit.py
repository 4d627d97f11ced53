"""AdamW with the kernels of bitsandbytes: states in 8 bits by blocks, or in memory that the driver may move to the
host.

bitsandbytes' own classes do not know shards, so its kernels are called here on each rank's part. Moments in 8 bits
(Dettmers et al. 2021, https://arxiv.org/abs/2110.02861) have one scale for each 256 values of that part: a rank
quantizes its own part, so blocks begin at its first value. Where two layouts cut alike, and where blocks of a part are
blocks of the full tensor, any number of ranks loads what another saved bit for bit. Elsewhere a moment is dequantized
by the blocks it was saved in and quantized again by those of this layout: an error of at most half the widest step
between two levels, times the new block's largest value (0.71 % of it for the first moment, 0.36 % for the second).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.core.holding import first_index, local, num_shards, shard_like
from manyhands.core.limits import BLOCK_VALUES_8BIT as BLOCK
from manyhands.optim.options import Group, Options

MIN_QUANTIZED = 4096  # smaller parameters keep float32 moments, as do vectors (norms)
MIN_PAGED = 100_000  # smaller ones stay on the device
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE = "_scale"  # of the blocks of a moment, after its name
CHUNK_VALUES = 2**14 * BLOCK  # requantized at once


def make_blockwise(groups: list[Group], options: Options, *, bits: int, paged: bool = False) -> BlockwiseAdamW:
    """``bits`` are those of matrices; embeddings and vectors keep float32 moments."""
    for group in groups:
        group["bits"] = bits if group["is_matrix"] else 32
    return BlockwiseAdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, paged=paged)


class BlockwiseAdamW(torch.optim.Optimizer):
    """``bits`` of a group (8 or 32) is how its moments are kept. ``paged``: large ones are in managed memory."""

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, paged: bool = False
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "bits": 32})
        self._paged = paged
        self._levels: dict[torch.device, dict[str, torch.Tensor]] = {}  # values of the 256 quantization levels
        # The kernels know managed memory by an attribute that views lose, so the tensors themselves are kept beside the
        # state.
        self._moments: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def create_state(self, parameter: torch.Tensor) -> None:
        """Zeros: ``step`` (), two moments of the parameter's shape in float32 or uint8, and with uint8 the blocks'
        scales.
        """
        state, part = self.state[parameter], local(parameter)
        quantized = self._bits_of(parameter) == 8 and parameter.ndim > 1 and parameter.numel() >= MIN_QUANTIZED
        state["step"] = torch.zeros((), dtype=torch.float32)
        self._moments[parameter] = {}
        for moment in MOMENTS:
            self._moments[parameter][moment] = self._allocate(part, torch.uint8 if quantized else torch.float32)
            state[moment] = shard_like(self._moments[parameter][moment], parameter, parameter.shape)
            if quantized:
                state[moment + SCALE] = create_scales(parameter)

    def converts(self, parameter: torch.Tensor, key: str, shape: tuple[int, ...]) -> bool:
        """Whether ``convert_state`` takes the state ``key`` in this shape: scales of the blocks of other shards."""
        return key.endswith(SCALE) and blocks_in(parameter, shape) is not None

    @torch.no_grad()
    def convert_state(self, parameter: torch.Tensor, saved: Mapping[str, torch.Tensor]) -> None:
        """Quantizes moments again that were loaded as codes of the blocks whose scales are ``saved``, by key and in
        full.
        """
        state, levels = self.state[parameter], list(self._levels_on(parameter.device).values())
        for moment, its_levels in zip(MOMENTS, levels, strict=True):
            scales = saved[moment + SCALE]
            blocks = blocks_in(parameter, scales.shape)
            assert blocks is not None, "converts comes first"
            requantize(
                local(state[moment]).view(-1),
                first_index(parameter),
                local(state[moment + SCALE]).view(-1),
                blocks,
                scales.to(parameter.device).view(-1),
                its_levels,
            )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        stepped = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, group in stepped:
            if not self.state[parameter]:
                self.create_state(parameter)
            self.state[parameter]["step"] += 1
            if local(parameter).numel():
                self._update(parameter, group)
        if self._paged and self._moments and next(iter(self._moments)).device.type == "cuda":
            # pages are moved by themselves: their state must be settled before anybody reads it
            torch.cuda.synchronize()

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        import bitsandbytes.functional as kernels

        state, moments, weight = self.state[parameter], self._moments[parameter], local(parameter)
        assert parameter.grad is not None
        for moment in moments.values():
            if getattr(moment, "is_paged", False):
                kernels.prefetch_tensor(moment)
        shared = {
            "optimizer_name": "adam",  # theirs decouples the decay
            "g": local(parameter.grad).contiguous(),
            "p": weight,
            "state1": moments["exp_avg"],
            "state2": moments["exp_avg_sq"],
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"],
            "step": int(state["step"].item()),  # on the CPU
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
        }
        if "exp_avg" + SCALE not in state:
            kernels.optimizer_update_32bit(**shared)
            return
        levels = self._levels_on(weight.device)
        scales = {
            f"absmax{number}": local(state[moment + SCALE]).view(-1) for number, moment in enumerate(MOMENTS, start=1)
        }
        kernels.optimizer_update_8bit_blockwise(**shared, **scales, **levels, beta3=0.0, alpha=0.0)

    def _bits_of(self, parameter: torch.Tensor) -> int:
        return next(group["bits"] for group in self.param_groups if any(parameter is p for p in group["params"]))

    def _allocate(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self._paged or part.device.type != "cuda" or part.numel() < MIN_PAGED:
            return torch.zeros_like(part, dtype=dtype, requires_grad=False)
        import bitsandbytes.functional as kernels

        paged = kernels.get_paged(*part.shape, dtype=dtype, device=part.device)
        kernels.fill(paged, 0)
        return paged

    def _levels_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        import bitsandbytes.functional as kernels

        if device not in self._levels:
            maps = {"qmap1": kernels.create_dynamic_map(signed=True), "qmap2": kernels.create_dynamic_map(signed=False)}
            self._levels[device] = {name: code.to(device) for name, code in maps.items()}
        return self._levels[device]


@dataclass(frozen=True)
class Blocks:
    """Of a flat tensor of ``num_values``: every ``cut`` values a new block begins, and between these every 256."""

    num_values: int
    cut: int

    @property
    def per_cut(self) -> int:
        return math.ceil(self.cut / BLOCK)

    def index_of(self, positions: torch.Tensor) -> torch.Tensor:
        """The block of each position, counted as the scales are kept."""
        return positions // self.cut * self.per_cut + positions % self.cut // BLOCK

    def spans_of(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the block of each position begins and ends."""
        start = positions // self.cut * self.cut
        begin = start + (positions - start) // BLOCK * BLOCK
        return begin, torch.minimum(begin + BLOCK, start + self.cut).clamp(max=self.num_values)


def create_scales(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros for the scales of a moment's blocks, in a shape that is equal in two layouts only if their blocks are.

    ===================================  ==============================  ======================================
    columns are full blocks              (rows, columns / 256)           cut as the parameter, in any layout
    shards are equal and full blocks     (blocks)                        the same in every such layout
    otherwise                            (shards, blocks of the first)   of this number of shards alone
    ===================================  ==============================  ======================================
    """
    part, rows, shards = local(parameter), parameter.shape[0], num_shards(parameter)
    columns = parameter.numel() // rows
    if columns % BLOCK == 0:
        return shard_like(_zeros(part, part.shape[0], columns // BLOCK), parameter, (rows, columns // BLOCK))
    if shards == 1 or (rows % shards == 0 and part.numel() % BLOCK == 0):
        num_blocks = math.ceil(parameter.numel() / BLOCK)
        return shard_like(_zeros(part, num_blocks // shards), parameter, (num_blocks,))
    num_blocks = math.ceil(math.ceil(rows / shards) * columns / BLOCK)
    return shard_like(_zeros(part, 1, num_blocks), parameter, (shards, num_blocks))


def blocks_in(parameter: torch.Tensor, shape: Sequence[int]) -> Blocks | None:
    """The blocks whose scales have this shape; None if it is none of ``create_scales``."""
    num_values, rows = parameter.numel(), parameter.shape[0]
    columns = num_values // rows
    whole = Blocks(num_values, math.ceil(num_values / BLOCK) * BLOCK)
    if columns % BLOCK == 0:
        return whole if tuple(shape) == (rows, columns // BLOCK) else None
    if tuple(shape) == (whole.per_cut,):
        return whole
    if len(shape) != 2 or not shape[0]:
        return None
    cut = Blocks(num_values, math.ceil(rows / shape[0]) * columns)
    return cut if cut.per_cut == shape[1] else None


def requantize(
    codes: torch.Tensor,
    first: int,
    scales: torch.Tensor,
    saved: Blocks,
    saved_scales: torch.Tensor,
    levels: torch.Tensor,
) -> None:
    """Moves a moment, in place, into the blocks of this rank's part, which begin at its first value.

    ``codes`` (n): this rank's, as saved; ``first``: where they begin in the full tensor; ``scales``: of this rank's
    blocks, to be written; ``saved_scales``: of the full tensor in the blocks ``saved``; ``levels`` (256), ascending.
    A block that lies where a saved one did keeps its codes and its scale. A second moment that is not zero stays so,
    as it is divided by.
    """
    middle = (levels[:-1] + levels[1:]) / 2
    smallest = int((levels == 0).nonzero()[0]) + 1 if levels[0] == 0 else 0
    for begin in range(0, len(codes), CHUNK_VALUES):
        old = codes[begin : begin + CHUNK_VALUES]
        places = torch.arange(first + begin, first + begin + len(old), device=codes.device)
        values = levels[old.long()] * saved_scales[saved.index_of(places)]
        by_block = torch.nn.functional.pad(values, (0, -len(old) % BLOCK)).view(-1, BLOCK)
        largest = by_block.abs().amax(1)
        relative = by_block / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        new = torch.bucketize(relative, middle)
        if smallest:
            new = torch.where(by_block > 0, new.clamp(min=smallest), new)
        starts, ends = places[::BLOCK], (places[::BLOCK] + BLOCK).clamp(max=first + begin + len(old))
        saved_starts, saved_ends = saved.spans_of(starts)
        keeps = (starts == saved_starts) & (ends == saved_ends)
        kept = keeps[:, None].expand_as(new).reshape(-1)[: len(old)]
        old.copy_(torch.where(kept, old, new.to(torch.uint8).reshape(-1)[: len(old)]))
        scales[begin // BLOCK :][: len(starts)] = torch.where(keeps, saved_scales[saved.index_of(starts)], largest)


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)
