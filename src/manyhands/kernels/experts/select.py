"""Which kernels run around the grouped products of experts: Triton's for bfloat16 on a GPU where they pass a comparison
with the reference, else the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch

from manyhands.kernels.backend import Backend, beyond_bound, triton_or
from manyhands.kernels.experts import reference

MAX_RANK = 64  # of the kernels: above, the factors of a group fill a tile's registers
BOUND = 0.02  # of a result's largest value: bfloat16 products added in another order

# What ``use`` chose for the process: the operators are opaque to torch.compile and run inside activation checkpoints,
# where nothing but tensors arrives.
_kernels: ModuleType | None = None


def kernels_for(x: torch.Tensor, rank: int) -> ModuleType:
    """The module that computes with ``x`` and factors of ``rank``."""
    fits = _kernels is not None and x.is_cuda and x.dtype == torch.bfloat16 and rank <= MAX_RANK
    return _kernels if fits and _kernels is not None else reference


def use(backend: Backend) -> None:
    """From now on experts compute by ``backend`` on GPUs; without this, by the reference."""
    global _kernels
    _kernels = None
    if backend.name == "triton":
        from manyhands.kernels.experts import triton

        _kernels = triton


@cache
def choose_backend(device: torch.device) -> Backend:
    """Triton where it can be imported and agrees with the reference on ``device``, else the reference, with the
    reason.
    """
    return triton_or("plain torch", device, "experts.triton", lambda kernels: find_fault(kernels, device))


def describe(backend: Backend) -> str:
    """One line for the log."""
    return "gate and low-rank updates by Triton" if backend.name == "triton" else f"in plain torch ({backend.reason})"


def find_fault(kernels: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """What is wrong with the results of ``kernels``; nothing where they are the reference's."""
    worst = 0.0
    for found, wanted in _compare(kernels, device, dtype):
        largest = wanted.float().abs().max().clamp(min=1e-6)
        worst = max(worst, ((found.float() - wanted.float()).abs().max() / largest).item() / BOUND)
    return beyond_bound(worst)


def _compare(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each result beside that of the reference: groups with no row, with one, and with more than a tile."""
    generator = torch.Generator(device).manual_seed(0)
    counts = torch.tensor([0, 70, 1, 0, 1029, 3, 17], device=device)
    ends = counts.cumsum(0).int()
    num_rows, groups, width, inner = int(counts.sum()), len(counts), 200, 136

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    places = torch.randperm(num_rows, device=device, generator=generator)
    x, tokens = draw(90, width), torch.randint(90, (num_rows,), device=device, generator=generator)
    both, v, weights = draw(num_rows, 2 * inner), draw(num_rows, inner), draw(num_rows).float()
    for chosen in (None, weights.view(-1, 4)):
        yield kernels.combine(both, places, 4, chosen), reference.combine(both, places, 4, chosen)
    for rank, gate in ((16, "silu"), (8, "gelu_tanh"), (40, "gelu"), (16, "clamped")):
        a1, b1 = draw(groups, rank, width) / width**0.5, draw(groups, 2 * inner, rank) / rank**0.5
        a2, low, following = draw(groups, rank, inner) / inner**0.5, draw(num_rows, rank), draw(num_rows, rank)
        bias = draw(groups, 2 * inner) if gate == "clamped" else None
        calls: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
            ("gather_low", (x, tokens, ends, a1, 0.5), {}),
            ("gate_low", (both, low, b1, a2, bias, ends, 0.5, gate), {}),
            ("gate_low_backward", (both, low, b1, a2, bias, v, following, weights, ends, 0.5, gate), {}),
            ("gathered_outer", (x, tokens, low, ends), {"transposed": True}),
            ("gathered_outer", (x, tokens, low, ends), {"transposed": False}),
        )
        for name, arguments, options in calls:
            found, wanted = (getattr(module, name)(*arguments, **options) for module in (kernels, reference))
            yield from zip(*((out if isinstance(out, tuple) else (out,)) for out in (found, wanted)), strict=True)
        found, wanted = both.clone(), both.clone()
        for module, out in ((kernels, found), (reference, wanted)):
            module.add_low(out, low, b1.mT, ends)
        yield found, wanted
