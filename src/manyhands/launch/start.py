"""``manyhands train``: prepare, show the plan, start the workers. Torch is imported by the last of the three only."""

from __future__ import annotations

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
from manyhands.core.text import open_console
from manyhands.facts.types import HostFacts
from manyhands.facts.xids import XidListener
from manyhands.importers.load import LoadedRun
from manyhands.importers.report import summarize
from manyhands.launch.environment import ATTEMPT, detect_launcher, refuse_alone
from manyhands.launch.folder_lock import FolderLock, take_over
from manyhands.launch.lost_gpus import DriverReports, LaunchGpus, Lost, find_lost, restored_environment
from manyhands.launch.nodes import NodeInfo, host_name
from manyhands.launch.prepare import Prepared, plan_fewer, plan_smaller, prepare_run, summarize_start
from manyhands.launch.restarts import (
    NodesLeft,
    Place,
    Restart,
    Restarts,
    config_for,
    how_to_go_on_without,
    nodes_there,
    place_among,
)
from manyhands.launch.run_folder import RunFolder
from manyhands.launch.slurm import block_save_signal, refuse_outside_step
from manyhands.launch.start_nodes import Joined, joined
from manyhands.launch.watch import Stopped, wait_unless_asked
from manyhands.launch.workers import report_end, run_workers
from manyhands.planner.sentences import sentence_of

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
) -> int:
    """Runs or resumes a run on this machine, or this node's part of it at its ``place`` among several.

    Returns the exit code; raises UserError. ``beside``: what lasts as long as the workers do, such as TensorBoard.
    ``arguments``: of each worker. ``host``: a machine to plan for in place of this one, in a dry run alone.
    """
    block_save_signal()
    _refuse_nested(place)
    origin = run if isinstance(run, LoadedRun) else LoadedRun(run)
    for translation in origin.translations:
        print("\n".join(summarize(translation)), flush=True)
    if place is None and not dry_run:
        refuse_alone(origin.config)
    with contextlib.closing(Lasting()) as lasting:
        while place is not None:
            try:
                with joined(
                    origin, place, fresh=fresh, dry_run=dry_run, num_left=lasting.num_left, take_lock=lasting.take_lock
                ) as found:
                    return _carry_out(found, dry_run, beside if place.node == 0 else None, arguments, lasting)
            except NodesLeft as found_left:
                origin, place = lasting.go_on(origin, place, found_left.left)
            except UserError as error:  # a node that is lost has not come back
                left = nodes_there(error, place)
                if not left or not lasting.may_go_on(origin.config, left):
                    raise lasting.explain(error, origin.config, place, left) from error.__cause__
                origin, place = lasting.go_on(origin, place, left)
            origin, fresh = lasting.resumed(origin), False
        prepared = prepare_run(
            origin.config,
            fresh=fresh,
            dry_run=dry_run,
            host=host,
            origin=origin,
            num_left=lasting.num_left,
            take_lock=lasting.take_lock,
        )
        return _carry_out(Joined(prepared, None), dry_run, beside, arguments, lasting)


class Lasting:
    """What stays from one attempt of a launch to the next. ``num_ranks``: of each node, once one is lost; ``num_left``:
    of all that are left, once they go on without it; ``name``: the run's, which a fresh start chooses. ``lock``: that
    of its folder, not for a moment another's; ``takes_over``: it was that of node 0, which is lost.
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

    def lose(self, found: Joined) -> None:
        assert found.team is not None
        self.num_ranks, self.infos = found.team.group.num_ranks, found.team.channel.infos
        self.name, self.timeout_s = found.prepared.config.name, found.prepared.config.parallel.timeout_s
        self.lock = found.prepared.lock

    def explain(self, error: UserError, config: RunConfig, place: Place, left: Sequence[int]) -> UserError:
        """``error``, with the commands that go on with the nodes ``left`` where one that was lost has not come back."""
        if self.infos and left:
            asked, least = config.parallel.gpus, config.launch.min_gpus
            error.fix = how_to_go_on_without(place, self.infos, left, asked, least)
        return error

    def resumed(self, origin: LoadedRun) -> LoadedRun:
        return replace(origin, config=origin.config.model_copy(update={"name": self.name}))

    def may_go_on(self, config: RunConfig, left: Sequence[int]) -> bool:
        """Whether ``launch.min_gpus`` allows to go on with these nodes after one was lost."""
        least = config.launch.min_gpus
        if self.num_ranks is None or least is None:
            return False
        return sum(self.num_ranks[node] for node in left) >= least

    def go_on(self, origin: LoadedRun, place: Place, left: Sequence[int]) -> tuple[LoadedRun, Place | None]:
        """The run and this node's place in it, on the nodes ``left`` alone."""
        assert self.num_ranks is not None
        num_ranks = tuple(self.num_ranks[node] for node in left)
        self.num_ranks, self.num_left = num_ranks, sum(num_ranks)
        among = place_among(place, left, self.infos)
        self.takes_over = self.takes_over or 0 not in left
        self.infos = {number: self.infos[node] for number, node in enumerate(left)}
        config = config_for(origin.config, place.num_nodes, len(left))
        return replace(origin, config=config), among

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


def _carry_out(found: Joined, dry_run: bool, beside: Beside | None, arguments: Sequence[str], lasting: Lasting) -> int:
    """What is prepared. Of several nodes the first one shows the plan and keeps the log."""
    prepared, folder = found.prepared, found.prepared.folder
    leads = found.team is None or found.team.node == 0
    if prepared.finished:
        print(f"{folder.path} is finished; nothing to do (--fresh starts it again in a new folder)")
        return 0
    try:
        if dry_run:
            if leads:
                _show(prepared)
            where = f"the plan is in {folder.path}" if prepared.written else "nothing was written"
            print(f"dry run: {where}; nothing was started")
            return 0
        if leads:
            _show(prepared, folder)
            if prepared.resume:
                _report(f"resuming {folder.path} at step {folder.newest_step()}", folder)
        with beside(folder) if beside is not None else contextlib.nullcontext():
            return _launch(found, arguments, lasting)
    except UserError as error:
        if leads:
            _keep(str(error), folder)
        raise
    finally:
        if lasting.lock is None or lasting.lock is not prepared.lock:
            prepared.release()


def _launch(found: Joined, arguments: Sequence[str], lasting: Lasting) -> int:
    """Runs the workers. NodesLeft where a node is lost and ``launch.min_gpus`` allows to go on without it."""
    prepared, team = found.prepared, found.team
    if lasting.restarts is None:
        lasting.restarts = Restarts(prepared.folder, prepared.config.launch.restarts)
    try:
        with restored_environment():
            plan = prepared.plan
            gpus = LaunchGpus.of(plan) if team is None else LaunchGpus.of_node(plan, len(team.ranks))
            with XidListener(gpus.uuids) as listener:
                return _launch_and_restart(found, arguments, lasting.restarts, gpus, listener)
    except Stopped as stopped:  # while the plan of another attempt was made
        leads = team is None or team.node == 0
        report = functools.partial(_report, folder=prepared.folder) if leads else print
        return report_end(prepared.folder, stopped.signal, report, leads)
    except UserError as error:
        if team is None or not team.channel.lost or team.was_asked:
            raise
        left = team.agree_on_left(prepared.config.launch.min_gpus)
        if not left:
            raise
        lasting.lose(found)
        restart = lasting.restarts.decide(error, f"the run goes on with {len(left)} of {team.num_nodes} nodes")
        if team.node == 0:
            prepared.folder.add_restart(restart.to_json())
            _report(str(restart), prepared.folder)
        else:
            lasting.restart = restart
            print(restart, flush=True)
        received = wait_unless_asked(restart.wait_s)
        if received is not None:
            return report_end(prepared.folder, received, print, team.node == 0)
        raise NodesLeft(left) from error


def _launch_and_restart(
    found: Joined,
    arguments: Sequence[str],
    restarts: Restarts,
    gpus: LaunchGpus,
    listener: XidListener,
) -> int:
    """Runs the workers. Where memory runs out, again from the last checkpoint with a smaller plan,
    ``MAX_SMALLER_PLANS`` times; after a fault, as ``Restarts`` decides, on the GPUs that are left. Neither where
    ``launch.restarts`` is 0.
    """
    folder, leads = found.prepared.folder, found.team is None or found.team.node == 0
    report = functools.partial(_report, folder=folder) if leads else print
    num_smaller = attempt = 0
    while True:
        attempt += 1
        team, prepared = found.team, found.prepared
        of_node = () if team is None else (team.ranks.start, host_name())
        driver = DriverReports(listener, gpus.gpus, *of_node)
        try:
            return run_workers(
                folder,
                prepared.plan,
                timeout_s=prepared.config.parallel.timeout_s,
                report=report,
                team=team,
                arguments=arguments,
                environment={ATTEMPT: str(attempt)},
                driver=driver,
            )
        except UserError as error:
            if error.kind == OUT_OF_MEMORY and num_smaller < MAX_SMALLER_PLANS and restarts.limit:
                num_smaller += 1
                found = _plan_smaller(found, error, report)
            elif error.kind == FAULT:
                step = folder.newest_step()
                alone = found.team is None and restarts.limit > 0
                lost = find_lost(gpus, error, prepared.config, step, driver.xids) if alone else None
                restart = found.agree_on_restart(functools.partial(restarts.decide, error, str(lost or "")))
                if leads:
                    _keep(str(error), folder)
                    folder.add_restart(restart.to_json())
                report(str(restart))
                received = wait_unless_asked(restart.wait_s)
                if found.team is not None:
                    received = found.team.share_signal(received)
                if received is not None:
                    return report_end(folder, received, report, leads)
                found = found.resumed() if lost is None else _plan_fewer(found, lost, report)
                gpus = gpus if lost is None else LaunchGpus.of(found.prepared.plan)
            else:
                raise


def _plan_fewer(found: Joined, lost: Lost, report: Callable[[str], None]) -> Joined:
    lost.gpus.hide(lost.why)
    found = replace(found, prepared=plan_fewer(found.prepared, lost.num_left))
    why = [sentence_of(reason) for reason in found.prepared.plan.why if reason.code in ("strategy", "batch")]
    report(f"plan {found.prepared.plan.number}: {'; '.join(why)}")
    return found


def _plan_smaller(found: Joined, error: UserError, report: Callable[[str], None]) -> Joined:
    folder = found.prepared.folder
    found = Joined(plan_smaller(found.prepared), None) if found.team is None else found.plan_smaller()
    plan = found.prepared.plan
    how = next((sentence_of(reason) for reason in plan.why if reason.code == "smaller"), None)
    if how is None:  # other GPUs, or an unwritten cause: the same plan would only fail again
        raise error
    begin = f"from step {folder.newest_step()}" if found.prepared.resume else "from the start"
    report(f"{error.what} ({error.where})\nplan {plan.number}: {how}; restarting {begin}")
    return found


def _show(prepared: Prepared, folder: RunFolder | None = None) -> None:
    """The plan on the terminal, and what starts now; in the launcher's log too where there is a ``folder``."""
    from manyhands.planner.explain import explain_plan

    plan, summary = prepared.plan, summarize_start(prepared, starts=folder is not None)
    open_console().print(explain_plan(plan))
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
