"""``manyhands train``: prepare, show the plan, start the workers. Torch is imported by the last of the three only."""

import contextlib
import functools
import io
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from manyhands.config.schema import RunConfig
from manyhands.core.errors import FAULT, OUT_OF_MEMORY, UserError
from manyhands.core.text import open_console, printable
from manyhands.facts.types import HostFacts
from manyhands.facts.xids import XidListener
from manyhands.importers.load import LoadedRun
from manyhands.importers.report import summarize
from manyhands.launch.environment import ATTEMPT, detect_launcher, refuse_alone, restored_environment
from manyhands.launch.local.watch import Stopped, sleep_unless_stopped
from manyhands.launch.local.workers import report_end, run_workers
from manyhands.launch.nodes.info import NodeInfo, host_name
from manyhands.launch.nodes.start import PreparedLaunch, prepare_launch
from manyhands.launch.restart.lost_gpus import DriverReports, LaunchGpus, Lost, find_lost
from manyhands.launch.restart.restarts import (
    NodesLeft,
    Place,
    Restart,
    Restarts,
    config_for,
    fix_for_lost_node,
    nodes_there,
    place_among,
)
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.lock import FolderLock, take_over
from manyhands.launch.run.prepare import Prepared, plan_fewer, plan_smaller, prepare_run, summarize_start
from manyhands.launch.slurm import block_save_signal, refuse_outside_step
from manyhands.planner.text import describe_briefly, explain_plan, sentence_of
from manyhands.planner.types import method_of

LOG_WIDTH = 180  # columns of a plan in the log
MAX_SMALLER_PLANS = 4  # each is estimated to need a tenth less, or has at most half the tokens a micro-batch


Beside = Callable[[RunFolder], AbstractContextManager[object]]


def start(
    run: RunConfig | LoadedRun,
    *,
    dry_run: bool = False,
    fresh: bool = False,
    host: HostFacts | None = None,
    beside: Beside | None = None,
    place: Place | None = None,
    arguments: Sequence[str] = (),
    verbose: bool = False,
    price: float | None = None,
) -> int:
    """Runs or resumes a run on this machine, or this node's part of it at its ``place`` among several.

    Returns the exit code; raises UserError. ``beside``: what lasts as long as the workers do, such as TensorBoard.
    ``arguments``: of each worker. ``host``: a machine to plan for in place of this one, in a dry run alone.
    ``verbose``: show the plan with every decision, as a dry run does; ``price``: of a GPU-hour.
    """
    block_save_signal()
    _refuse_nested(place)
    origin = run if isinstance(run, LoadedRun) else LoadedRun(run)
    for translation in origin.translations:
        print("\n".join(summarize(translation)), flush=True)
    if place is None and not dry_run:
        refuse_alone(origin.config)
    show = functools.partial(_show, with_reasons=verbose or dry_run, price=price)
    with contextlib.closing(LaunchState()) as state:
        while place is not None:
            try:
                with prepare_launch(
                    origin, place, fresh=fresh, dry_run=dry_run, num_left=state.num_left, take_lock=state.take_lock
                ) as launch:
                    return _carry_out(launch, dry_run, beside if place.node == 0 else None, arguments, state, show)
            except NodesLeft as lost:
                left = lost.left
            except UserError as error:  # a node that is lost has not come back
                left = nodes_there(error, place)
                if not left or not state.can_shrink_to(left, origin.config.launch.min_gpus):
                    if state.infos and left:
                        asked, least = origin.config.parallel.gpus, origin.config.launch.min_gpus
                        error.fix = fix_for_lost_node(place, state.infos, left, asked, least)
                    raise
            origin, place, fresh = *state.shrink_to(left, origin, place), False
        prepared = prepare_run(
            origin.config,
            fresh=fresh,
            dry_run=dry_run,
            host=host,
            origin=origin,
            num_left=state.num_left,
            take_lock=state.take_lock,
        )
        return _carry_out(PreparedLaunch(prepared, None), dry_run, beside, arguments, state, show)


class LaunchState:
    """What stays from one attempt of a launch to the next. ``num_ranks``: of each node, once one is lost; ``num_left``:
    of all that are left, once they continue without it; ``name``: the run's, which a fresh start chooses. ``lock``:
    that of its folder, which is held all the time; ``takes_over``: it was held by node 0, which is lost.
    """

    def __init__(self) -> None:
        self.restarts: Restarts | None = None
        self.num_ranks: tuple[int, ...] | None = None
        self.num_left: int | None = None
        self.infos: dict[int, NodeInfo] = {}
        self.name = ""
        self.lock: FolderLock | None = None
        self.takes_over = False
        self.timeout_s = 0.0
        self.restart: Restart | None = None  # which nobody has written down yet

    def record_lost(self, launch: PreparedLaunch) -> None:
        """Keeps what the attempt that has lost a node knows of all of them."""
        assert launch.launchers is not None
        self.num_ranks, self.infos = launch.launchers.group.num_ranks, launch.launchers.channel.infos
        self.name, self.timeout_s = launch.prepared.config.name, launch.prepared.config.parallel.timeout_s
        self.lock = launch.prepared.lock

    def can_shrink_to(self, left: Sequence[int], least: int | None) -> bool:
        """Whether ``launch.min_gpus`` (``least``) allows to continue with these nodes after one was lost."""
        if self.num_ranks is None or least is None:
            return False
        return sum(self.num_ranks[node] for node in left) >= least

    def shrink_to(self, left: Sequence[int], origin: LoadedRun, place: Place) -> tuple[LoadedRun, Place | None]:
        """The run and this node's place in it, on the nodes ``left`` alone."""
        assert self.num_ranks is not None
        self.num_ranks = tuple(self.num_ranks[node] for node in left)
        self.num_left = sum(self.num_ranks)
        among = place_among(place, left, self.infos)
        self.takes_over = self.takes_over or 0 not in left
        self.infos = {number: self.infos[node] for number, node in enumerate(left)}
        config = config_for(origin.config, place.num_nodes, len(left))
        return replace(origin, config=config.model_copy(update={"name": self.name})), among

    def take_lock(self, folder: RunFolder, report: Callable[[str], None]) -> FolderLock:
        """The one that this launcher has kept, or that of a node which is lost, or a new one."""
        kept, self.lock = self.lock, None
        if kept is not None:
            return kept
        if not self.takes_over:
            return FolderLock(folder, report)
        lock, self.takes_over = take_over(folder, self.timeout_s, report), False
        if self.restart is not None:
            folder.add_restart(self.restart.to_json())
            _keep(str(self.restart), folder)
        return lock

    def close(self) -> None:
        if self.lock is not None:
            self.lock.release()


def _carry_out(
    launch: PreparedLaunch,
    dry_run: bool,
    beside: Beside | None,
    arguments: Sequence[str],
    state: LaunchState,
    show: Callable[..., None],
) -> int:
    """What is prepared. Of several nodes the first one shows the plan and keeps the log."""
    prepared, folder = launch.prepared, launch.prepared.folder
    leads = launch.launchers is None or launch.launchers.node == 0
    if prepared.finished:
        print(f"{folder.path} is finished; nothing to do (--fresh starts it again in a new folder)")
        return 0
    try:
        if dry_run:
            if leads:
                show(prepared)
            where = f"the plan is in {folder.path}" if prepared.written else "nothing was written"
            print(f"dry run: {where}; nothing was started")
            return 0
        if leads:
            show(prepared, folder)
            if prepared.resume:
                _report(f"resuming {folder.path} at step {folder.newest_step()}", folder)
        with beside(folder) if beside is not None else contextlib.nullcontext():
            return _launch(launch, arguments, state)
    except UserError as error:
        if leads:
            _keep(str(error), folder)
        raise
    finally:
        if state.lock is None or state.lock is not prepared.lock:
            prepared.release()


def _launch(launch: PreparedLaunch, arguments: Sequence[str], state: LaunchState) -> int:
    """Runs the workers. NodesLeft where a node is lost and ``launch.min_gpus`` allows to go on without it."""
    prepared, launchers = launch.prepared, launch.launchers
    if state.restarts is None:
        state.restarts = Restarts(prepared.folder, prepared.config.launch.restarts)
    try:
        with restored_environment():
            plan = prepared.plan
            gpus = LaunchGpus.of(plan) if launchers is None else LaunchGpus.of_node(plan, len(launchers.ranks))
            with XidListener(gpus.uuids) as listener:
                return _launch_and_restart(launch, arguments, state.restarts, gpus, listener)
    except Stopped as stopped:  # while the plan of another attempt was made
        leads = launchers is None or launchers.node == 0
        report = functools.partial(_report, folder=prepared.folder) if leads else print
        return report_end(prepared.folder, stopped.signal, report, leads)
    except UserError as error:
        if launchers is None or not launchers.channel.lost or launchers.stop_requested:
            raise
        left = launchers.agree_on_left(prepared.config.launch.min_gpus)
        if not left:
            raise
        state.record_lost(launch)
        restart = state.restarts.decide(error, f"the run continues with {len(left)} of {launchers.num_nodes} nodes")
        if launchers.node == 0:
            prepared.folder.add_restart(restart.to_json())
            _report(str(restart), prepared.folder)
        else:
            state.restart = restart
            print(restart, flush=True)
        received = sleep_unless_stopped(restart.wait_s)
        if received is not None:
            return report_end(prepared.folder, received, print, launchers.node == 0)
        raise NodesLeft(left) from error


def _launch_and_restart(
    launch: PreparedLaunch, arguments: Sequence[str], restarts: Restarts, gpus: LaunchGpus, listener: XidListener
) -> int:
    """Runs the workers. Where memory runs out, again from the last checkpoint with a smaller plan,
    ``MAX_SMALLER_PLANS`` times; after a fault, as ``Restarts`` decides, on the GPUs that are left. Neither where
    ``launch.restarts`` is 0.
    """
    folder, leads = launch.prepared.folder, launch.launchers is None or launch.launchers.node == 0
    report = functools.partial(_report, folder=folder) if leads else print
    num_smaller = attempt = 0
    while True:
        attempt += 1
        launchers, prepared = launch.launchers, launch.prepared
        of_node = () if launchers is None else (launchers.ranks.start, host_name())
        driver = DriverReports(listener, gpus.gpus, *of_node)
        try:
            return run_workers(
                folder,
                prepared.plan,
                timeout_s=prepared.config.parallel.timeout_s,
                report=report,
                launchers=launchers,
                arguments=arguments,
                environment={ATTEMPT: str(attempt)},
                driver=driver,
            )
        except UserError as error:
            if error.kind == OUT_OF_MEMORY and num_smaller < MAX_SMALLER_PLANS and restarts.limit:
                num_smaller += 1
                launch = _plan_smaller(launch, error, report)
            elif error.kind == FAULT:
                step = folder.newest_step()
                alone = launch.launchers is None and restarts.limit > 0
                lost = find_lost(gpus, error, prepared.config, step, driver.xids) if alone else None
                restart = launch.agree_on_restart(functools.partial(restarts.decide, error, str(lost or "")))
                if leads:
                    _keep(str(error), folder)
                    folder.add_restart(restart.to_json())
                report(str(restart))
                received = sleep_unless_stopped(restart.wait_s)
                if launch.launchers is not None:
                    received = launch.launchers.share_signal(received)
                if received is not None:
                    return report_end(folder, received, report, leads)
                launch = launch.resumed() if lost is None else _plan_fewer(launch, lost, report)
                gpus = gpus if lost is None else LaunchGpus.of(launch.prepared.plan)
            else:
                raise


def _plan_fewer(launch: PreparedLaunch, lost: Lost, report: Callable[[str], None]) -> PreparedLaunch:
    lost.gpus.hide(lost.why)
    launch = replace(launch, prepared=plan_fewer(launch.prepared, lost.num_left))
    why = [sentence_of(reason) for reason in launch.prepared.plan.why if reason.code in ("strategy", "batch")]
    report(f"plan {launch.prepared.plan.number}: {'; '.join(why)}")
    return launch


def _plan_smaller(launch: PreparedLaunch, error: UserError, report: Callable[[str], None]) -> PreparedLaunch:
    folder = launch.prepared.folder
    launch = PreparedLaunch(plan_smaller(launch.prepared), None) if launch.launchers is None else launch.plan_smaller()
    plan = launch.prepared.plan
    how = next((sentence_of(reason) for reason in plan.why if reason.code == "smaller"), None)
    if how is None:  # other GPUs, or an unwritten cause: the same plan would only fail again
        raise error
    begin = f"from step {folder.newest_step()}" if launch.prepared.resume else "from the start"
    report(f"{error.what} ({error.where})\nplan {plan.number}: {how}; restarting {begin}")
    return launch


def _show(
    prepared: Prepared, folder: RunFolder | None = None, *, with_reasons: bool = False, price: float | None = None
) -> None:
    """Prints the plan (five lines, or ``with_reasons``) and what starts; into ``folder``'s log with reasons."""
    plan, summary = prepared.plan, summarize_start(prepared, starts=folder is not None)
    if with_reasons:
        open_console(wrap=False).print(explain_plan(plan))
    else:
        lines = describe_briefly(prepared.config, method_of(plan, prepared.config), plan, price)
        print("\n".join(map(printable, lines)))
        print(f"reasons and alternatives: {prepared.folder.launcher_log}, or --verbose")
    print("\n".join(summary), flush=True)
    if folder is not None:
        kept = io.StringIO()
        open_console(kept, width=LOG_WIDTH).print(explain_plan(plan))
        _keep("\n".join([kept.getvalue().rstrip(), *summary]), folder)


def _report(text: str, folder: RunFolder) -> None:
    print(text, flush=True)
    _keep(text, folder)


def _keep(text: str, folder: RunFolder) -> None:
    """Appends to the launcher's log, with the time; a full disk loses the line and nothing else."""
    with contextlib.suppress(OSError), open(folder.launcher_log, "a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n")


def _refuse_nested(place: Place | None) -> None:
    """Under torchrun or srun each process would start a run of its own."""
    if place is None:
        refuse_outside_step()
    if "RANK" in os.environ and detect_launcher().world_size > 1:
        raise UserError(
            "`manyhands train` starts the processes itself, but another launcher has started this one",
            where=f"environment: RANK={os.environ['RANK']}, WORLD_SIZE={os.environ.get('WORLD_SIZE')}",
            fix="run `manyhands train` by itself, or under that launcher `-m manyhands.worker RUN.yaml` instead",
        )
