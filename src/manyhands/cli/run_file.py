"""Commands on a run file (``train``, ``plan``, ``data``, ``tensorboard``): its arguments, and reading it with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli import process
from manyhands.cli.one_line import as_overrides, make_run, takes_short_options, write_down
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.text import open_console, report_aside

if TYPE_CHECKING:
    from manyhands.config.schema import RunConfig
    from manyhands.facts.gpu_kinds import AskedGpus
    from manyhands.facts.types import HostFacts
    from manyhands.importers.load import LoadedRun

VARIABLE = "SYNTH_GPU_TYPE"  # another tool's name for --gpus: read for plans without it
NUM_SAMPLES = 3  # on a terminal, by default

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file: YAML, TOML or JSON.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="section.key=value", help="Overrides of the file's keys.")
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="N|KIND",
        help="Number of GPUs: short for parallel.gpus=N. Or GPUs that need not be here, to plan for: 8xH200, "
        "2x4xH100-80GB (2 machines of 4), H100-4x, MI300X.",
    ),
]
Examples = Annotated[
    int | None, typer.Option("--examples", help="Use at most N samples, for a quick try: short for data.max_samples=N.")
]


Price = Annotated[
    float | None, typer.Option("--price", min=0.0, help="Price of a GPU-hour in any currency: shows the run's cost.")
]
Short = dict[str, Any]  # options that stand for keys, by key
Strict = Annotated[bool, typer.Option("--strict", help="Another tool's file: refuse keys that are only substituted.")]
Accelerate = Annotated[
    Path | None, typer.Option("--accelerate-config", help="accelerate's YAML: how the run is distributed.")
]
DeepSpeed = Annotated[Path | None, typer.Option("--deepspeed", help="DeepSpeed's JSON: how the run is distributed.")]


def load_run(
    run: Path | None,
    overrides: list[str] | None,
    *,
    short: Mapping[str, Any] | None = None,
    gpus: int | str | None = None,
    examples: int | None = None,
    nodes: int | None = None,
    accelerate: Path | None = None,
    deepspeed: Path | None = None,
    strict: bool = False,
) -> LoadedRun:
    """Reads the run file with its overrides. Options are overrides too; one that is given both ways is an error.

    ``short``: options by the key that they stand for; without a run file they are the run. ``gpus``: a number, or a
    kind with one (``8xH200``), whose number is meant.
    """
    from manyhands.facts.gpu_kinds import plain_number
    from manyhands.launch.run.file import load_for_start

    short, overrides = short or {}, list(overrides or ())
    if run is not None and "=" in str(run) and not run.exists() and short:  # the first word is an override
        run, overrides = None, [str(run), *overrides]
    source = make_run(short, overrides) if run is None else run
    if isinstance(gpus, str):
        asked = ask_gpus(gpus)
        gpus = asked.total if asked else plain_number(gpus)
    numbers = {"parallel.gpus": gpus, "data.max_samples": examples, "parallel.nodes": nodes}
    short = {**short, **{key: value for key, value in numbers.items() if value is not None}}
    overrides = as_overrides(short, overrides)
    files = {name: file for name, file in (("accelerate", accelerate), ("deepspeed", deepspeed)) if file is not None}
    for name, file in files.items():
        if not file.exists():
            option = "--accelerate-config" if name == "accelerate" else "--deepspeed"
            raise UserError("there is no such file", where=f"{option} {file}", fix="correct the path, or leave it out")
    loaded = load_for_start(source, overrides, settings=files, strict=strict)
    return write_down(loaded) if run is None else loaded


def find_run_folder(run: Path) -> Path:
    """The folder of a run, given itself or as a run file. UserError if there is none yet."""
    if run.is_dir():
        return run
    if not run.exists():
        there = sorted(str(path.parent) for path in (*run.parent.glob("*/run.json"), *Path("runs").glob("*/run.json")))
        names = f"; runs there: {', '.join(dict.fromkeys(there[:20]))}" if there else ""
        raise UserError(
            "there is no such file or folder",
            where=str(run),
            fix=f"give a run's folder, such as runs/NAME, or its run file{names}",
        )
    from manyhands.launch.run.resume import folder_of

    folder = folder_of(load_run(run, []).config).path
    if not folder.is_dir():
        raise UserError(
            "this run has not been started", where=str(run), why=f"there is no {folder}", fix=f"manyhands train {run}"
        )
    return folder


@takes_short_options
def train(
    run: Annotated[str | None, typer.Argument(metavar="RUN.yaml", help="Run file: YAML, TOML or JSON.")] = None,
    overrides: Overrides = None,
    gpus: Gpus = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make the plan, check that the run can start, and exit.")
    ] = False,
    examples: Examples = None,
    config: Annotated[Path | None, typer.Option("--config", help="The run file, instead of RUN.yaml.")] = None,
    kind: Annotated[str | None, typer.Option("--type", help="The run file's task, to check it.")] = None,
    with_tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Run TensorBoard while the run lasts.")
    ] = False,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="With --tensorboard: its port.")] = 6006,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over in a new folder if a run of this name exists.")
    ] = False,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Number of machines: short for parallel.nodes=N.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", min=0, help="Which of them this one is, from 0.")
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", metavar="HOST:PORT", help="Where node 0 listens.")
    ] = None,
    accelerate: Accelerate = None,
    deepspeed: DeepSpeed = None,
    strict: Strict = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the plan with its reasons and alternatives.")
    ] = False,
    price: Price = None,
    *,
    short: Short,
) -> None:
    """Plan, launch, train, save and verify. Starting it again resumes.

    Without RUN.yaml, --model and --data make a run; its run file is kept in the run's folder.

    RUN may be a file of another tool (`manyhands import` lists what becomes of its keys)."""
    from manyhands.cli.train_options import check_type, choose_place, choose_run_file, plan_tensorboard
    from manyhands.launch.slurm import block_save_signal

    block_save_signal()  # before numpy is imported, which starts threads
    path, overrides = choose_run_file(run, config, overrides, short)
    settings = {"accelerate": accelerate, "deepspeed": deepspeed}
    loaded = load_run(
        path, overrides, short=short, gpus=gpus, examples=examples, nodes=nodes, strict=strict, **settings
    )
    check_type(kind, loaded.config)
    place = choose_place(loaded.config, node_rank, rendezvous, accelerate)
    beside = plan_tensorboard(loaded.config, port) if with_tensorboard else {}
    from manyhands.launch.local.start import start

    elsewhere = gpus_to_start(loaded.config, gpus, dry_run)
    raise typer.Exit(
        start(loaded, dry_run=dry_run, fresh=fresh, verbose=verbose, price=price, **beside, **elsewhere, **place)
    )


@takes_short_options
def plan(
    run: Annotated[Path | None, typer.Argument(metavar="RUN.yaml", help="Run file: YAML, TOML or JSON.")] = None,
    overrides: Overrides = None,
    gpus: Gpus = None,
    compare: Annotated[
        Path | None, typer.Option("--compare", help="Folder of a finished run: what its plan said, and what it took.")
    ] = None,
    longest: Annotated[
        bool, typer.Option("--longest", help="Plan for the longest sample that fits, whatever the data's lengths are.")
    ] = False,
    price: Price = None,
    examples: Examples = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    accelerate: Accelerate = None,
    deepspeed: DeepSpeed = None,
    *,
    short: Short,
) -> None:
    """Show what `train` would do, and why."""
    if compare is not None:
        beside = (run, overrides, short, gpus, longest, price, examples, as_json, accelerate, deepspeed)
        if any(value not in (None, False, [], {}) for value in beside):
            raise UserError(
                "--compare is given beside a run file or other options",
                where="command line",
                why="it prints the newest plan in a run's folder beside what was measured, and makes none",
                fix=f"write manyhands plan --compare {compare}",
            )
        _compare(compare)
        return
    if as_json and price is not None:
        raise UserError("--price has no effect with --json", where="command line", fix="remove one of them")
    loaded = load_run(
        run, overrides, short=short, gpus=gpus, examples=examples, accelerate=accelerate, deepspeed=deepspeed
    )

    from manyhands.importers.report import summarize
    from manyhands.launch.run.prepare import facts_here
    from manyhands.launch.run.rehearsal import refuse_unmatched
    from manyhands.planner.search import plan as make_plan
    from manyhands.planner.search import plan_longest
    from manyhands.planner.text import describe_cost, describe_longest, explain_plan

    for line in (line for one in loaded.translations for line in summarize(one)):
        report_aside(line)
    config, facts = facts_here(loaded.config, host=host_to_plan(loaded.config, gpus), report=report_aside)
    found = plan_longest(config, facts) if longest else None
    made = make_plan(config, facts) if found is None else found.plan
    if found is not None:
        report_aside(describe_longest(found, facts)) if as_json else print(describe_longest(found, facts) + "\n")
    refuse_unmatched(config, made, facts.model)
    print(made.model_dump_json(indent=2)) if as_json else open_console(wrap=False).print(explain_plan(made))
    if price is not None:
        print(describe_cost(made.time, price))


def _compare(folder: Path) -> None:
    """The newest plan of a run's folder beside its report. UserError where one of them is missing."""
    from rich.table import Table
    from rich.text import Text

    from manyhands.launch.run.folder import RunFolder
    from manyhands.planner.text import compare

    place = RunFolder(folder if folder.exists() else find_run_folder(folder))
    report = place.read_report()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("", "planned", "measured", "error"):
        table.add_column(title, justify="right" if title else "left")
    for row in compare(place.read_plan(), report):
        table.add_row(*map(Text, row))
    open_console(highlight=False).print(table)


@takes_short_options
def data(
    run: Annotated[Path | None, typer.Argument(metavar="RUN.yaml", help="Run file: YAML, TOML or JSON.")] = None,
    overrides: Overrides = None,
    rows: Annotated[int | None, typer.Option("--rows", min=0, help="Show at most N samples.  [default: 3]")] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Show the complete first micro-batch of step S.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write an HTML page with a complete micro-batch instead.", dir_okay=False),
    ] = None,
    examples: Examples = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the preview as JSON.")] = False,
    *,
    short: Short,
) -> None:
    """Preview a step's samples, with loss tokens marked.

    Also shows lengths, packing and tokens by source, and lists the rows that a run would refuse (exit code 1)."""
    config = load_run(run, overrides, short=short, examples=examples).config
    from manyhands.preview.collect import collect
    from manyhands.preview.page import refuse_foreign_file, write_page

    if html is not None and as_json:
        raise UserError("--html and --json are both given", where="command line", fix="remove one of them")
    if html is not None:
        refuse_foreign_file(html)
    max_samples = NUM_SAMPLES if rows is None and step is None and html is None else rows
    preview = collect(config, step=step or 1, max_samples=max_samples, report=report_aside)
    if as_json:
        import json

        from manyhands.preview.contents import to_json

        print(json.dumps(to_json(preview)))
    elif html is not None:
        write_page(preview, html)
        print(f"wrote {html}: open it in a browser" + "; it lists the rows that a run rejects" * bool(preview.refused))
    else:
        from manyhands.preview.text import print_preview

        print_preview(preview, open_console(highlight=False))
    if preview.refused:
        raise typer.Exit(EXIT_FAILED)


def tensorboard(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder or run file, or the folder of all runs.")
    ] = Path("runs"),
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port on this machine's loopback address.")
    ] = 6006,
) -> None:
    """Start TensorBoard on a run, or on all runs."""
    folder = find_run_folder(folder)
    expected = (folder.iterdir(), folder.rglob("run.json"), folder.rglob("events.out.tfevents*"))
    if [any(found) for found in expected] == [True, False, False]:  # an empty folder gets its runs later
        raise UserError(
            "there is neither a run nor a curve in this folder",
            where=str(folder),
            why="it has no run.json and no events.out.tfevents file",
            fix="give a run's folder, such as runs/NAME, its run file, or the folder of all runs",
        )
    process.refuse_missing_tensorboard()
    process.refuse_used_port(port)
    print(f"TensorBoard on {folder}: http://{process.HOST}:{port}/ (Ctrl-C to stop)", flush=True)
    raise typer.Exit(
        process.run_module("tensorboard.main", ["--logdir", str(folder), "--host", process.HOST, "--port", str(port)])
    )


def ask_gpus(option: str | None) -> AskedGpus | None:
    """What ``--gpus`` names by kind; None where it is a number or not given. UserError if it is neither."""
    from manyhands.facts.gpu_kinds import parse_gpus, plain_number

    return None if option is None or plain_number(option) is not None else parse_gpus(option)


def host_to_plan(config: RunConfig, option: str | None) -> HostFacts | None:
    """The machine to plan for, given by ``--gpus`` or ``SYNTH_GPU_TYPE``; None for this one."""
    from manyhands.facts.gpu_kinds import describe_host, parse_gpus

    asked = ask_gpus(option)
    if option is None and (text := os.environ.get(VARIABLE)):
        asked = parse_gpus(text, VARIABLE)
        if config.parallel.gpus not in ("auto", asked.total):
            raise UserError(
                f"parallel.gpus is {config.parallel.gpus}, but {VARIABLE} names {asked}",
                where=f"{VARIABLE}={text}",
                fix=f"unset it, or set parallel.gpus to {asked.total} or auto",
            )
    return describe_host(asked) if asked else None


def gpus_to_start(config: RunConfig, option: str | None, dry_run: bool) -> dict[str, Any]:
    """Arguments for a start: the machine that a dry run is for, if it is another one. A run's own GPUs must be here."""
    if not dry_run:
        require_here(option)
        return {}
    host = host_to_plan(config, option)
    return {"host": host} if host else {}


def require_here(option: str | None) -> None:
    """UserError where a run is to start on GPUs that this machine does not have."""
    if option is None and os.environ.get(VARIABLE):
        print(f"{VARIABLE} is for `plan` and `--dry-run`: a run uses the GPUs of this machine", file=sys.stderr)
    asked = ask_gpus(option)
    if asked is None:
        return
    from manyhands.facts.gpu_kinds import kind_of
    from manyhands.facts.host import read_host_facts

    host = read_host_facts()
    kinds = [kind_of(gpu.name) for gpu in host.gpus[: asked.total]]
    if kinds == [asked.kind] * asked.total and asked.num_nodes == 1:
        return
    several = "; on several machines start the run on each with --nodes, --node-rank and --rendezvous"
    several *= asked.num_nodes > 1
    here = ", ".join(gpu.name for gpu in host.gpus) or (host.unusable_gpus.found if host.unusable_gpus else "none")
    raise UserError(
        f"a run cannot start on {asked}: this machine does not have them",
        where=f"--gpus {option}",
        why=f"its GPUs: {here}",
        fix="plan for them with `manyhands plan` or --dry-run; --gpus N takes N of this machine's GPUs" + several,
    )
