"""What a checkpoint holds, as one flat dict of tensors under the Hugging Face model's own parameter names. Knows no
files.

``model.NAME`` is a trained parameter; ``optim.KEY.NAME`` its optimizer state (``exp_avg``, ``exp_avg_sq``, and ``step``
of shape (1,)). Frozen parameters are not saved: the model's source has them. The tensors are in the form that torch's
distributed checkpoint (DCP) takes: plain tensors and DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from manyhands.checkpoint.manifest import TensorEntry
from manyhands.core.holding import reshard
from manyhands.core.progress import advance

MODEL, OPTIMIZER, STEP = "model.", "optim.", "step"


@runtime_checkable
class MakesState(Protocol):
    """An optimizer whose states are not all of their parameter's shape: it makes them itself."""

    def create_state(self, parameter: torch.Tensor) -> None:
        """Puts zeros into ``state[parameter]``."""
        ...


@runtime_checkable
class ConvertsState(Protocol):
    """An optimizer some of whose states have shapes of their own in each layout, and that can take up another's."""

    def converts(self, parameter: torch.Tensor, key: str, shape: tuple[int, ...]) -> bool:
        """Whether it can take the state ``key`` as it was saved, in this shape."""
        ...

    def convert_state(self, parameter: torch.Tensor, saved: Mapping[str, torch.Tensor]) -> None:
        """Takes those whose shapes differ, by key and in full, once all others are loaded. No communication."""
        ...


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are trained, by name; a tied one once, under its first name. Those of FSDP2 as shards."""
    reshard(model)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def checkpoint_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name. ValueError for a nameless parameter."""
    trained = trained_parameters(model)
    tensors = {MODEL + name: _saved_form(parameter) for name, parameter in trained.items()}
    if optimizer is None:
        return tensors
    known = {id(parameter) for parameter in trained.values()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer holds a parameter that is not a trained parameter of the model")
    for name, parameter in trained.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"optimizer state {key} of {name} is no tensor: {type(value).__name__}")
            tensors[f"{OPTIMIZER}{key}.{name}"] = _saved_form(value)
    return tensors


def create_optimizer_state(
    optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter], entries: dict[str, TensorEntry]
) -> None:
    """Replaces optimizer states by zeros of their parameters' layout and (but for ``MakesState``) the saved dtypes."""
    optimizer.state.clear()
    place = getattr(optimizer, "state_options", {})  # states kept in host memory are made there
    if isinstance(optimizer, MakesState):
        held = {
            full_name.removeprefix(OPTIMIZER).partition(".")[2]
            for full_name in entries
            if full_name.startswith(OPTIMIZER)
        }
        for name, parameter in trained.items():
            if name in held:
                optimizer.create_state(parameter)
        return
    scalar_on_device = {
        id(p): bool(g.get("fused") or g.get("capturable")) for g in optimizer.param_groups for p in g["params"]
    }
    for full_name, entry in entries.items():
        if not full_name.startswith(OPTIMIZER):
            continue
        key, _, name = full_name.removeprefix(OPTIMIZER).partition(".")
        parameter, dtype = trained[name], getattr(torch, entry.dtype)
        if key == STEP:  # torch keeps it on the CPU unless a fused kernel reads it
            device = parameter.device if scalar_on_device[id(parameter)] else torch.device("cpu")
            value: Any = torch.zeros((), dtype=dtype, device=device)
        else:
            value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False, **place)
        optimizer.state[parameter][key] = value


def describe(tensors: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
    """Global (not local) shapes and dtypes."""
    return {
        name: TensorEntry(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for name, t in tensors.items()
    }


def _saved_form(tensor: torch.Tensor) -> torch.Tensor:
    """Detached; a scalar as shape (1,), which slices like everything else. Shares the memory."""
    tensor = tensor.detach() if tensor.requires_grad else tensor  # of a DTensor it takes longer than all else here
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


class LoadPlanner(DefaultLoadPlanner):
    """torch's own, reporting progress at each tensor."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        advance()
