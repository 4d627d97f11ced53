"""AdamW in one pass: gradient, moments and weight are read once, and what computes the next step is written beside
them.

A kernel, of one parameter or of many small ones, reads weight, moments and gradient, scales the gradient by the factor
that clips it, and writes weight, moments and, where float32 weights have one, the bfloat16 copy that computes. In
float32 with a gradient in bfloat16 that moves 28 bytes a weight, where clipping, AdamW and a cast apart move 42. Knows
no model, no ranks and no run.

Weights in bfloat16 are rounded stochastically: an update of less than half the distance of two neighbors, as most are,
would vanish otherwise. So is the second moment, which moves by a thousandth a step. The random bits follow from (seed,
parameter, step, index of the element) alone, so they are the same in every layout of ranks, and on CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from manyhands.core.holding import local
from manyhands.kernels.adamw.reference import AdamWTensors, Rates, Update, make_key, make_rows, one_by_one
from manyhands.kernels.adamw.select import find_update, find_update_all
from manyhands.kernels.adamw.streamed import StreamedUpdate


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW with another kernel: the same groups, the same states under the same names, the same arithmetic in
    float32.

    ``gradient_factor``, 0-d float32 on the device, is what the next step multiplies gradients by while it reads them;
    it is forgotten afterwards. ``copies`` maps a weight to its copy for computing, ``written`` is told when all are.
    Gradients may be narrower than their weights (``grad_dtype``). Weights in bfloat16 have states in bfloat16; ``seed``
    is that of their rounding and ``first_index`` says where this rank's part begins in the whole, counted in elements.
    ``stream_to``: states are made in host memory, and what is there is updated on this device (``StreamedUpdate``).
    """

    def __init__(
        self,
        groups: Any,
        *,
        backend: str,
        copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
        written: Callable[[], None] = lambda: None,
        seed: int = 0,
        first_index: Callable[[torch.Tensor], int] = lambda _: 0,
        stream_to: torch.device | None = None,
        **options: Any,
    ) -> None:
        super().__init__(groups, fused=True, **options)
        self.gradient_factor: torch.Tensor | None = None
        self._copies, self._written = copies or {}, written
        self._update: Update = find_update(backend)
        self._streamed = None if stream_to is None else StreamedUpdate(self._update, stream_to)
        self._update_all = find_update_all(backend) if self._streamed is None else one_by_one(self._streamed)
        self._device = stream_to
        self._keys: dict[torch.Tensor, torch.Tensor] = {}
        self._ahead: dict[torch.Tensor, tuple[Rates, torch.Tensor]] = {}  # for ``update``
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            if parameter.dtype == torch.bfloat16:
                key = make_key(seed, index, first_index(parameter))
                self._keys[parameter] = torch.tensor(key, dtype=torch.int32, device=parameter.device)

    @property
    def state_options(self) -> dict[str, Any]:
        """How states are made, also those that a checkpoint loads into."""
        if self._device is None:
            return {}
        return {"device": torch.device("cpu"), "pin_memory": self._device.type == "cuda"}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Waits for nothing but what is streamed."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step_group(group, parameters)
        self.gradient_factor = None
        if self._streamed is not None:
            self._streamed.finish()
        self._written()

    @torch.no_grad()
    def prepare_updates(self) -> None:
        """Computes what ``update`` needs, from the groups' present learning rates. Once, before a step's first
        ``update``.
        """
        self._ahead = {}
        for group in self.param_groups:
            parameters: list[torch.Tensor] = group["params"]
            counts = torch.stack([self._state_of(parameter)["step"] for parameter in parameters])
            rates, rows = self._rates_of(group, counts + 1)
            self._ahead |= {one: (rates, row) for one, row in zip(parameters, rows.unbind(0), strict=True)}

    @torch.no_grad()
    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Updates one parameter on the current stream. ``gradient`` has as many elements as this rank holds of it. The
        parameter has no ``grad``, so ``step``, which must still follow, skips it.
        """
        rates, row = self._ahead.pop(parameter)
        self.state[parameter]["step"] += 1
        part = self._part_of(parameter, gradient, row)
        if part.weight.numel():
            (self._streamed or self._update)(part, rates, self.gradient_factor)

    def _step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        counts = [self._state_of(parameter)["step"] for parameter in parameters]
        torch._foreach_add_(counts, 1)
        rates, rows = self._rates_of(group, torch.stack(counts))
        parts = []
        for parameter, row in zip(parameters, rows.unbind(0), strict=True):
            assert parameter.grad is not None
            parts.append(self._part_of(parameter, local(parameter.grad), row))
        self._update_all([part for part in parts if part.weight.numel()], rates, self.gradient_factor)

    def _rates_of(self, group: dict[str, Any], counts: torch.Tensor) -> tuple[Rates, torch.Tensor]:
        """What the group's parameters share, and the row of each, whose update is its ``counts``-th."""
        # Rounded first, as torch's kernel does: what a moment keeps and what it takes up then add up to 1 in float32
        # too.
        (beta1, beta2), lr = torch.tensor(group["betas"], dtype=torch.float32).tolist(), group["lr"]
        rows = make_rows(counts, lr, beta1, beta2)
        rates = Rates(beta1, beta2, group["eps"], lr * group["weight_decay"])
        return rates, rows if self._device is None else rows.to(self._device)

    def _part_of(self, parameter: torch.Tensor, gradient: torch.Tensor, row: torch.Tensor) -> AdamWTensors:
        state, copy = self.state[parameter], self._copies.get(parameter)
        return AdamWTensors(
            weight=_flat(parameter),
            gradient=gradient.reshape(-1),
            exp_avg=_flat(state["exp_avg"]),
            exp_avg_sq=_flat(state["exp_avg_sq"]),
            row=row,
            copy=None if copy is None else _flat(copy),
            key=self._keys.get(parameter),
        )

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, requires_grad=False, **self.state_options)
        return state


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements as one row that shares their memory; RuntimeError where they do not lie side by side."""
    return local(tensor).view(-1)
