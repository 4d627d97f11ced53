"""One rank, top to bottom: the list of its stages, and what they hand on to each other."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from manyhands.checkpoint.together import run_together
from manyhands.config.schema import RunConfig
from manyhands.data.order import RowOrder
from manyhands.data.store import TokenStore
from manyhands.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from manyhands.launch.env import set_worker_environment
from manyhands.launch.failure import write_failure
from manyhands.launch.foreign import Launcher
from manyhands.launch.heartbeat import Heartbeat
from manyhands.launch.lock import FolderLock
from manyhands.launch.run_folder import RunFolder
from manyhands.model.loss import LossModel
from manyhands.parallel.model import Parallel
from manyhands.parallel.world import World
from manyhands.plan.types import Plan
from manyhands.train.loop import Interrupted
from manyhands.train.types import TrainState
from manyhands.worker import world as worlds
from manyhands.worker.output import redirect_output
from manyhands.worker.signals import StopSignal

DEFAULT_TIMEOUT_S = 600.0  # until the run file is known
GROUP_SLACK_S = 60.0
PREPARE_TIMEOUT_S = 24 * 3600.0  # rank 0 may tokenise for hours


@dataclass
class Rank:
    """What the stages of one rank share. Fields are set in the order of the stages."""

    launcher: Launcher
    stage: str = "start"
    terminal: TextIO = field(default_factory=lambda: sys.stdout)
    # agree
    config: RunConfig = None  # type: ignore[assignment]
    plan: Plan = None  # type: ignore[assignment]
    folder: RunFolder = None  # type: ignore[assignment]
    heartbeat: Heartbeat | None = None
    lock: FolderLock | None = None  # held while rank 0 of a foreign launcher lives
    stop: StopSignal = None  # type: ignore[assignment]
    world: World = None  # type: ignore[assignment]
    # data
    store: TokenStore = None  # type: ignore[assignment]
    order: RowOrder = None  # type: ignore[assignment]
    tokenizer: Any = None
    # model
    loss_model: LossModel = None  # type: ignore[assignment]
    adapted: list[str] = field(default_factory=list)
    parallel: Parallel = None  # type: ignore[assignment]
    optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]
    state: TrainState = field(default_factory=TrainState)
    # results, for the report
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> torch.nn.Module:
        """The Hugging Face model inside every wrapper; its parameter names are the checkpoint's."""
        return self.loss_model.model

    @property
    def is_first(self) -> bool:
        return self.launcher.rank == 0

    def say(self, text: str) -> None:
        """A line for the person at the terminal; other ranks write it into their logs."""
        print(text, file=self.terminal if self.is_first else sys.stdout, flush=True)

    def beat(self, step: int | None = None) -> None:
        if self.heartbeat is not None:
            self.heartbeat.beat(self.stage, step)

    def report_failure(self, error: BaseException) -> None:
        """Where our launcher watches, it shows the first failure; where somebody else launched us, each rank shows its own."""
        if self.folder is not None:
            write_failure(self.folder, self.launcher.rank, self.stage, error)
        if self.launcher.kind != "manyhands" and isinstance(error, UserError):
            print(error, file=self.terminal, flush=True)


def run_rank(rank: Rank, arguments: argparse.Namespace) -> int:
    """Runs every stage; returns the exit code."""
    from manyhands.worker import build, finish, training

    stages: tuple[tuple[str, Callable[[Rank], None]], ...] = (
        ("open data", build.open_data),
        ("build model", build.build_model),
        ("check model", build.check_model),
        ("resume", build.resume),
        ("train", training.train_model),
        ("export", finish.export),
        ("verify", finish.verify),
        ("report", finish.report),
    )
    if agree(rank, arguments):
        return 0
    for name, stage in stages:
        rank.stage = name
        rank.beat()
        try:
            stage(rank)
        except Interrupted:
            rank.say(f"stopped after step {rank.state.step}; the same command goes on from there")
            return rank.stop.exit_code if rank.stop.number else EXIT_INTERRUPTED
        except torch.OutOfMemoryError as error:
            raise explain_out_of_memory(rank, error) from error
    run_together(lambda: None)  # nobody leaves before all have come this far
    dist.destroy_process_group()
    if rank.heartbeat is not None:
        rank.heartbeat.close()
    return 0


def agree(rank: Rank, arguments: argparse.Namespace) -> bool:
    """Store, run and plan from rank 0, output, process group. True if the run is finished already."""
    launcher = rank.launcher
    rank.stage = "join"
    if arguments.run_folder is not None:
        rank.folder = RunFolder(arguments.run_folder)  # failures are reported there from here on
    timeout_s = _join_timeout(arguments)
    store = worlds.open_store(launcher, timeout_s)
    worlds.gather_ranks(store, launcher.rank, launcher.world_size, timeout_s)
    rank.stage = "agree on run and plan"
    text = worlds.from_first_rank(store, launcher.rank, "run", lambda: _prepare(rank, arguments), PREPARE_TIMEOUT_S)
    fields = json.loads(text)
    if fields["finished"]:
        return True
    rank.config = RunConfig.model_validate(fields["config"])
    rank.plan = Plan.model_validate(fields["plan"])
    _compare_digests(store, rank)
    set_worker_environment(rank.plan)  # before CUDA starts
    rank.folder = RunFolder(Path(fields["folder"]))
    rank.terminal = redirect_output(rank.folder.logs / f"rank-{launcher.rank}.log")
    rank.heartbeat = Heartbeat(rank.folder, launcher.rank)
    rank.stop = StopSignal(give_up=rank.folder.has_failure)
    rank.beat()
    if rank.plan.device == "cpu" and "OMP_NUM_THREADS" in rank.plan.environment:
        torch.set_num_threads(int(rank.plan.environment["OMP_NUM_THREADS"]))  # recorded in the plan: sums depend on it
    device = worlds.pick_device(rank.plan.device, launcher.local_rank)
    # Longer than the watch's limit: a stuck rank is to be named by the watch, not by whichever peer waits for it.
    rank.world = worlds.form_group(store, launcher, device, rank.config.parallel.timeout_s + GROUP_SLACK_S)
    worlds.check_world(rank.world, rank.plan.world_size)
    return False


def _join_timeout(arguments: argparse.Namespace) -> float:
    """From the run file, where this rank can read it; rank 0 alone decides everything else."""
    from manyhands.config.load import load_config

    try:
        path = arguments.run_folder / "run.json" if arguments.run_folder else arguments.run
        overrides = arguments.overrides if arguments.run else ()
        return float(load_config(path, overrides).parallel.timeout_s)
    except UserError:
        return DEFAULT_TIMEOUT_S


def _prepare(rank: Rank, arguments: argparse.Namespace) -> str:
    """On rank 0: the planned run as one JSON text. Under a foreign launcher this is where data and plan are made."""
    if arguments.run_folder is not None:
        folder = RunFolder(arguments.run_folder)
        config, plan, finished = folder.read_config(), folder.read_plan(), False
    else:
        from manyhands.config.load import load_config
        from manyhands.launch.foreign import check_accelerate_precision, refuse_silent_single
        from manyhands.launch.prepare import prepare_run

        config = load_config(arguments.run, arguments.overrides)
        refuse_silent_single(rank.launcher, config)
        check_accelerate_precision(config)
        prepared = prepare_run(config, world_size=rank.launcher.world_size, fresh=arguments.fresh)
        rank.lock = prepared.lock
        folder, config, plan, finished = prepared.folder, prepared.config, prepared.plan, prepared.finished
    fields = {"folder": str(folder.path.resolve()), "finished": finished}
    return json.dumps(fields | {"config": config.model_dump(mode="json"), "plan": plan.model_dump(mode="json")})


def _compare_digests(store: dist.Store, rank: Rank) -> None:
    """Every rank must have understood the same run and plan (another version of the program on one node would not)."""
    mine = f"{rank.config.digest} {rank.plan.digest}"
    store.set(f"digest/{rank.launcher.rank}", mine)
    for other in range(rank.launcher.world_size):
        theirs = store.get(f"digest/{other}").decode()
        if theirs != mine:
            raise UserError(
                f"rank {rank.launcher.rank} and rank {other} read different runs or plans",
                why=f"digests {mine} and {theirs}",
                fix="install the same version of manyhands everywhere",
                exit_code=EXIT_FAILED,
            )


def explain_out_of_memory(rank: Rank, error: BaseException) -> UserError:
    """Sets the plan's estimate beside what was there when memory ran out."""
    peak = torch.cuda.max_memory_allocated(rank.world.device) if rank.world.device.type == "cuda" else 0
    gib = 2**30
    terms = [f"{name}: {size / gib:.1f} GiB estimated" for name, size in rank.plan.memory.terms.items()]
    return UserError(
        f"out of GPU memory in stage '{rank.stage}' at step {rank.state.step}",
        where=f"rank {rank.launcher.rank}: peak {peak / gib:.1f} GiB, planned {rank.plan.memory.total / gib:.1f} GiB",
        why=str(error).split(". ")[0],
        fix="lower batch.micro_tokens or batch.micro_rows, set parallel.recompute=block, or use more GPUs with parallel.strategy=fsdp",
        details=terms,
        exit_code=EXIT_FAILED,
    )
