"""DeepSpeed's partitions: how parameters are held in them, flat pieces that begin and end anywhere, in a row or between
two; and their checkpoints in the format of every other layout: the same names, shapes, dtypes and files.

Of a parameter that is trained a rank's piece is that of its float32 master; the weights that compute are copies of the
masters, refreshed by every update. Stage 3 cuts frozen parameters alike. Stages 1 and 2 leave those whole: they are
plain tensors.

A checkpoint holds parts by rows, and DeepSpeed's pieces are cut anywhere. So each parameter and each of its states is
gathered on its own and handed on as the rows that FSDP2 would give this rank, in host memory; loading reads each rank's
pieces out of whichever rows they lie in. Nothing of DeepSpeed's own checkpoints, which are pickles, is written or read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from manyhands.checkpoint.load import open_checkpoint
from manyhands.checkpoint.shards import ShardReader
from manyhands.checkpoint.tensors import MODEL, OPTIMIZER, STEP
from manyhands.core.collective_errors import run_on_all_ranks
from manyhands.core.holding import Holding, RowShards, full_shape, register
from manyhands.core.progress import advance
from manyhands.engine.deepspeed_compat import fragment, is_master_sharded, is_sharded_weight, masters

STATES = ("exp_avg", "exp_avg_sq")  # AdamW's, of the parameter's shape


class ZeroFragments(Holding):
    """DeepSpeed's pieces of flat buffers. Whatever needs parts by rows is refused by the plan."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return is_sharded_weight(tensor) or is_master_sharded(tensor)

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.ds_shape if is_sharded_weight(tensor) else tensor.shape)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return fragment(tensor)[0]

    def slices(self, tensor: torch.Tensor) -> NoReturn:
        raise NotImplementedError("DeepSpeed's pieces are not cut by rows")

    def part_of(self, tensor: torch.Tensor, full: Any) -> torch.Tensor:
        """Reads the rows that the piece touches."""
        piece, start = fragment(tensor)
        shape = self.shape(tensor)
        if piece.numel() == 0:
            return torch.empty(0)
        if not shape:
            return full.reshape(1)
        width = math.prod(shape[1:])
        first, last = start // width, -(-(start + piece.numel()) // width)
        rows = full[(slice(first, last), *(slice(0, size) for size in shape[1:]))]
        return rows.reshape(-1)[start - first * width :][: piece.numel()]

    def num_shards(self, tensor: torch.Tensor) -> int:
        return dist.get_world_size()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return gather_fragments(tensor, self.shape(tensor))

    def shard_like(self, part: torch.Tensor, like: torch.Tensor, shape: Sequence[int]) -> NoReturn:
        raise NotImplementedError("DeepSpeed's pieces are not cut by rows")

    def sum_over_shards(self, parts: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> NoReturn:
        raise NotImplementedError("DeepSpeed's pieces are not cut by rows")


def gather_fragments(
    tensor: Any, shape: Sequence[int], state: str | None = None, optimizer: torch.optim.Optimizer | None = None
) -> torch.Tensor:
    """A parameter's master, or its state in ``optimizer``, in full on every rank, where weights compute. Collective."""
    piece, start = fragment(tensor, state, optimizer)
    full = torch.zeros(math.prod(shape), dtype=piece.dtype, device=tensor.device)
    full[start : start + piece.numel()] = piece.to(tensor.device)
    dist.all_reduce(full)  # every element is one rank's alone
    return full.view(tuple(shape))


_fragments = ZeroFragments()
_registered: list[ZeroFragments] = []


def register_fragments() -> None:
    """From now on ``core.holding`` knows them."""
    if not _registered:
        register(_fragments)
        _registered.append(_fragments)


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
def gather_rows(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[StagedModel, torch.optim.Optimizer]:
    """This rank's rows of masters and optimizer states, as ``save_checkpoint`` takes them. Collective."""
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
    return StagedModel(staged), holder


@torch.no_grad()
def load_fragments(folder: Path, model: nn.Module, zero: Any, *, is_checked: bool = False) -> dict[str, Any]:
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
    run_on_all_ranks(lambda: None)  # barrier: all have read before one may fail
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
