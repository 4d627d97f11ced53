"""``manyhands sweep``: runs of one file that differ in the values of a few keys, started by the queue of the page."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import random
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from manyhands.cli.one_line import WHERE, as_overrides, make_run, takes_short_options, write_down
from manyhands.cli.run_file import Short
from manyhands.cli.runs import comparable_loss, format_table, summarize
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import read_object, read_rows, write_atomically, write_json
from manyhands.core.limits import GIB
from manyhands.core.text import report_aside

if TYPE_CHECKING:
    from manyhands.config.read import ParsedFile
    from manyhands.config.schema import RunConfig
    from manyhands.importers.load import LoadedRun
    from manyhands.planner.types import Plan

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})")
OWN = ("name", "output.dir")  # the sweep gives them to its runs
FILE = "sweep.json"
LONG_NAME, TRIES = 80, 200
SAVE_S = 600.0  # that runs get to save their state after Ctrl-C


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. ``values``: of each key that differs, as text."""

    name: str
    values: Mapping[str, str]
    loaded: LoadedRun

    @property
    def config(self) -> RunConfig:
        return self.loaded.config


@takes_short_options
def sweep(
    run: Annotated[str | None, typer.Argument(metavar="RUN.yaml", help="Run file: YAML, TOML or JSON.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="section.key=V,V,...", help="Values to try; one value is an override of all runs."),
    ] = None,
    num_random: Annotated[
        int | None,
        typer.Option("--random", metavar="N", min=1, help="Draw N of the combinations, and from ranges LOW..HIGH."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of --random.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan every run, list them, and exit.")] = False,
    *,
    short: Short,
) -> None:
    """Train all combinations of values, show the best. The best has the lowest held-out loss.

    One run on each GPU where all of them fit one and that is faster, else one after the other on all GPUs. Starting it
    again continues with the runs that have not finished."""
    from manyhands.config.read import read_run_file
    from manyhands.importers.report import summarize as summarize_translation
    from manyhands.launch.run.file import load_for_start

    words = list(overrides or ())
    if run is not None and "=" in run and not Path(run).exists():
        words, run = [run, *words], None
    words = [*as_overrides({key: value for key, value in short.items() if key != "output.dir"}, words)]
    keys, fixed = split_words(words)
    first = [f"{key}={values[0]}" for key, values in keys.items() if not RANGE.fullmatch(values[0])]
    source = make_run({}, [*fixed, *first]) if run is None else read_run_file(Path(run))
    base = load_for_start(source, fixed if run is not None else [*fixed, *first])
    folder = Path(short.get("output.dir", f"{base.config.output.dir}/{base.config.name}-sweep"))
    folder = Path(os.path.abspath(folder.expanduser()))
    for line in (line for one in base.translations for line in summarize_translation(one)):
        report_aside(line)
    trials = list(make_trials(source, fixed, choose(keys, num_random, seed), folder))
    plans: Sequence[Plan] = ()
    if before := place_before(trials, folder):
        gpus, note = before
    else:
        gpus, note, plans = plan_trials(trials)
    print(f"{len(trials)} runs in {folder}, {note}", flush=True)
    if dry_run:
        plans = plans or [plan_trial(on_one_gpu(each.config) if gpus else each.config, each.name) for each in trials]
        rows = [(*each.values.values(), *describe_plan(plan)) for each, plan in zip(trials, plans, strict=True)]
        print("\n".join(format_table([(*keys, "memory per rank", "seconds"), *rows])))
        return
    try:
        carry_out(trials, folder, gpus)
    finally:
        best = show(trials, folder)
    raise typer.Exit(0 if best is not None and all(is_finished(folder, trial) for trial in trials) else EXIT_FAILED)


def split_words(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Keys with several values or a range, and the other words. UserError where there are none of the former."""
    keys: dict[str, list[str]] = {}
    fixed = []
    for word in words:
        key, _, text = word.partition("=")
        values = split_values(text)
        if len(values) == 1 and not RANGE.fullmatch(text):
            fixed.append(word)
            continue
        if key in OWN:
            raise UserError(f"{key} is no key to try values of", where=word, why="the sweep names its runs")
        if key in keys or any(other.startswith(f"{key}=") for other in words if other != word):
            raise UserError(f"{key} is given twice", where=word, fix="give all its values at once")
        if len(set(values)) < len(values) or "" in values:
            raise UserError("a value is empty or given twice", where=word, fix="remove it")
        keys[key] = values
    if not keys:
        raise UserError(
            "no key has several values",
            where="command line",
            fix="write optimizer.learning_rate=1e-5,3e-5, or --random 8 optimizer.learning_rate=1e-5..1e-3",
        )
    return keys, fixed


def split_values(text: str) -> list[str]:
    """At commas outside of brackets and quotes: ``[q_proj, v_proj],all-linear`` are two values."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        if character == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def choose(keys: Mapping[str, Sequence[str]], num_random: int | None, seed: int) -> list[dict[str, str]]:
    """All combinations; with ``num_random`` so many different ones, the same for the same seed."""
    ranges = [key for key, values in keys.items() if any(RANGE.fullmatch(value) for value in values)]
    if num_random is None:
        if ranges:
            raise UserError(
                f"{ranges[0]} has a range", where="command line", why="a grid needs values", fix="add --random N"
            )
        return [dict(zip(keys, values, strict=True)) for values in itertools.product(*keys.values())]
    source, chosen = random.Random(seed), list[dict[str, str]]()
    for _ in range(TRIES * num_random):
        values = {key: draw(source, source.choice(list(keys[key]))) for key in keys}
        if values not in chosen:
            chosen.append(values)
        if len(chosen) == num_random:
            return chosen
    if ranges:
        return chosen
    whole = math.prod(map(len, keys.values()))
    raise UserError(
        f"there are {whole} combinations and not {num_random}",
        where=f"--random {num_random}",
        fix="leave --random out: all of them are tried",
    )


def draw(source: random.Random, text: str) -> str:
    """A value of a range: whole between integers; by its logarithm where the range is positive and spans tenfold."""
    found = RANGE.fullmatch(text)
    if found is None:
        return text
    low, high = map(float, found.groups())
    if low >= high:
        raise UserError("the range is empty", where=text, fix="write LOW..HIGH")
    by_logarithm = low > 0 and high / low >= 10
    value = math.exp(source.uniform(math.log(low), math.log(high))) if by_logarithm else source.uniform(low, high)
    is_whole = all(re.fullmatch(r"[+-]?\d+", end) for end in found.groups())
    return str(round(value)) if is_whole else f"{value:.3g}"


def make_trials(
    source: ParsedFile, fixed: Sequence[str], chosen: Sequence[Mapping[str, str]], folder: Path
) -> Iterator[Trial]:
    """Reads each run. UserError for a value that its key does not take, for one that is written in two ways, and for
    runs in the folder that are others.
    """
    from manyhands.launch.run.file import load_for_start
    from manyhands.launch.run.resume import find_run, folder_of

    names: dict[str, str] = {}
    for values in chosen:
        name = name_of(values)
        own = [f"output.dir={folder}", f"name={name}"]
        words = [word for word in fixed if word.partition("=")[0] not in OWN]
        loaded = load_for_start(source, [*words, *(f"{key}={value}" for key, value in values.items()), *own])
        other = names.setdefault(loaded.config.model_copy(update={"name": ""}).model_dump_json(), name)
        if other != name:
            why = "a value is written in two ways"
            raise UserError("two runs would be the same", where=f"{other}, {name}", why=why, fix="give it once")
        try:
            find_run(folder_of(loaded.config), loaded.config)
        except UserError as error:
            error.fix = "restore what has changed to continue this sweep, or give it another folder with -o FOLDER"
            raise
        yield Trial(name, values, write_down(loaded) if source.where == WHERE else loaded)


def name_of(values: Mapping[str, str]) -> str:
    """``learning_rate-1e-5-rank-8``: follows from the values, so a larger sweep finds a smaller one's runs."""
    from manyhands.importers.translation import clean_name

    text = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in values.items())
    name = clean_name(text)
    if name == text and len(name) <= LONG_NAME:
        return name
    full = ",".join(f"{key}={value}" for key, value in values.items())
    return f"{name[:LONG_NAME]}-{hashlib.sha256(full.encode()).hexdigest()[:6]}"


def place_before(trials: Sequence[Trial], folder: Path) -> tuple[list[str], str] | None:
    """What ``plan_trials`` has found when this sweep was started before: runs that are left at work take no memory from
    a plan. None where it was not, or with fewer runs, or on other GPUs.
    """
    from manyhands.facts.host import read_host_facts
    from manyhands.ui.queue import Queue

    runs = read_object(folder / FILE).get("runs")
    known = {run.get("name") for run in runs if isinstance(run, dict)} if isinstance(runs, list) else set()
    gpus = Queue(folder).read()["gpus"]
    if any(trial.name not in known for trial in trials) or set(gpus) - {gpu.uuid for gpu in read_host_facts().gpus}:
        return None
    return gpus, f"one on each of {len(gpus)} GPUs, as before" if gpus else "one after the other, as before"


def plan_trials(trials: Sequence[Trial]) -> tuple[list[str], str, list[Plan]]:
    """The GPUs of which each gets runs of its own, none where all runs use the whole machine; that in words; and the
    plan of each run. UserError for a run that does not fit the machine.
    """
    from manyhands.facts.host import read_host_facts

    host = read_host_facts()
    uuids = [gpu.uuid for gpu in host.gpus]
    whole = [plan_trial(trial.config, trial.name) for trial in trials]
    apart = "one after the other"
    asked = {trial.config.parallel.gpus for trial in trials}
    if len(uuids) < 2 or not all(uuids) or asked - {"auto", 1}:
        return [], apart, whole
    uuids = uuids[: len(trials)]
    alone = f"one on each of {len(uuids)} GPUs"
    if asked == {1}:
        return uuids, alone, whole
    try:
        single = [plan_trial(on_one_gpu(trial.config), trial.name) for trial in trials]
    except UserError as error:
        return [], f"{apart} on all {len(host.gpus)} GPUs: one GPU is too small ({error.what})", whole
    together, beside = (sum(plan.time.total_s for plan in plans if plan.time) for plans in (whole, single))
    rounds = math.ceil(len(trials) / len(uuids))
    if together and beside and together < rounds * beside / len(trials):
        return [], f"{apart} on all {len(host.gpus)} GPUs, which the plans expect to be faster than one on each", whole
    return uuids, alone, single


def describe_plan(plan: Plan) -> tuple[str, str]:
    """Planned memory of a rank and seconds of the run, as ``manyhands plan`` has them."""
    memory = f"{plan.memory.total / GIB:.1f} of {plan.memory.limit / GIB:.1f} GiB"
    return memory, f"{plan.time.total_s:,.0f}" if plan.time else "not known"


def on_one_gpu(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"gpus": 1})})


def plan_trial(config: RunConfig, name: str) -> Plan:
    from manyhands.launch.run.prepare import plan_here

    try:
        return plan_here(config, report=lambda line: None)
    except UserError as error:
        error.where = f"{name}: {error.where}" if error.where else name
        raise


def is_finished(folder: Path, trial: Trial) -> bool:
    from manyhands.launch.run.resume import find_run, folder_of

    return find_run(folder_of(trial.config), trial.config) == "finished"


def carry_out(trials: Sequence[Trial], folder: Path, gpus: Sequence[str]) -> None:
    """Runs what has not finished, each from a file with its keys: the sweep's own may change meanwhile. Ctrl-C and
    SIGTERM reach the runs, which save and end, and raise ``Stopped``.
    """
    from manyhands.launch.local.watch import raise_when_stopped
    from manyhands.launch.run.folder import RunFolder
    from manyhands.ui.queue import Queue, is_machine_free, is_open, run_queue

    queue = Queue(folder)
    one = ["parallel.gpus=1"] if gpus else []
    numbers = {trial.name: f"{place} of {len(trials)}" for place, trial in enumerate(trials, 1)}
    loaded = {trial.name: trial.loaded for trial in trials}

    def report(item: Mapping[str, Any]) -> None:
        title = item["title"]
        if "ended" not in item:
            print(f"{title}: started, {numbers.get(title, 'of before')}; log: {queue.log(item['id'])}", flush=True)
            return
        run = RunFolder(folder / title)
        if title in loaded and run.run_json.exists():
            run.write_origin(loaded[title])
        state, loss, *_ = describe(folder, title)
        print(f"{title}: {state}, loss {loss}", flush=True)

    with queue.change() as state:
        state |= {"gpus": list(gpus), "paused": False}
        state["items"] = [item for item in state["items"] if is_open(item) and "started" in item]
        at_work = {item["title"] for item in state["items"]}
        for trial in trials:
            if trial.name not in at_work and not is_finished(folder, trial):
                file = queue.logs / f"{trial.name}.json"
                write_atomically(file, trial.config.model_dump_json(indent=2, exclude_unset=True) + "\n")
                queue.append(state, ["train", str(file), *one], trial.name)
    write_table(folder, rank(trials, folder))
    try:
        with raise_when_stopped("stopped the sweep and its runs", "run the same command again to continue them"):
            done = run_queue(queue, is_machine_free, on_change=report)
    except UserError:
        queue.pause(True)  # else a page that is opened on the folder would go on
        stop_runs(queue.read()["items"])
        raise
    if not done:
        raise UserError(
            "another process starts the runs of this sweep",
            where=str(folder),
            fix=f"watch it with `manyhands ui {folder}`, or wait until it has ended",
        )


def stop_runs(items: Sequence[Mapping[str, Any]]) -> None:
    from manyhands.ui.queue import is_open

    processes = []
    for item in items:
        if "pid" in item and is_open(item):
            with contextlib.suppress(psutil.Error):
                processes.append(psutil.Process(item["pid"]))
                processes[-1].send_signal(signal.SIGTERM)
    psutil.wait_procs(processes, timeout=SAVE_S)


def describe(folder: Path, name: str) -> tuple[str, str, bool, float | None]:
    """State of a run, the loss of what it saves as text, whether that is held out, and as a number."""
    from manyhands.launch.run.folder import RunFolder

    run = RunFolder(folder / name)
    if not run.run_json.exists():
        return "not started", "-", False, None
    found = summarize(run)
    loss = found.loss
    if found.held_out and run.read_config().checkpoint.keep_best:
        losses = map(comparable_loss, read_rows(run.metrics, "evaluation"))
        loss = min((each for each in losses if each is not None), default=loss)
    return found.state, "-" if loss is None else f"{loss:.4f}", found.held_out, loss


@dataclass(frozen=True)
class Row:
    """A run in the table; ``loss`` is None where it does not take part."""

    trial: Trial
    state: str
    text: str
    held_out: bool
    loss: float | None


def rank(trials: Sequence[Trial], folder: Path) -> list[Row]:
    """The best first: finished runs by their loss, those with held-out rows before others."""
    rows = []
    for trial in trials:
        state, text, held_out, loss = describe(folder, trial.name)
        takes_part = state == "finished" and loss is not None and math.isfinite(loss)
        rows.append(Row(trial, state, text, held_out, loss if takes_part else None))
    return sorted(rows, key=lambda row: (row.loss is None, not row.held_out, row.loss or 0.0))


def write_table(folder: Path, rows: Sequence[Row]) -> str | None:
    """Writes ``sweep.json`` and returns the best run's name."""
    best = rows[0].trial.name if rows[0].loss is not None else None
    runs = [
        {"name": row.trial.name, "values": dict(row.trial.values), "state": row.state, "loss": row.loss} for row in rows
    ]
    by = "held-out loss" if any(row.held_out for row in rows) else "training loss"
    write_json(folder / FILE, {"by": by, "best": best, "runs": runs})
    return best


def show(trials: Sequence[Trial], folder: Path) -> str | None:
    """Prints the table, writes it into the folder, and returns the best run's name."""
    rows = rank(trials, folder)
    held_out = any(row.held_out for row in rows)
    titles = [*(key.rpartition(".")[2] for key in trials[0].values), "state"]
    table = [(*row.trial.values.values(), row.state, row.text) for row in rows]
    print("\n".join(format_table([(*titles, "held-out loss" if held_out else "training loss"), *table])))
    best = write_table(folder, rows)
    if best is not None:
        print(f"best: {folder / best}" + ("" if held_out else ", by the loss of its last step: no rows are held out"))
    return best
