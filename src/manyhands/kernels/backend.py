"""Whether an operation runs in Triton or in torch, and why not in Triton; what a device is. Knows no operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from manyhands.core.machine import GpuArchitecture


def architecture_of(device: torch.device) -> GpuArchitecture | None:
    """None for what is no GPU. All that kernels need to know of a GPU is asked here, and nowhere of torch."""
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        name = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")  # gfx942:sramecc+:xnack-
        return GpuArchitecture("amd", gfx=name.split(":")[0])
    return GpuArchitecture("nvidia", torch.cuda.get_device_capability(device))


@dataclass(frozen=True)
class Backend:
    """What runs, and why not a faster one."""

    name: str
    reason: str = ""


def triton_or(fallback: str, device: torch.device, module: str, find_fault: Callable[[ModuleType], str]) -> Backend:
    """Triton where ``manyhands.kernels.<module>`` can be imported and passes its test on ``device``, else ``fallback``,
    with the reason.

    ``find_fault`` gets the module and says what is wrong with its results; nothing where nothing is.
    """
    if device.type != "cuda":
        return Backend(fallback, f"the device is {device.type}")
    try:
        kernels = import_module(f"manyhands.kernels.{module}")
    except ImportError as error:
        return Backend(fallback, f"Triton cannot be imported: {error}")
    try:
        fault = find_fault(kernels)
    except Exception as error:  # a compiler that fails has many ways to say so
        return Backend(fallback, f"Triton failed on this device: {type(error).__name__}: {str(error)[:200]}")
    return Backend(fallback, f"Triton {fault}") if fault else Backend("triton")


def beyond_bound(worst: float) -> str:
    """The fault of a deviation from the reference, as a multiple of what is allowed; nothing below 1."""
    return "" if worst < 1.0 else f"missed the comparison with the reference by {worst:.1f} times its bound"
