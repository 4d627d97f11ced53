"""Checkpoints of DeepSpeed's partitions in the format of every other layout: the same names, shapes, dtypes and files.

A checkpoint holds parts by rows, and DeepSpeed's pieces are cut anywhere. So each parameter and each of its states is
gathered on its own and handed on as the rows that FSDP2 would give this rank, in host memory; loading reads each rank's
pieces out of whichever rows they lie in. Nothing of DeepSpeed's own checkpoints, which are pickles, is written or read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.checkpoint.load import open_checkpoint
from manyhands.checkpoint.save import save_checkpoint
from manyhands.checkpoint.shards import ShardReader
from manyhands.checkpoint.tensors import MODEL, OPTIMIZER, STEP
from manyhands.core.collective_errors import run_on_all_ranks
from manyhands.core.holding import RowShards, full_shape
from manyhands.core.progress import advance
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
    """Reads what any layout has saved into masters and optimizer states, each rank its own pieces; returns the saved
    state. Collective.
    """
    parameters = trained(model)
    wanted = {name: nn.Parameter(torch.empty(full_shape(p), device="meta")) for name, p in parameters.items()}
    state = open_checkpoint(folder, wanted, STATES, is_checked=is_checked)
    reader = ShardReader(folder)
    create_states(zero, reader.read(f"{OPTIMIZER}{STEP}.{next(iter(parameters))}", 0, 1) if state.has_states else None)
    for name, parameter in parameters.items():
        _read(reader, MODEL + name, fragment(parameter))
        for key in STATES if state.has_states else ():
            _read(reader, f"{OPTIMIZER}{key}.{name}", fragment(parameter, key, zero.optimizer))
        advance()
    run_on_all_ranks(lambda: None)  # nobody goes on, and fails, before all have read
    return state.saved


def create_states(zero: Any, step: torch.Tensor | None) -> None:
    """Zeros for each of DeepSpeed's partitions; none where nothing was saved."""
    states = zero.optimizer.state
    states.clear()
    for flat, group in masters(zero) if step is not None else ():
        assert step is not None
        place = flat.device if group.get("fused") else torch.device("cpu")
        states[flat] = {key: torch.zeros_like(flat, requires_grad=False) for key in STATES}
        states[flat][STEP] = step.detach().reshape(()).to(place, torch.float32, copy=True)


def _read(reader: ShardReader, name: str, piece: tuple[torch.Tensor, int]) -> None:
    target, start = piece
    target.copy_(reader.read(name, start, target.numel()))
