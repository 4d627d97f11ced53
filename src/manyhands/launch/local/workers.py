"""The workers of a launch on this node, under torch's elastic agent. Imports torch when they start."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from manyhands.core.errors import EXIT_INTERRUPTED, EXIT_SAVED, EXIT_TERMINATED, FAULT, UserError
from manyhands.launch.diagnose.failure import FoundCause, find_cause
from manyhands.launch.environment import launcher_environment
from manyhands.launch.local.agent import agent_config, open_store
from manyhands.launch.local.heartbeat import this_host
from manyhands.launch.local.watch import StopRequested, Watch, end_all, on_signals, raise_on, worker_pids
from manyhands.launch.nodes.address import LOCAL_HOST, Address, network_environment
from manyhands.launch.nodes.launcher_group import LaunchEnd, LauncherGroup
from manyhands.launch.restart.lost_gpus import DriverReports
from manyhands.launch.run.folder import RunFolder
from manyhands.planner.types import Plan

POLL_S = 0.5
NOTHING: Mapping[str, str] = {}
WORKER = "manyhands.worker"
ENDED_WELL = {EXIT_SAVED, EXIT_INTERRUPTED, EXIT_TERMINATED, -signal.SIGTERM}  # exit codes of ranks that were stopped
SECOND_SIGNAL_S = 1  # for ranks to end by themselves
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # those that torch's agent takes over


def run_workers(
    folder: RunFolder,
    plan: Plan,
    *,
    timeout_s: float,
    module: str = WORKER,
    report: Callable[[str], None] = print,
    launchers: LauncherGroup | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = NOTHING,
    driver: DriverReports | None = None,
) -> int:
    """Starts this node's workers, ``plan.layout.world_size`` on all nodes, and waits for them. None of them runs
    any more when it returns, however it ends.

    Returns 0, or 130 / 143 after Ctrl-C / SIGTERM (the workers get the same signal and 30 s to save) and 138 after
    SLURM's SIGUSR1, unless the run was finished by then: a crash after that is a warning. ``timeout_s``: a rank that
    others wait for, or a node of ``launchers`` that is silent, is ended after so long without progress. UserError: the
    first cause of a failure on any node, with what the driver reports of GPUs (``driver``), or a MASTER_PORT in use.
    """
    world_size, leads = plan.layout.world_size, launchers is None or launchers.node == 0
    port = choose_port() if launchers is None else 0
    store = None  # of this launch alone: it is there as long as it is referred to
    num_signals = 0

    def answer(number: signal.Signals) -> None:
        """Reports at once that a signal has come, as the ranks answer it after their step; other nodes get it too. Ends
        ranks that do not answer a second one: torch's agent would wait another 30 s for them.
        """
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1 and (launchers is None or launchers.pass_on(number)):
            again = "Ctrl-C again" if number == signal.SIGINT else f"a second {number.name}"
            what = "the ranks finish their step, save and end, within 30 s"
            report(f"{folder.read_stop_reason() or number.name}: {what}; {again} ends them at once, without saving")
        elif num_signals == 2:
            time.sleep(SECOND_SIGNAL_S)
            end_all(set(worker_pids()))

    try:
        with raise_on(*_SIGNALS):  # from before torch is imported, which takes seconds
            if leads:
                folder.clear_ranks()
                folder.write_status("running", pid=os.getpid(), host=this_host(), plan=plan.number)
            if launchers is None:
                store = open_store(LOCAL_HOST, port)
                endpoint, node, num_nodes, num_local = Address(LOCAL_HOST, store.port), 0, 1, world_size
                ranks = None
                run_id, network = folder.path.name, network_environment(LOCAL_HOST)
            else:  # not before the files of an earlier launch are removed
                endpoint = Address(*launchers.begin(open_store))
                node, num_nodes, ranks = launchers.node, launchers.num_nodes, launchers.ranks
                num_local = len(ranks)
                run_id, network = f"manyhands-{launchers.attempt}", launchers.environment
            agent = agent_config(
                str(endpoint), node=node, num_nodes=num_nodes, num_local=num_local, run_id=run_id, timeout_s=timeout_s
            )
            with (
                on_signals(answer),
                launcher_environment(plan, num_local, {**network, **environment}),
                _passing_on_notice(),
                Watch(folder, world_size, timeout_s, ranks, launchers) as watch,
                launchers.watching(watch) if launchers is not None else contextlib.nullcontext(),
            ):
                ending = _run_agent(folder, agent, (module, *arguments), watch)
    except StopRequested as stop:  # before the agent has taken the signal over: no worker was started
        ending = LaunchEnd(stop.signal)
    finally:
        del store
    if driver is not None:
        ending = replace(ending, reports=driver.describe())
        if ending.cause is not None:
            driver.name_in(ending.cause.error, ending.cause.rank)
    if launchers is not None:
        ending = launchers.settle(ending)
    if ending.cause is not None and ending.cause.error.kind == FAULT:
        ending.cause.error.details = (*ending.cause.error.details, *ending.reports)
    if ending.cause is not None and folder.is_finished:  # every result is written and verified
        error = ending.cause.error
        log = f"; log: {error.where}" if error.where else ""
        report(f"warning: {error.what}, after the run had finished: its results are complete{log}")
    elif ending.cause is not None:
        if leads:
            with contextlib.suppress(OSError):  # the cause is to be shown, whatever the disk says
                folder.write_failed(ending.cause.error, plan)
        ending.cause.error.rank = ending.cause.rank
        raise ending.cause.error
    return report_end(folder, ending.signal, report, leads)


def report_end(folder: RunFolder, received: signal.Signals | None, report: Callable[[str], None], leads: bool) -> int:
    """Says how a run has ended that did not fail, by the signal ``received`` if by any; returns the exit code."""
    asked = folder.read_stop_reason()
    if received is None or folder.is_finished:
        if leads:
            folder.clear_ranks()
        if received is not None:
            report(
                f"{asked}: the run had finished" if asked else f"{received.name} arrived too late: the run is finished"
            )
        return 0
    reason = folder.stop_file.name if folder.was_stopped_by_file() else asked or received.name
    if leads:
        folder.write_interrupted(reason)
    step = folder.newest_step()
    saved = f"saved at step {step}; the same command resumes from there"
    if step is None:
        saved = "nothing was saved yet; the same command starts it again"
    report(f"{reason}: the run has ended, {saved}")
    return 128 + received


def choose_port() -> int:
    """The port of the ranks' store: MASTER_PORT (UserError if in use), else 0, any free port."""
    text = os.environ.get("MASTER_PORT", "")
    if not text:
        return 0
    where = f"environment: MASTER_PORT={text}"
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise UserError(
            "MASTER_PORT is not a port number", where=where, fix="unset it: a free port is chosen automatically"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(text)))
        except OSError as error:
            raise UserError(
                f"port {text} is in use",
                where=where,
                why=f"{error.strerror}: another program on this machine uses it",
                fix="unset MASTER_PORT (a free port is chosen automatically), or set one that is free",
            ) from None
    return int(text)


def _run_agent(folder: RunFolder, agent: Any, command: Sequence[str], watch: Watch) -> LaunchEnd:
    """Runs torch's agent to its end: a signal, why a rank failed, or neither. ``command``: module and arguments."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    for name in list(logging.root.manager.loggerDict):  # the agent logs a failure in some forty lines
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    pids: set[int] = set()
    try:
        elastic_launch(agent, sys.executable)("-u", "-m", *command, "--run-folder", str(folder.path))
    except (SignalException, KeyboardInterrupt) as error:
        return LaunchEnd(signal.Signals(error.sigval if isinstance(error, SignalException) else signal.SIGINT))
    except ChildFailedError as error:
        pids |= {failure.pid for failure in error.failures.values()}
        if watch.verdict is not None:
            return LaunchEnd(cause=FoundCause(0, time.time(), watch.verdict, watch.verdict.rank))
        received = signal_of_end(folder, {failure.exitcode for failure in error.failures.values()})
        if received is not None:
            return LaunchEnd(received)
        return LaunchEnd(cause=find_cause(folder, error.failures, watch.killed))
    except RuntimeError as error:
        if agent.max_nodes == 1 or not type(error).__module__.startswith("torch"):
            raise
        why = f"torch's agent on this node: {str(error).splitlines()[0]}"
        return LaunchEnd(cause=FoundCause(4, time.time(), UserError("the nodes did not form a group", why=why)))
    finally:
        end_all(pids | watch.pids | set(worker_pids()))
    return LaunchEnd()


@contextlib.contextmanager
def _passing_on_notice() -> Iterator[None]:
    """Forwards SLURM's SIGUSR1, if blocked here, to the workers, which inherit the block until they handle it."""
    if signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        yield
        return
    ended = threading.Event()

    def pass_on() -> None:
        while not ended.is_set() and signal.sigtimedwait({signal.SIGUSR1}, POLL_S) is None:
            pass
        while not ended.is_set():  # again and again, for workers that have not started yet
            for pid in worker_pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            ended.wait(POLL_S)

    thread = threading.Thread(target=pass_on, name="notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def signal_of_end(folder: RunFolder, exit_codes: Collection[int]) -> signal.Signals | None:
    """By which signal the workers have ended, the file STOP being as good as Ctrl-C; None where any has failed."""
    if not set(exit_codes) <= ENDED_WELL or folder.read_failures():
        return None
    if EXIT_SAVED in exit_codes:  # the others have ended with those that say so
        return signal.SIGUSR1
    return signal.SIGINT if folder.was_stopped_by_file() else None
