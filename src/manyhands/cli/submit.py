"""``manyhands submit``: a run as a job for a cluster, by the site's own client."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.run_file import Accelerate, DeepSpeed, Examples, Overrides, RunFile, Strict, host_to_plan, load_run
from manyhands.core.errors import UserError
from manyhands.core.text import report_aside
from manyhands.core.units import count_of, format_gib

if TYPE_CHECKING:
    from manyhands.config.schema import RunConfig
    from manyhands.facts.types import HostFacts
    from manyhands.submit.job import Target
    from manyhands.submit.prepare import JobFiles


class ClusterKind(StrEnum):
    """Where a run can be submitted to."""

    slurm = "slurm"
    kubernetes = "kubernetes"
    skypilot = "skypilot"


def submit(
    run: RunFile,
    overrides: Overrides = None,
    to: Annotated[
        ClusterKind | None, typer.Option("--to", help="sbatch script, Kubeflow TrainJob or SkyPilot task.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="KIND",
            help="GPUs to ask for: 8xH100, 2x8xH100-80GB (2 machines with 8 each). Short for submit.gpus.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write and print the job's file, and submit nothing.")
    ] = False,
    without_plan: Annotated[
        bool, typer.Option("--no-plan", help="Make no plan first, if only the cluster has the model or the data.")
    ] = False,
    examples: Examples = None,
    accelerate: Accelerate = None,
    deepspeed: DeepSpeed = None,
    strict: Strict = False,
) -> None:
    """Submit a run to a cluster, as a job made from its plan.

    The job's file is written to submit/ in the run's folder. What the cluster is asked for are the keys of `submit`:
    submit.time_limit=24:00:00 submit.partition=gpu. Submitting it again resumes."""
    if to is None:
        raise UserError(
            "the kind of cluster is not given",
            where="command line",
            fix=f"--to {', --to '.join(ClusterKind)}; --dry-run submits nothing",
        )
    named, counts = (gpus, True) if gpus is not None else _gpus_asked(run, overrides)
    number = named if counts else None
    loaded = load_run(
        run, overrides, gpus=number, examples=examples, accelerate=accelerate, deepspeed=deepspeed, strict=strict
    )
    for translation in loaded.translations:
        from manyhands.importers.report import summarize

        report_aside("\n".join(summarize(translation)))
    _submit(loaded.config, to.value, _host(loaded.config, named), dry_run=dry_run, with_plan=not without_plan)


def _submit(config: RunConfig, target: Target, host: HostFacts, *, dry_run: bool, with_plan: bool) -> None:
    from manyhands.submit.job import unread_keys
    from manyhands.submit.prepare import check_file, log_submission, submit_file, write_job

    for key in unread_keys(config.submit, target):
        report_aside(f"note: {key} has no effect with --to {target}")
    written = write_job(config, target, host, with_plan=with_plan, report=report_aside)
    report_aside(_describe(written))
    if dry_run:
        print(written.text, end="")
        if answer := check_file(target, written.file):
            report_aside(answer)
        report_aside(f"dry run: the job is in {written.file}; nothing was submitted")
        return
    try:
        answer = submit_file(written.job, target, written.file)
    except UserError as error:  # part of it may be there, or it is submitted by hand: its number is not used again
        log_submission(written, target, str(error))
        raise
    log_submission(written, target, answer)
    print(answer)


def _gpus_asked(run: Path, overrides: list[str] | None) -> tuple[str | None, bool]:
    """``submit.gpus``, and whether their number is the run's, as ``parallel.gpus`` has none: reading a file of another
    tool needs that number. Of a file of another tool, ``submit.gpus`` follows from its translation.
    """
    from manyhands.config.read import parse_yaml_value, read_run_file

    mapping = read_run_file(run).mapping
    given = [override.removeprefix("--").partition("=") for override in overrides or ()]

    def find(section: str, key: str) -> object:
        found = [parse_yaml_value(value) for name, _, value in given if name == f"{section}.{key}"]
        keys = mapping.get(section)
        return found[-1] if found else keys.get(key) if isinstance(keys, dict) else None

    named = find("submit", "gpus")
    return (named if isinstance(named, str) else None), find("parallel", "gpus") in (None, "auto")


def _host(config: RunConfig, named: str | None) -> HostFacts:
    if host := host_to_plan(config, named or config.submit.gpus):
        return host
    if config.parallel.device == "cpu":
        from manyhands.facts.host import read_host_facts

        return read_host_facts()
    raise UserError(
        "which GPUs to ask for is not given",
        where="command line, or submit.gpus",
        fix="--gpus 8xH100, or 2x8xH100 for two machines; parallel.device=cpu for a job without GPUs",
    )


def _describe(written: JobFiles) -> str:
    job, plan = written.job, written.plan
    parts = [f"{job.name}: {job.size}"]
    if plan is not None:
        memory = plan.memory
        parts += [plan.layout.strategy, f"{format_gib(memory.total)} of {format_gib(memory.limit)} each planned"]
        parts += [f"{count_of(plan.num_steps, 'step')}"]
    if job.time_limit_s is not None:
        parts.append(f"at most {job.time_limit_s / 3600:.1f} h")
    return ", ".join(parts)
