"""What one rank does for a cell of the matrix: the stages of ``worker/run.py`` on a planned run folder, and what it saw
meanwhile.

Only joining is left out, as the test world's ranks have joined already, and verification, which the test does in its
own process, where the trained model never was.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp_group
from torch.nn.parallel import DistributedDataParallel

from manyhands.core.holding import reshard
from manyhands.core.world import World
from manyhands.engine import apply as applying
from manyhands.engine.native import NativeEngine
from manyhands.launch.environment import Launcher
from manyhands.launch.run.folder import RunFolder
from manyhands.worker import export_stages as finish
from manyhands.worker import run as worker
from manyhands.worker.rank import Rank, RunEngine
from manyhands.worker.session import Session

Fault = Literal["", "averaged", "apart"]
StandIn = Literal["", "kernels"]


@dataclass
class Seen:
    """Parameters by the model's names. ``reduced``: values that one rank handed over to be summed, by step."""

    exit_code: int = 0
    num_values: dict[str, int] = field(default_factory=dict)
    with_gradient: set[str] = field(default_factory=set)  # when the norm was taken, in any step
    in_optimizer: set[str] = field(default_factory=set)
    with_state: set[str] = field(default_factory=set)
    reduced: list[int] = field(default_factory=list)


def run_stages(folder: Path, fault: Fault = "", stand_in: StandIn = "") -> Seen:
    """Trains, evaluates, saves and exports, or goes on from the newest checkpoint of ``folder``."""
    index, world_size = dist.get_rank(), dist.get_world_size()
    session, seen = Session(Launcher("manyhands", index, index, world_size, world_size)), Seen()
    run = RunFolder(folder)

    def join(session: Session, arguments: argparse.Namespace) -> Rank:
        world = World(index, index, world_size, torch.device("cpu"))
        return Rank(run.read_config(), run.read_plan(), run, world, session)

    with contextlib.ExitStack() as stack:
        session.terminal = stack.enter_context(open(run.log(index), "a"))
        stack.enter_context(contextlib.redirect_stdout(session.terminal))
        stack.enter_context(mock.patch.object(worker, "join", join))
        # The test world ends the group, after the model is gone: one that DDP is the last to hold was seen to hang when
        # freed.
        stack.enter_context(mock.patch.object(dist, "destroy_process_group", lambda: None))
        stack.enter_context(mock.patch.object(finish, "verify", lambda rank, engine, state: look(engine, seen)))
        stack.enter_context(watch_gradients(seen))
        stack.enter_context(plant(fault))
        stack.enter_context(stand_in_for(stand_in))
        seen.exit_code = worker.run_rank(session, argparse.Namespace(hook=[], metric=[]))
    return seen


def look(engine: RunEngine, seen: Seen) -> None:
    """Which parameters the optimizer has, and which of them have a state."""
    reshard(engine.model)
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    seen.num_values = {name: parameter.numel() for name, parameter in engine.model.named_parameters()}
    seen.in_optimizer = {names[id(p)] for group in engine.optimizer.param_groups for p in group["params"]}
    seen.with_state = {names[id(parameter)] for parameter, state in engine.optimizer.state.items() if state}


@contextlib.contextmanager
def watch_gradients(seen: Seen) -> Iterator[None]:
    """Notes which parameters have gradients, and how many values go through DDP's hook or FSDP2's reduction."""
    norm, sum_bucket, reduce = NativeEngine.gradient_norm, applying._sum_gradients, fsdp_group.foreach_reduce
    reduced = 0

    def watched_norm(self: NativeEngine) -> torch.Tensor:
        nonlocal reduced
        seen.with_gradient |= {name for name, parameter in self.model.named_parameters() if parameter.grad is not None}
        seen.reduced.append(reduced)
        reduced = 0
        return norm(self)

    def watched_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        nonlocal reduced
        reduced += bucket.buffer().numel()
        return sum_bucket(state, bucket)

    def watched_reduce(*arguments: Any, **options: Any) -> Any:
        nonlocal reduced
        given = inspect.signature(reduce).bind(*arguments, **options).arguments
        if given["reduce_scatter_group"].size() > 1 or (
            given["all_reduce_group"] is not None and given["all_reduce_grads"]
        ):
            reduced += sum(gradient.numel() for gradient in given["unsharded_grads"])  # else they only wait in place
        return reduce(*arguments, **options)

    with (
        mock.patch.object(NativeEngine, "gradient_norm", watched_norm),
        mock.patch.object(applying, "_sum_gradients", watched_bucket),
        mock.patch.object(fsdp_group, "foreach_reduce", watched_reduce),
    ):
        yield


@contextlib.contextmanager
def stand_in_for(part: StandIn) -> Iterator[None]:
    """``kernels``: bitsandbytes' kernels for GPUs, in plain torch."""
    with contextlib.ExitStack() as stack:
        if part == "kernels":
            from tests.training.optimizer_ranks import cpu_kernels  # which imports bitsandbytes

            stack.enter_context(cpu_kernels())
        yield


@contextlib.contextmanager
def plant(fault: Fault) -> Iterator[None]:
    """``averaged``: gradients are divided by the ranks, as DDP and FSDP2 do by default. ``apart``: copies are never
    summed.
    """
    choose = NativeEngine._reduce_in_backward

    def keep_apart(self: NativeEngine, on: bool) -> None:
        choose(self, on)
        assert isinstance(self.loss_model, FSDPModule)
        self.loss_model.set_requires_all_reduce(False)

    def as_it_is(*_: Any) -> None:
        pass

    with contextlib.ExitStack() as stack:
        if fault == "averaged":
            stack.enter_context(mock.patch.object(DistributedDataParallel, "register_comm_hook", as_it_is))
            stack.enter_context(mock.patch.object(FSDPModule, "set_gradient_divide_factor", as_it_is))
        elif fault == "apart":
            stack.enter_context(mock.patch.object(NativeEngine, "_reduce_in_backward", keep_apart))
        yield
