"""Whether an operation runs in Triton or in torch, and why not in Triton; what a device is; what tests of kernels have
found. Knows no operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, TypeVar

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


class Choice(Protocol):
    """Which of several kernels runs, and why not a faster one."""

    @property
    def name(self) -> str: ...
    @property
    def reason(self) -> str: ...


C = TypeVar("C", bound=Choice)
_FOUND: dict[str, list[str]] = {}  # name and reason, by function and arguments
_OFFERED: dict[str, list[str]] = {}  # by an earlier process


def cached_choice(kind: Callable[[str, str], C]) -> Callable[[Callable[..., C]], Callable[..., C]]:
    """For a function that tests kernels on a device: once for its arguments in this process, and not where an earlier
    process has (``adopt_choices``). ``kind`` makes a choice of a name and a reason.
    """

    def decorate(choose: Callable[..., C]) -> Callable[..., C]:
        @wraps(choose)
        def chosen(*arguments: Any) -> C:
            key = f"{choose.__module__}.{choose.__qualname__}{arguments}"
            if key not in _FOUND:
                found = choose(*arguments)
                _FOUND[key] = [found.name, found.reason]
            return kind(*_FOUND[key])

        return chosen

    return decorate


def list_choices() -> dict[str, list[str]]:
    """What this process has found so far, as JSON takes it."""
    return dict(_FOUND)


def offer_choices(found: Mapping[str, list[str]]) -> None:
    """What another process has found, for ``adopt_choices``."""
    _OFFERED.update(found)


def adopt_choices() -> None:
    """Takes over what was offered: it was found on the same device, by the same versions with the same settings."""
    for key, (name, reason) in _OFFERED.items():
        _FOUND.setdefault(key, [name, reason])


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
