"""The first stage: every expected rank is waited for by name, all get the run and plan, the process group forms.

In bounded time, and before any model is built.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from manyhands.config.schema import RunConfig
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.world import World
from manyhands.importers.load import LoadedRun, load_config
from manyhands.importers.report import summarize
from manyhands.launch.environment import (
    PLACES,
    Launcher,
    accelerate_settings,
    apply_variables,
    choose_threads,
    localize,
    refuse_silent_single,
    worker_environment,
)
from manyhands.launch.local.agent import open_store as serve_store
from manyhands.launch.local.heartbeat import this_host
from manyhands.launch.local.watch import Stopped
from manyhands.launch.nodes.address import LOCAL_HOST
from manyhands.launch.nodes.info import NodeGroup
from manyhands.launch.run.file import load_for_start
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.prepare import prepare_run, summarize_start
from manyhands.launch.run.resume import folder_of
from manyhands.planner.types import Plan
from manyhands.worker.collectives import count_collectives, read_collectives
from manyhands.worker.nodes import (
    FAILED,
    POLL_S,
    FirstRankFailed,
    broadcast_from_rank0,
    describe_rank,
    find_group_over_store,
    has_key,
    read_map,
    refuse_second_claim,
    shutdown_barrier,
)
from manyhands.worker.rank import Rank
from manyhands.worker.session import DEFAULT_TIMEOUT_S, Session

GROUP_SLACK_S = 60.0
STOP_S = 5.0
PREPARE_TIMEOUT_S = 24 * 3600.0  # rank 0 may tokenise for hours


def join(session: Session, arguments: argparse.Namespace) -> Rank | None:
    """Store, run and plan from rank 0, output, process group. None if the run is finished already."""
    launcher = session.launcher
    if arguments.run_folder is not None:
        session.folder = RunFolder(arguments.run_folder)  # failures are reported there from here on
    session.enter("join")
    timeout_s = _join_timeout(arguments)
    store = open_store(launcher, timeout_s) if session.store is None else session.store
    gather_ranks(store, launcher, timeout_s)
    nodes = read_map(store, launcher)
    # Our own launchers have found out already what nodes share, and planned.
    find_out = functools.partial(
        find_group_over_store,
        store,
        launcher,
        nodes,
        lambda: (arguments.load or _load_run)(arguments, launcher),
        fresh=arguments.fresh,
        report=functools.partial(print, file=session.terminal, flush=True),
        timeout_s=timeout_s,
    )
    finds_out = nodes.num_nodes > 1 and arguments.run_folder is None
    session.enter("agree on run and plan")
    try:
        if finds_out and nodes.leads(launcher.rank) and launcher.rank != 0:
            find_out()
        text = broadcast_from_rank0(
            store,
            launcher.rank,
            "run",
            lambda: _prepare_or_report(session, arguments, find_out if finds_out else None),
            PREPARE_TIMEOUT_S,
        )
    except BaseException as error:
        if isinstance(error, FirstRankFailed) and nodes.node and nodes.leads(launcher.rank):
            print(error.text, file=session.terminal, flush=True)  # this terminal is not rank 0's
        # Who was stopped does not wait long for others, which may have been stopped too.
        shutdown_barrier(store, launcher, min(timeout_s, STOP_S) if isinstance(error, Stopped) else timeout_s)
        raise
    fields = json.loads(text)
    config = session.config = RunConfig.model_validate(fields["config"])
    path = arguments.run_folder or (folder_of(config).path if finds_out else Path(fields["folder"]))
    path = path.resolve()  # as messages name it
    folder = session.folder = RunFolder(path)
    if fields["finished"]:
        shutdown_barrier(store, launcher, timeout_s)
        if nodes.leads(launcher.rank):
            line = f"{fields['folder']} is finished; nothing to do (--fresh starts it again in a new folder)"
            print(line, file=session.terminal, flush=True)
        return None
    plan = session.plan = Plan.model_validate(fields["plan"])
    _compare_digests(store, launcher, f"{config.digest} {plan.digest}")
    places = store.get(f"places/{nodes.node}").decode() if finds_out else os.environ.get(PLACES)
    plan = session.plan = localize(plan, places)
    os.environ.update({name: value for name, value in nodes.environment.items() if name not in os.environ})
    os.environ.update(worker_environment(plan, launcher.num_sharing_cores))  # before CUDA starts
    session.attach(folder, config, plan)
    session.beat()
    torch.set_num_threads(choose_threads(plan, launcher))  # torch has read the variable when it was imported
    device = pick_device(plan.layout.device, launcher.device_index)
    # Longer than the watch's limit: a stuck rank is to be named by the watch, not by whichever peer waits for it. Other
    # launchers have no watch, and nothing else would notice that a link between nodes is cut.
    slack_s = GROUP_SLACK_S if launcher.kind == "manyhands" or nodes.num_nodes == 1 else 0.0
    world = form_group(store, launcher, device, config.parallel.timeout_s + slack_s)
    if session.heartbeat is not None:
        session.heartbeat.count_collectives = count_collectives
        session.heartbeat.read_collectives = read_collectives
    check_world(world, plan.layout.world_size)
    return Rank(config, plan, folder, world, session)


def _join_timeout(arguments: argparse.Namespace) -> float:
    """From the run file, where this rank can read it; rank 0 alone decides everything else."""
    if arguments.load is not None:
        return DEFAULT_TIMEOUT_S
    try:
        path = arguments.run_folder / "run.json" if arguments.run_folder else arguments.run
        overrides = arguments.overrides if arguments.run else ()
        return float(apply_variables(load_config(path, overrides))[0].parallel.timeout_s)
    except UserError:
        return DEFAULT_TIMEOUT_S


def _prepare_or_report(session: Session, arguments: argparse.Namespace, find_out: FindOut | None) -> str:
    try:
        return _prepare(session, arguments, find_out)
    except BaseException as error:
        session.report_failure(error)  # before the others are told, and end
        raise


def _prepare(session: Session, arguments: argparse.Namespace, find_out: FindOut | None) -> str:
    """On rank 0: the planned run as one JSON text. Under a foreign launcher this is where data and plan are made.

    ``find_out``: where there are several nodes, what they find out together.
    """
    if arguments.run_folder is not None:
        folder = RunFolder(arguments.run_folder)
        config, plan, finished = folder.read_config(), folder.read_plan(), False
    else:
        group: NodeGroup | None = None
        if find_out is not None:
            loaded, group = find_out()
        else:
            loaded = (arguments.load or _load_run)(arguments, session.launcher)
        config = loaded.config
        refuse_silent_single(session.launcher, config)
        for translation in loaded.translations:
            print("\n".join(summarize(translation)), file=session.terminal, flush=True)
        prepared = prepare_run(
            config,
            world_size=session.launcher.world_size,
            local_world_size=session.launcher.local_world_size,
            fresh=arguments.fresh and find_out is None,
            origin=loaded,
            group=group,
        )
        session.lock = prepared.lock
        folder, config, plan, finished = prepared.folder, prepared.config, prepared.plan, prepared.finished
        if not finished:
            folder.write_status("running", pid=os.getpid(), host=this_host(), plan=plan.number)
            print("\n".join(summarize_start(prepared)), file=session.terminal, flush=True)
    fields = {"folder": str(folder.path.resolve()), "finished": finished}
    return json.dumps(fields | {"config": config.model_dump(mode="json"), "plan": plan.model_dump(mode="json")})


def _load_run(arguments: argparse.Namespace, launcher: Launcher) -> LoadedRun:
    return load_for_start(
        arguments.run, arguments.overrides, num_gpus=launcher.world_size, settings=accelerate_settings()
    )


def _compare_digests(store: dist.Store, launcher: Launcher, mine: str) -> None:
    """Every rank must have understood the same run and plan (another version of the program on one node would not)."""
    store.set(f"digest/{launcher.rank}", mine)
    for other in range(launcher.world_size):
        theirs = store.get(f"digest/{other}").decode()
        if theirs != mine:
            raise UserError(
                f"rank {launcher.rank} and rank {other} read different runs or plans",
                why=f"digests {mine} and {theirs}",
                fix="install the same version of manyhands everywhere",
                exit_code=EXIT_FAILED,
            )


FindOut = Callable[[], tuple[LoadedRun, NodeGroup | None]]


def open_store(launcher: Launcher, timeout_s: float) -> dist.Store:
    """The key-value store all ranks share: the launcher's own where there is one, else one that rank 0 serves."""
    if launcher.world_size == 1:
        return dist.HashStore()
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    host = LOCAL_HOST if launcher.is_one_machine and not agent_serves else launcher.master_addr
    try:
        if launcher.rank == 0 and not agent_serves:
            store = serve_store(host if launcher.is_one_machine else None, launcher.master_port)
            store.set_timeout(timedelta(seconds=timeout_s))
        else:
            store = dist.TCPStore(
                host,
                launcher.master_port,
                launcher.world_size,
                is_master=False,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError, OSError) as error:
        address = f"{launcher.master_addr}:{launcher.master_port}"
        if launcher.rank == 0 and not agent_serves:
            raise UserError(
                f"rank 0 cannot listen on {address}",
                why=str(error).splitlines()[0],
                fix="the port is in use: set another MASTER_PORT for every rank, or end the process that holds it",
            ) from error
        raise UserError(
            f"rank {launcher.rank} found no rank 0 at {address} within {timeout_s:g} s",
            why=str(error).splitlines()[0],
            fix="check MASTER_ADDR and MASTER_PORT, and that rank 0 was started and can be reached from here",
            exit_code=EXIT_FAILED,
        ) from error
    prefix = f"manyhands/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(prefix, store)


def gather_ranks(store: dist.Store, launcher: Launcher, timeout_s: float) -> None:
    """Waits until all ranks have reported; a rank that never comes is named in the error."""
    rank, world_size = launcher.rank, launcher.world_size
    refuse_second_claim(store, rank, describe_rank(launcher))
    deadline = time.monotonic() + timeout_s
    missing = list(range(world_size))
    while missing and time.monotonic() < deadline:
        missing = [r for r in missing if not has_key(store, f"here/{r}")]
        if missing and store.check([FAILED]):
            raise UserError.from_json(store.get(FAILED).decode())
        if missing:
            time.sleep(POLL_S)
    if missing:
        raise UserError(
            f"{len(missing)} of {world_size} ranks did not join: {', '.join(map(str, missing))}",
            where=f"rank {rank} waited {timeout_s:g} s (parallel.timeout_s)",
            why="they were not started, ended early, or look for another MASTER_ADDR:MASTER_PORT",
            fix="read the missing ranks' output, or start as many processes as WORLD_SIZE says",
            exit_code=EXIT_FAILED,
        )


def pick_device(kind: str, local_rank: int) -> torch.device:
    """``cuda:LOCAL_RANK`` (made current), or the CPU."""
    if kind == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} visible",
            fix="start at most one process a GPU, or widen CUDA_VISIBLE_DEVICES",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def form_group(store: dist.Store, launcher: Launcher, device: torch.device, timeout_s: float) -> World:
    """The default process group: NCCL for GPU tensors with gloo for CPU tensors beside it, or gloo alone."""
    # Not bound to a device (device_id): bound, the axes of a mesh are split off NCCL's communicator. A pair of ranks so
    # bound once died at its first mesh of two axes (torch 2.11); that the binding was the cause is a guess.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if dist.is_initialized():
        check_group(launcher, device)
        return World(launcher.rank, launcher.local_rank, launcher.world_size, device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=launcher.rank,
        world_size=launcher.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return World(launcher.rank, launcher.local_rank, launcher.world_size, device)


def check_group(launcher: Launcher, device: torch.device) -> None:
    """UserError where the process group that the caller has made is not one that a run can use."""
    found, needed = dist.get_backend_config(), {"cpu", device.type}
    if (dist.get_rank(), dist.get_world_size()) == (launcher.rank, launcher.world_size) and all(
        f"{kind}:" in found for kind in needed
    ):
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    raise UserError(
        "the process group of this program cannot be used",
        where=f"torch.distributed: {found}, {dist.get_world_size()} processes",
        why=f"a run needs {backend} over all {launcher.world_size} processes: small tensors travel on the host",
        fix=f"leave init_process_group out, or call it with backend={backend!r}",
    )


def check_world(world: World, expected: int) -> None:
    """Counts the ranks over training's own connections: two nodes that train alone are caught here."""
    formed = world.world_size
    if formed > 1:
        ones = torch.ones(1, device=world.device)
        dist.all_reduce(ones)
        formed = int(ones.item())
    if formed != expected:
        raise UserError(
            f"the plan is for {expected} processes, but {formed} formed a world",
            fix="start the number of processes that the plan names, or plan again",
            exit_code=EXIT_FAILED,
        )
