"""``manyhands train``: prepare, show the plan, start the workers. Torch is imported by the last of the three only."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import time

from manyhands.config.schema import RunConfig
from manyhands.core.errors import OUT_OF_MEMORY, UserError
from manyhands.launch.external import detect_launcher
from manyhands.launch.prepare import Prepared, plan_smaller, prepare_run
from manyhands.launch.run_folder import RunFolder
from manyhands.plan.types import Plan

LOG_WIDTH = 180  # columns of a plan in the log
MAX_SMALLER_PLANS = 4  # each has at most half the tokens a micro-batch


def start(config: RunConfig, *, dry_run: bool = False, fresh: bool = False) -> int:
    """Runs a run on this machine, or goes on with it. Returns the exit code; raises UserError."""
    _refuse_nested()
    prepared = prepare_run(config, fresh=fresh, dry_run=dry_run)
    folder = prepared.folder
    if prepared.finished:
        print(f"{folder.path} is finished; nothing to do (--fresh starts it again in a new folder)")
        return 0
    try:
        if dry_run:
            _show(prepared.plan)
            print(f"dry run: the plan is in {folder.path}; nothing was started")
            return 0
        _show(prepared.plan, folder)
        if prepared.resume:
            _say(f"resuming {folder.path} at step {folder.newest_step()}", folder)
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
    from manyhands.launch import local

    for num_left in range(MAX_SMALLER_PLANS, -1, -1):
        try:
            timeout_s, folder = prepared.config.parallel.timeout_s, prepared.folder
            return local.run(folder, prepared.plan, timeout_s=timeout_s, report=functools.partial(_say, folder=folder))
        except UserError as error:
            if error.kind != OUT_OF_MEMORY or not num_left:
                raise
            prepared = plan_smaller(prepared)
            how = next((sentence for sentence in prepared.plan.why if sentence.startswith("smaller: ")), None)
            if (
                how is None
                # the GPUs are no longer the same, or the cause could not be written: the same plan would only fail again
            ):
                raise
            how = how.removeprefix("smaller: ")
            begin = f"from step {prepared.folder.newest_step()}" if prepared.resume else "from the start"
            _say(f"{error.what} ({error.where})\nplan {prepared.plan.number}: {how}; going on {begin}", prepared.folder)
    raise AssertionError("unreachable")


def _show(plan: Plan, folder: RunFolder | None = None) -> None:
    """On the terminal, and in the launcher's log where there is a ``folder``."""
    from rich.console import Console

    from manyhands.plan.explain import explain_plan

    Console().print(explain_plan(plan))
    if folder is not None:
        kept = io.StringIO()
        Console(file=kept, width=LOG_WIDTH).print(explain_plan(plan))
        _keep(kept.getvalue().rstrip(), folder)


def _say(text: str, folder: RunFolder) -> None:
    print(text, flush=True)
    _keep(text, folder)


def _keep(text: str, folder: RunFolder) -> None:
    """Appends to the launcher's log, with the time; a full disk loses the line and nothing else."""
    with contextlib.suppress(OSError), open(folder.launcher_log, "a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n")


def _refuse_nested() -> None:
    """Under torchrun each of its processes would start a whole run of its own."""
    if "RANK" in os.environ and detect_launcher().world_size > 1:
        raise UserError(
            "`manyhands train` starts the processes itself, but another launcher has started this one",
            where=f"environment: RANK={os.environ['RANK']}, WORLD_SIZE={os.environ.get('WORLD_SIZE')}",
            fix="run `manyhands train` by itself, or under that launcher `-m manyhands.worker RUN.yaml` instead",
        )
