"""Checkpoints of DeepSpeed's partitions in the format of every other layout: the same names, shapes, dtypes and files.

A checkpoint holds parts by rows, and DeepSpeed's pieces are cut anywhere. So each parameter and each of its states is
gathered on its own and handed on as the rows that FSDP2 would give this rank, in host memory; loading goes the other
way. Nothing of DeepSpeed's own checkpoints, which are pickles, is written or read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.checkpoint.load import load_checkpoint
from manyhands.checkpoint.save import save_checkpoint
from manyhands.checkpoint.tensors import STEP
from manyhands.core.holding import RowShards, full_shape, gather
from manyhands.core.world import World
from manyhands.engine.deepspeed_compat import fragment, masters
from manyhands.engine.zero_holding import gather_fragments

STATES = ("exp_avg", "exp_avg_sq")  # AdamW's, of the parameter's shape


class StagedModel(nn.Module):
    """Parameters by name, as ``checkpoint/tensors.py`` asks a model for them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.by_name = dict(parameters)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.by_name.items())


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name; a tied one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def find_step(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Updates done, which all partitions share; None before the first."""
    steps = [state[STEP] for state in optimizer.state.values() if STEP in state]
    return steps[0].detach().reshape(()).cpu() if steps else None


@torch.no_grad()
def save_fragments(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    world: World,
    *,
    manifest_extra: dict[str, Any] | None,
    progress: Callable[[int, int], None],
) -> None:
    """Writes masters and optimizer states as ``save_checkpoint`` does. Collective."""
    rows, step = RowShards(), find_step(optimizer)
    staged: dict[str, nn.Parameter] = {}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for name, parameter in trained(model).items():
        shape = full_shape(parameter)
        copy = staged[name] = nn.Parameter(rows.cut(gather_fragments(parameter, shape)))
        if step is not None:
            states[copy] = {STEP: step.clone()}
            states[copy] |= {key: rows.cut(gather_fragments(parameter, shape, key, optimizer)) for key in STATES}
    holder = torch.optim.AdamW(list(staged.values()))
    holder.state.update(states)
    save_checkpoint(
        folder,
        StagedModel(staged),
        holder,
        state,
        rank=world.rank,
        world_size=world.world_size,
        manifest_extra=manifest_extra,
        progress=progress,
    )


@torch.no_grad()
def load_fragments(
    folder: Path, model: nn.Module, zero: Any, world: World, *, is_checked: bool = False
) -> dict[str, Any]:
    """Reads what any layout has saved into masters and optimizer states; returns the saved state. Collective."""
    rows = RowShards()
    parameters = trained(model)
    staged = {name: nn.Parameter(rows.empty(full_shape(parameter))) for name, parameter in parameters.items()}
    holder = torch.optim.AdamW(list(staged.values()))
    state = load_checkpoint(folder, StagedModel(staged), holder, is_checked=is_checked)
    steps = [values[STEP] for values in holder.state.values()]
    create_states(zero, steps[0] if steps else None)
    for name, parameter in parameters.items():
        _take(fragment(parameter), staged[name])
        for key in STATES if steps else ():
            _take(fragment(parameter, key, zero.optimizer), holder.state[staged[name]][key])
    return state


def create_states(zero: Any, step: torch.Tensor | None) -> None:
    """Zeros for each of DeepSpeed's partitions; none where nothing was saved."""
    states = zero.optimizer.state
    states.clear()
    for flat, group in masters(zero) if step is not None else ():
        assert step is not None
        place = flat.device if group.get("fused") else torch.device("cpu")
        states[flat] = {key: torch.zeros_like(flat, requires_grad=False) for key in STATES}
        states[flat][STEP] = step.detach().reshape(()).to(place, torch.float32, copy=True)


def _take(piece: tuple[torch.Tensor, int], rows: torch.Tensor) -> None:
    """Copies this rank's piece out of a tensor that all ranks hold by rows."""
    target, start = piece
    full = gather(rows).reshape(-1)
    target.copy_(full[start : start + target.numel()])
