"""``manyhands train``: prepare, show the plan, start the workers. Torch is imported by the last of the three only."""

from __future__ import annotations

import os

from manyhands.config.schema import RunConfig
from manyhands.errors import OUT_OF_MEMORY, UserError
from manyhands.launch.foreign import detect_launcher
from manyhands.launch.prepare import Prepared, plan_smaller, prepare_run
from manyhands.plan.types import Plan

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
        _show(prepared.plan)
        if dry_run:
            print(f"dry run: the plan is in {folder.path}; nothing was started")
            return 0
        if prepared.resume:
            print(f"resuming {folder.path} at step {folder.newest_step()}")
        return _launch(prepared)
    finally:
        prepared.release()


def _launch(prepared: Prepared) -> int:
    """Runs the workers; where memory runs out, again from the last checkpoint with a smaller plan, ``MAX_SMALLER_PLANS`` times."""
    from manyhands.launch import local

    for num_left in range(MAX_SMALLER_PLANS, -1, -1):
        try:
            return local.run(prepared.folder, prepared.plan, timeout_s=prepared.config.parallel.timeout_s)
        except UserError as error:
            if error.kind != OUT_OF_MEMORY or not num_left:
                raise
            prepared = plan_smaller(prepared)
            how = next(sentence for sentence in prepared.plan.why if sentence.startswith("smaller: ")).removeprefix("smaller: ")
            begin = f"from step {prepared.folder.newest_step()}" if prepared.resume else "from the start"
            print(f"{error.what} ({error.where})\nplan {prepared.plan.number}: {how}; going on {begin}", flush=True)
    raise AssertionError("unreachable")


def _show(plan: Plan) -> None:
    from rich.console import Console

    from manyhands.plan.explain import explain_plan

    Console().print(explain_plan(plan))


def _refuse_nested() -> None:
    """Under torchrun each of its processes would start a whole run of its own."""
    if "RANK" in os.environ and detect_launcher().world_size > 1:
        raise UserError(
            "`manyhands train` starts the processes itself, but another launcher has started this one",
            where=f"environment: RANK={os.environ['RANK']}, WORLD_SIZE={os.environ.get('WORLD_SIZE')}",
            fix="run `manyhands train` by itself, or under that launcher `-m manyhands.worker RUN.yaml` instead",
        )
