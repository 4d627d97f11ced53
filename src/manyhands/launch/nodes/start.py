"""``manyhands train --nodes N``: nodes meet, node 0 plans, each starts its workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.facts.types import HostFacts
from manyhands.importers.load import LoadedRun
from manyhands.launch.environment import PLACES, apply_variables
from manyhands.launch.local.watch import raise_when_stopped
from manyhands.launch.nodes.channel import Channel
from manyhands.launch.nodes.info import count_ranks
from manyhands.launch.nodes.launcher_group import LauncherGroup, open_channel
from manyhands.launch.nodes.preflight import find_group
from manyhands.launch.restart.restarts import Place, Restart
from manyhands.launch.run.lock import FolderLock, TakeLock
from manyhands.launch.run.prepare import Prepared, plan_smaller, prepare_run
from manyhands.launch.run.resume import folder_of
from manyhands.planner.types import Plan


@dataclass(frozen=True)
class PreparedLaunch:
    """What all nodes have agreed on. ``launchers`` is None where nothing is left to do."""

    prepared: Prepared
    launchers: LauncherGroup | None

    def plan_smaller(self) -> PreparedLaunch:
        """After a launch that ran out of memory: node 0 plans, or all end with its refusal."""
        assert self.launchers is not None
        channel = self.launchers.channel
        with failing_together(channel):
            prepared = self.prepared
            if channel.node == 0:
                prepared = plan_smaller(prepared, self.launchers.group)
            found = channel.gather(f"plan {self.launchers.attempt}", _sent(prepared) if channel.node == 0 else None)[0]
            return replace(self, prepared=_received(found, prepared.config))

    def resumed(self) -> PreparedLaunch:
        """The same plan, for another attempt."""
        prepared = self.prepared
        return replace(self, prepared=replace(prepared, resume=prepared.folder.newest_step() is not None))

    def agree_on_restart(self, decide: Callable[[], Restart]) -> Restart:
        """What ``decide`` says on node 0, which sees the checkpoints; its refusal ends the run on all nodes."""
        if self.launchers is None:
            return decide()
        channel, key = self.launchers.channel, f"restart {self.launchers.attempt}"
        with failing_together(channel):
            made = decide() if channel.node == 0 else None
            return Restart(**channel.gather(key, asdict(made) if made is not None else None)[0])


@contextlib.contextmanager
def prepare_launch(
    origin: LoadedRun,
    place: Place,
    *,
    fresh: bool,
    dry_run: bool,
    num_left: int | None = None,
    take_lock: TakeLock = FolderLock,
    report: Callable[[str], None] = print,
) -> Iterator[PreparedLaunch]:
    """The run, prepared on all nodes. UserError, the same on each, where one cannot take part. ``num_left``: ranks that
    a fault has left on them of a run with more. ``take_lock``: how node 0 locks the run's folder.
    """
    config, notes = apply_variables(origin.config)
    for note in notes:
        report(f"note: {note}")
    with raise_when_stopped():
        report(f"node {place.node} of {place.num_nodes}: waiting for the others at {place.rendezvous}")
        channel, infos = open_channel(config, place)
    try:
        with failing_together(channel):
            hosts = tuple(HostFacts.model_validate(info["facts"]) for info in infos)
            if place.node == 0:
                report(f"{place.num_nodes} nodes: {', '.join(channel.names)}")
            origin = replace(origin, config=config)
            result = _prepare(channel, origin, place, hosts, fresh, dry_run, num_left, take_lock, report)
        yield result
    finally:
        channel.close()


@contextlib.contextmanager
def failing_together(channel: Channel) -> Iterator[None]:
    """Within, an error of this node ends all others with the same message, and one of theirs ends this node, whatever
    it is busy with: preparing data may take hours.
    """
    host = channel.names[channel.node]
    is_main = threading.current_thread() is threading.main_thread()  # else the next gather raises the error

    def end(error: UserError) -> None:
        if is_main:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with raise_when_stopped(), channel.when_in_trouble(end):
            yield
    except UserError as error:
        if channel.trouble is None:
            if host not in str(error):  # as the others show it
                error.where = f"{error.where} on {host}" if error.where else f"on {host}"
            channel.fail(error)
        raise channel.trouble or error from None
    except Exception as error:  # a bug
        what = f"unexpected error on {host}: {type(error).__name__}: {error}"
        channel.fail(UserError(what, where=f"the output of {host} has its traceback", exit_code=EXIT_FAILED))
        raise


def _prepare(
    channel: Channel,
    origin: LoadedRun,
    place: Place,
    hosts: tuple[HostFacts, ...],
    fresh: bool,
    dry_run: bool,
    num_left: int | None,
    take_lock: TakeLock,
    report: Callable[[str], None],
) -> PreparedLaunch:
    config = origin.config
    num_ranks = count_ranks(config, hosts)
    addresses = [channel.infos[node]["address"] for node in range(channel.num_nodes)]
    config, group = find_group(channel, config, hosts, num_ranks, addresses, fresh=fresh, report=report)
    if group is None:
        folder = folder_of(config)
        return PreparedLaunch(Prepared(folder, config, folder.read_plan(), resume=False, finished=True), None)
    asked, least = config.parallel.gpus, config.launch.min_gpus
    launchers = LauncherGroup(channel, group, place, {PLACES: json.dumps(group.places)}, asked, least)
    if channel.node != 0:
        return PreparedLaunch(_received(channel.gather("plan", None)[0], config), launchers)
    origin = replace(origin, config=config)
    prepared = prepare_run(
        config, group=group, dry_run=dry_run, origin=origin, num_left=num_left, take_lock=take_lock, report=report
    )
    if prepared.lock is not None:
        prepared.lock.start_heartbeat()
    try:
        channel.gather("plan", _sent(prepared))
    except BaseException:
        prepared.release()
        raise
    return PreparedLaunch(prepared, launchers)


def _sent(prepared: Prepared) -> dict[str, Any]:
    fields = {name: getattr(prepared, name) for name in ("resume", "finished", "written")}
    return {"plan": prepared.plan.model_dump(mode="json"), **fields}


def _received(fields: dict[str, Any], config: RunConfig) -> Prepared:
    plan = Plan.model_validate(fields["plan"])
    return Prepared(folder_of(config), config, plan, **{k: v for k, v in fields.items() if k != "plan"})
