"""``manyhands train``: prepare, show the plan, start the workers. Torch is imported by the last of the three only."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from manyhands.config.dialects.report import summarize
from manyhands.config.load import LoadedRun
from manyhands.config.schema import RunConfig
from manyhands.core.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, OUT_OF_MEMORY, UserError
from manyhands.facts.types import HostFacts
from manyhands.launch.environment import detect_launcher, launcher_environment
from manyhands.launch.failure import first_failure
from manyhands.launch.prepare import Prepared, plan_smaller, prepare_run, summarize_start
from manyhands.launch.run_folder import RunFolder
from manyhands.launch.watch import StopRequested, Watch, end_all, raise_when_asked, worker_pids
from manyhands.plan.sentences import sentence_of
from manyhands.plan.types import Plan

LOG_WIDTH = 180  # columns of a plan in the log
MAX_SMALLER_PLANS = 4  # each has at most half the tokens a micro-batch


Beside = Callable[[RunFolder], AbstractContextManager[object]]


def start(
    run: RunConfig | LoadedRun,
    *,
    dry_run: bool = False,
    fresh: bool = False,
    host: HostFacts | None = None,
    beside: Beside | None = None,
) -> int:
    """Runs or resumes a run on this machine. Returns the exit code; raises UserError. ``beside``: what lasts as long as
    the workers do, such as TensorBoard. ``host``: a machine to plan for in place of this one, in a dry run alone.
    """
    _refuse_nested()
    origin = run if isinstance(run, LoadedRun) else LoadedRun(run)
    for translation in origin.translations:
        print("\n".join(summarize(translation)), flush=True)
    prepared = prepare_run(origin.config, fresh=fresh, dry_run=dry_run, host=host, origin=origin)
    folder = prepared.folder
    if prepared.finished:
        print(f"{folder.path} is finished; nothing to do (--fresh starts it again in a new folder)")
        return 0
    try:
        if dry_run:
            _show(prepared)
            print(f"dry run: the plan is in {folder.path}; nothing was started")
            return 0
        _show(prepared, folder)
        if prepared.resume:
            _report(f"resuming {folder.path} at step {folder.newest_step()}", folder)
        with beside(folder) if beside is not None else contextlib.nullcontext():
            return _launch(prepared)
    except UserError as error:
        _keep(str(error), folder)
        raise
    finally:
        prepared.release()


def _launch(prepared: Prepared) -> int:
    """Runs the workers; where memory runs out, again from the last checkpoint with a smaller plan,
    ``MAX_SMALLER_PLANS`` times.
    """
    for num_left in range(MAX_SMALLER_PLANS, -1, -1):
        try:
            timeout_s, folder = prepared.config.parallel.timeout_s, prepared.folder
            return run_workers(
                folder, prepared.plan, timeout_s=timeout_s, report=functools.partial(_report, folder=folder)
            )
        except UserError as error:
            if error.kind != OUT_OF_MEMORY or not num_left:
                raise
            prepared = plan_smaller(prepared)
            how = next((sentence_of(reason) for reason in prepared.plan.why if reason.code == "smaller"), None)
            if how is None:  # other GPUs, or an unwritten cause: the same plan would only fail again
                raise
            begin = f"from step {prepared.folder.newest_step()}" if prepared.resume else "from the start"
            _report(
                f"{error.what} ({error.where})\nplan {prepared.plan.number}: {how}; restarting {begin}", prepared.folder
            )
    raise AssertionError("unreachable")


def _show(prepared: Prepared, folder: RunFolder | None = None) -> None:
    """The plan on the terminal, and what starts now; in the launcher's log too where there is a ``folder``."""
    from rich.console import Console

    from manyhands.plan.explain import explain_plan

    plan, summary = prepared.plan, summarize_start(prepared, starts=folder is not None)
    Console().print(explain_plan(plan))
    print("\n".join(summary), flush=True)
    if folder is not None:
        kept = io.StringIO()
        Console(file=kept, width=LOG_WIDTH).print(explain_plan(plan))
        _keep("\n".join([kept.getvalue().rstrip(), *summary]), folder)


def _report(text: str, folder: RunFolder) -> None:
    print(text, flush=True)
    _keep(text, folder)


def _keep(text: str, folder: RunFolder) -> None:
    """Appends to the launcher's log, with the time; a full disk loses the line and nothing else."""
    with contextlib.suppress(OSError), open(folder.launcher_log, "a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n")


def _refuse_nested() -> None:
    """Under torchrun each process would start a run of its own."""
    if "RANK" in os.environ and detect_launcher().world_size > 1:
        raise UserError(
            "`manyhands train` starts the processes itself, but another launcher has started this one",
            where=f"environment: RANK={os.environ['RANK']}, WORLD_SIZE={os.environ.get('WORLD_SIZE')}",
            fix="run `manyhands train` by itself, or under that launcher `-m manyhands.worker RUN.yaml` instead",
        )


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # those that torch's agent takes over


def run_workers(
    folder: RunFolder,
    plan: Plan,
    *,
    timeout_s: float,
    module: str = "manyhands.worker",
    report: Callable[[str], None] = print,
) -> int:
    """Starts ``plan.layout.world_size`` workers and waits for them. No worker is left when it returns, however it ends.

    Returns 0, or 130 / 143 after Ctrl-C / SIGTERM (the workers get the same signal and 30 s to save) unless the run was
    finished by then. ``timeout_s``: a rank that others wait for is ended after so long without progress.
    UserError: the first cause of a failure, or a MASTER_PORT in use.
    """
    port = choose_port()
    folder.clear_ranks()
    folder.write_status("running", pid=os.getpid(), plan=plan.number)
    try:
        with (
            launcher_environment(plan),
            raise_when_asked(*_SIGNALS),
            Watch(folder, plan.layout.world_size, timeout_s) as watch,
        ):
            received = _run_agent(folder, plan.layout.world_size, port, module, watch)
    except StopRequested as asked:  # before the agent has taken the signal over: no worker was started
        received = asked.signal
    except UserError as error:
        with contextlib.suppress(OSError):  # the cause is to be shown, whatever the disk says
            folder.write_failed(error, plan)
        raise
    if received is None or folder.is_finished:
        folder.clear_ranks()
        if received is not None:
            report(f"{received.name} arrived too late: the run is finished")
        return 0
    folder.write_status("interrupted", reason=received.name)
    step = folder.newest_step()
    saved = f"saved at step {step}; the same command resumes from there"
    if step is None:
        saved = "nothing was saved yet; the same command starts it again"
    report(f"{received.name}: the run has ended, {saved}")
    return (
        EXIT_TERMINATED
        if received == signal.SIGTERM
        else EXIT_INTERRUPTED
        if received == signal.SIGINT
        else 128 + received
    )


def choose_port() -> int:
    """Where torch's agent listens: the user's MASTER_PORT if it is set (UserError if it is in use), else 0, any free
    port.

    The store that the ranks share is the agent's too and takes a free port by itself in either case.
    """
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


def _run_agent(folder: RunFolder, world_size: int, port: int, module: str, watch: Watch) -> signal.Signals | None:
    """Runs torch's agent to its end; the signal that ended it, or None where all ranks ended well."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_agent()
    pids: set[int] = set()
    with tempfile.TemporaryDirectory(
        prefix="manyhands-"
    ) as scratch:  # the agent wants a folder, though it redirects nothing
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=folder.path.name,
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{port}",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, "--run-folder", str(folder.path))
        except (SignalException, KeyboardInterrupt) as error:
            return error.sigval if isinstance(error, SignalException) else signal.SIGINT
        except ChildFailedError as error:
            pids |= {failure.pid for failure in error.failures.values()}
            raise watch.verdict or first_failure(folder, error.failures, watch.killed) from None
        finally:
            end_all(pids | watch.pids | set(worker_pids()))
    return None


def _quiet_agent() -> None:
    """The agent logs a failure in some forty lines; ours is the one that is shown."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
