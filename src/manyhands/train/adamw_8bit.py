"""AdamW with the kernels of bitsandbytes: states in 8 bits by blocks, or in memory that the driver may move to the
host.

bitsandbytes' own classes do not know shards, so its kernels are called here on each rank's part. Moments in 8 bits
(Dettmers et al. 2021, https://arxiv.org/abs/2110.02861) have one scale for each 256 values of that part: where blocks
of a part are blocks of the full tensor, any number of ranks loads what another saved bit for bit; elsewhere moments are
quantized again (``blocks_8bit.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from manyhands.core.errors import UserError
from manyhands.core.holding import first_index, local, shard_like
from manyhands.train.blocks_8bit import blocks_in, create_scales, requantize

MIN_QUANTIZED = 4096  # smaller parameters keep float32 moments, as do vectors (norms)
MIN_PAGED = 100_000  # smaller ones stay on the device
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE = "_scale"  # of the blocks of a moment, after its name


def check_blockwise(name: str, parameters: Iterable[torch.Tensor]) -> None:
    """UserError where bitsandbytes is missing, or has no kernel for the parameters' device or dtype."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"optimizer.name: {name} needs bitsandbytes",
            where="optimizer.name",
            why=str(error),
            fix="pip install 'manyhands[qlora]', or use optimizer.name=adamw",
        ) from error
    for parameter in parameters:
        if parameter.device.type != "cuda" or parameter.dtype == torch.float64:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UserError(
                f"optimizer.name: {name} does not run on {parameter.device.type} in {dtype}",
                where="optimizer.name",
                why="bitsandbytes has 8-bit and paged optimizers for GPUs only, and for weights of at most 32 bits",
                fix="use optimizer.name=adamw, adafactor or muon",
            )


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
