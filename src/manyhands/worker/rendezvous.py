"""The first stage: every rank gets the same run and plan, its output goes into its log, and the process group forms."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from manyhands.config.load import load_config
from manyhands.config.schema import RunConfig
from manyhands.core import progress
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.launch.environment import check_accelerate_precision, refuse_silent_single, set_worker_environment
from manyhands.launch.failure import is_lost
from manyhands.launch.heartbeat import Heartbeat
from manyhands.launch.prepare import prepare_run
from manyhands.launch.run_folder import RunFolder
from manyhands.launch.stopping import Stopped
from manyhands.plan.types import Plan
from manyhands.worker import world as worlds
from manyhands.worker.output import redirect_output
from manyhands.worker.rank import DEFAULT_TIMEOUT_S, Rank
from manyhands.worker.signals import StopSignal

GROUP_SLACK_S = 60.0
STOP_S = 5.0
PREPARE_TIMEOUT_S = 24 * 3600.0  # rank 0 may tokenise for hours


def agree(rank: Rank, arguments: argparse.Namespace) -> bool:
    """Store, run and plan from rank 0, output, process group. True if the run is finished already."""
    launcher = rank.launcher
    rank.stage = "join"
    if arguments.run_folder is not None:
        rank.folder = RunFolder(arguments.run_folder)  # failures are reported there from here on
    rank.beat()
    timeout_s = _join_timeout(arguments)
    store = worlds.open_store(launcher, timeout_s)
    worlds.gather_ranks(store, launcher, timeout_s)
    rank.stage = "agree on run and plan"
    rank.beat()
    try:
        text = worlds.from_first_rank(
            store, launcher.rank, "run", lambda: _prepare_or_report(rank, arguments), PREPARE_TIMEOUT_S
        )
    except BaseException as error:
        # Who was stopped does not wait long for others, which may have been stopped too.
        worlds.leave_together(store, launcher, min(timeout_s, STOP_S) if isinstance(error, Stopped) else timeout_s)
        raise
    fields = json.loads(text)
    if fields["finished"]:
        worlds.leave_together(store, launcher, timeout_s)
        if rank.is_first:
            rank.say(f"{fields['folder']} is finished; nothing to do (--fresh starts it again in a new folder)")
        return True
    rank.config = RunConfig.model_validate(fields["config"])
    rank.plan = Plan.model_validate(fields["plan"])
    _compare_digests(store, rank)
    set_worker_environment(rank.plan, launcher.num_sharing_cores)  # before CUDA starts
    rank.folder = RunFolder(Path(fields["folder"]))
    rank.terminal = redirect_output(rank.folder.logs / f"rank-{launcher.rank}.log")
    if rank.heartbeat is None:
        rank.heartbeat = Heartbeat(rank.folder, launcher.rank)
    progress.listen(rank.heartbeat.advance)
    rank.stop = StopSignal(give_up=lambda: not rank.is_reporting and is_lost(rank.folder), before_exit=rank.show_lost)
    rank.beat()
    # Torch has read the variable when it was imported. The plan records it for a CPU, whose sums depend on it.
    threads = rank.plan.environment.get("OMP_NUM_THREADS") or os.environ["OMP_NUM_THREADS"]
    if threads.isdecimal():
        torch.set_num_threads(int(threads))
    device = worlds.pick_device(rank.plan.layout.device, launcher.local_rank)
    # Longer than the watch's limit: a stuck rank is to be named by the watch, not by whichever peer waits for it.
    rank.world = worlds.form_group(store, launcher, device, rank.config.parallel.timeout_s + GROUP_SLACK_S)
    rank.heartbeat.count_collectives = worlds.count_collectives
    worlds.check_world(rank.world, rank.plan.layout.world_size)
    return False


def _join_timeout(arguments: argparse.Namespace) -> float:
    """From the run file, where this rank can read it; rank 0 alone decides everything else."""
    try:
        path = arguments.run_folder / "run.json" if arguments.run_folder else arguments.run
        overrides = arguments.overrides if arguments.run else ()
        return float(load_config(path, overrides).parallel.timeout_s)
    except UserError:
        return DEFAULT_TIMEOUT_S


def _prepare_or_report(rank: Rank, arguments: argparse.Namespace) -> str:
    try:
        return _prepare(rank, arguments)
    except BaseException as error:
        rank.report_failure(error)  # before the others are told, and end
        raise


def _prepare(rank: Rank, arguments: argparse.Namespace) -> str:
    """On rank 0: the planned run as one JSON text. Under a foreign launcher this is where data and plan are made."""
    if arguments.run_folder is not None:
        folder = RunFolder(arguments.run_folder)
        config, plan, finished = folder.read_config(), folder.read_plan(), False
    else:
        config = load_config(arguments.run, arguments.overrides)
        refuse_silent_single(rank.launcher, config)
        check_accelerate_precision(config)
        prepared = prepare_run(
            config,
            world_size=rank.launcher.world_size,
            local_world_size=rank.launcher.local_world_size,
            fresh=arguments.fresh,
        )
        rank.lock = prepared.lock
        folder, config, plan, finished = prepared.folder, prepared.config, prepared.plan, prepared.finished
        if not finished:
            folder.write_status("running", pid=os.getpid(), plan=plan.number)
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
