"""``manyhands plan``: what a run would do, and why; launches nothing and writes nothing but the token cache."""

from __future__ import annotations

from typing import Annotated

import typer

from manyhands.cli.run_file import Examples, Gpus, Overrides, RunFile, load_run
from manyhands.cli.words import report_aside


def plan(
    run: RunFile,
    overrides: Overrides = None,
    gpus: Gpus = None,
    examples: Examples = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what `train` would do, and why."""
    config = load_run(run, overrides, gpus=gpus, examples=examples)
    from rich.console import Console

    from manyhands.launch.facts import gather_facts
    from manyhands.plan.explain import explain_plan
    from manyhands.plan.search import plan as make_plan

    made = make_plan(config, gather_facts(config, identify=False, report=report_aside))
    if as_json:
        print(made.model_dump_json(indent=2))
    else:
        Console().print(explain_plan(made))
