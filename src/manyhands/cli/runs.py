"""``manyhands runs``: runs of a folder, one, two side by side, how to delete one, their page. Imports no torch."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import count_bytes, read_object, read_rows
from manyhands.core.text import flatten

if TYPE_CHECKING:
    from manyhands.launch.run.folder import RunFolder

app = typer.Typer(
    help="List runs, show one, compare two, delete one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Folder = Annotated[Path, typer.Option("--dir", help="Folder of the runs.")]
Name = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or its folder.")]
RUNS = Path("runs")
PORT = 8765  # of the page
NOT_COMPARED = ("name", "output.dir", "data.cache")  # what any two runs differ in


@dataclass(frozen=True)
class Summary:
    """A run in a line; None for what it has not measured."""

    name: str
    state: str
    model: str
    method: str
    step: int | None
    num_steps: int | None
    loss: float | None  # the newest held-out loss, else of the newest step
    held_out: bool
    changed: float  # seconds since 1970


@app.command("list")
def list_runs(
    place: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="The same as --dir.")] = None,
    folder: Folder = RUNS,
) -> None:
    """List the runs of a folder, the newest first."""
    if place is not None:
        folder = next((path for path in (place, folder / place) if path.is_dir()), place)
    refuse_no_folder(folder)
    if (folder / "run.json").is_file():
        fix = f"manyhands runs show {folder}"
        raise UserError("this is a run, not a folder of runs", where=str(folder), fix=fix)
    found = sorted(find_runs(folder), key=lambda one: -one.changed)
    if not found:
        print(f"no run in {folder}/")
        return
    rows = [("run", "state", "step", "loss", "method", "model", "changed")]
    for one in found:
        step = "-" if one.step is None else f"{one.step:,}" + (f"/{one.num_steps:,}" if one.num_steps else "")
        loss = "-" if one.loss is None else f"{one.loss:.4f}" + ("" if one.held_out else " (train)")
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.changed))
        rows.append((one.name, one.state, step, loss, one.method, one.model, changed))
    print("\n".join(format_table(rows)))


@app.command("show")
def show(run: Name, folder: Folder = RUNS) -> None:
    """Print a run's report, or of an unfinished one what is known."""
    found = open_run(run, folder)
    report = found.path / "report.md"
    if report.exists():
        print(report.read_text(encoding="utf-8", errors="replace"), end="")
        return
    one = summarize(found)
    step = "before its first step" if one.step is None else f"step {one.step:,} of {one.num_steps or '?'}"
    print(f"{one.name}: {one.state}, {step}; {one.method} of {one.model}")
    status = read_status(found)
    if reason := status.get("reason") or status.get("error"):
        print(f"  {reason}")
    losses = [row.get("loss") for row in read_rows(found.metrics, "step")]
    if losses:
        from manyhands.core.units import draw_line

        print(f"  training loss {_number(losses[0])} to {_number(losses[-1])}  {draw_line(_thin(losses))}")


@app.command("compare")
def compare(first: Name, second: Name, folder: Folder = RUNS) -> None:
    """Compare two runs: keys that differ, and what was measured."""
    from manyhands.core.units import draw_line

    runs = [open_run(name, folder) for name in (first, second)]
    same = runs[0].path.name == runs[1].path.name
    names = [str(run.path) if same else run.path.name for run in runs]
    keys = [flatten(run.read_config().model_dump(mode="json")) for run in runs]
    every = dict.fromkeys([*keys[0], *keys[1]])  # a table of names, such as evaluate.data, may be in one of them only
    differing = [key for key in every if keys[0].get(key) != keys[1].get(key) and key not in NOT_COMPARED]
    rows = [("", *names)]
    rows += [(key, *(_text(one[key]) if key in one else "-" for one in keys)) for key in differing]
    measured = [measure(run) for run in runs]
    rows += [(label, *(one[label] for one in measured)) for label in measured[0]]
    print("\n".join(format_table(rows)))
    for name, run in zip(names, runs, strict=True):
        if losses := [row.get("loss") for row in read_rows(run.metrics, "step")]:
            print(f"training loss of {name}: {draw_line(_thin(losses))}")


@app.command("delete")
def delete(
    run: Name, folder: Folder = RUNS, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Delete a run's folder with its checkpoints and results."""
    from manyhands.launch.run.lock import FolderLock

    found = open_run(run, folder)
    path = Path(os.path.abspath(found.path))  # "." cannot be removed by that name
    if path.is_symlink():
        fix = f"manyhands runs delete {shlex.quote(str(path.resolve()))}"
        raise UserError("this is a symbolic link to a run", where=str(found.path), fix=fix)
    lock = FolderLock(found)  # UserError where it is running
    try:
        size = count_bytes(found.path)
        if not yes and not _confirm(f"delete {found.path} ({size / 2**30:.2f} GiB)?"):
            print("nothing was deleted")
            raise typer.Exit(EXIT_FAILED)
        shutil.rmtree(path)
    finally:
        lock.release()
    print(f"deleted {found.path}: {size / 2**30:.2f} GiB")


def _confirm(question: str) -> bool:
    try:
        return typer.confirm(question)
    except typer.Abort:
        if sys.stdin.isatty():  # Ctrl-C
            raise
        raise UserError("no answer on standard input", where=question, fix="add --yes") from None


def refuse_no_folder(folder: Path) -> None:
    """Raise UserError unless ``folder`` exists; the default ``runs/`` may be missing until the first run creates it."""
    if not folder.is_dir() and (folder != RUNS or folder.exists()):
        what = "this is no folder" if folder.exists() else "there is no such folder"
        raise UserError(what, where=str(folder), fix="name the folder that holds the runs, or nothing for runs/")


def find_runs(folder: Path) -> Iterator[Summary]:
    """The runs right below ``folder``; others are not looked at."""
    for path in sorted(folder.glob("*/run.json")):
        from manyhands.launch.run.folder import RunFolder

        try:
            yield summarize(RunFolder(path.parent))
        except (UserError, OSError) as error:
            why = error.what if isinstance(error, UserError) else f"{error.strerror}: {error.filename}"
            print(f"note: {path.parent} is left out: {why}")


def open_run(run: str, folder: Path) -> RunFolder:
    """A run by its name below ``folder``, or by its own folder. UserError where there is none, with those there are."""
    from manyhands.launch.run.folder import RunFolder

    for path in (folder / run, Path(run)):
        if (path / "run.json").exists():
            return RunFolder(path)
    refuse_no_folder(folder)
    names = [path.parent.name for path in sorted(folder.glob("*/run.json"))]
    raise UserError(
        f"there is no run called {run}",
        where=f"{folder}/",
        fix=f"name one of {', '.join(names[:20])}" if names else "name the run's folder, such as path/to/runs/NAME",
    )


def comparable_loss(row: Mapping[str, Any]) -> float | None:
    """The loss of a row of metrics.jsonl by which runs are compared: where it has several terms, the cross-entropy
    alone, as a coefficient may be what differs (``moe.balance``).
    """
    return (row.get("terms") or {}).get("lm", row.get("loss"))


def summarize(run: RunFolder) -> Summary:
    """UserError where run.json cannot be read."""
    changed = max(map(_changed_at, (run.run_json, run.status_json, run.metrics)))
    config, status = run.read_config(), read_status(run)
    steps, evaluations = read_rows(run.metrics, "step"), read_rows(run.metrics, "evaluation")
    newest = evaluations or steps
    report = read_object(run.report_json)
    return Summary(
        name=run.path.name,
        state=str(status.get("state", "planned")),
        model=Path(config.model.name).name,
        method=config.method.name,
        step=steps[-1]["step"] if steps else None,
        num_steps=_find(report, "planned", "steps", int) or _planned_steps(run),
        loss=comparable_loss(newest[-1]) if newest else None,
        held_out=bool(evaluations),
        changed=changed,
    )


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # not written yet, or the run is just being deleted
        return 0.0


def measure(run: RunFolder) -> dict[str, str]:
    """What a run has measured, as text: '-' for what it has not."""
    steps, evaluations = read_rows(run.metrics, "step"), read_rows(run.metrics, "evaluation")
    report = read_object(run.report_json)
    tokens_per_s = _find(report, "measured", "tokens_per_s", int | float)
    training_s = _find(report, "measured", "training_s", int | float)
    peaks = _find(report, "measured", "peak_memory_bytes_by_rank", list) or []
    peak = max((size for size in peaks if isinstance(size, int | float)), default=None)
    losses = [loss for loss in map(comparable_loss, evaluations) if loss is not None]
    return {
        "state": str(read_status(run).get("state", "planned")),
        "steps": f"{steps[-1]['step']:,}" if steps else "-",
        "training loss, last step": _number(comparable_loss(steps[-1]) if steps else None),
        "held-out loss, last": _number(losses[-1] if losses else None),
        "held-out loss, best": _number(min(losses) if losses else None),
        "tokens/s": f"{tokens_per_s:,.0f}" if tokens_per_s else "-",
        "peak memory of a rank": f"{peak / 2**30:.2f} GiB" if peak is not None else "-",
        "training time": f"{training_s:.0f} s" if training_s is not None else "-",
    }


def read_status(run: RunFolder) -> dict[str, Any]:
    """What status.json says, with the state ``killed`` of a run that was."""
    from manyhands.launch.local.heartbeat import read_beats, was_killed

    status = run.read_status()
    return status | ({"state": "killed"} if was_killed(run, status, read_beats(run)) else {})


def format_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell, the first row as titles."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _planned_steps(run: RunFolder) -> int | None:
    newest = read_object(run.plan_json).get("newest")
    steps = read_object(run.path / newest).get("num_steps") if isinstance(newest, str) else None
    return steps if isinstance(steps, int) else None


def _find(report: Mapping[str, Any], section: str, name: str, kind: Any) -> Any:
    """A value of a report, None where it is not there or of another kind."""
    values = report.get(section)
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, kind) else None


def _thin(values: list[float | None], most: int = 60) -> list[float | None]:
    return [values[index * len(values) // most] for index in range(most)] if len(values) > most else values


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def ui(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the runs, or one of them.")] = Path(
        "runs"
    ),
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port on this machine's loopback address.")
    ] = PORT,
) -> None:
    """Open a page with the runs of a folder. Live curves, comparison, plans and data, and a queue.

    Only this machine reaches it, by an address with a token. Runs go on without it."""
    from manyhands.cli.process import refuse_used_port
    from manyhands.ui.server import serve_page

    if (folder / "run.json").is_file():
        folder = folder.resolve().parent
    refuse_no_folder(folder)
    refuse_used_port(port)
    serve_page(folder, port, lambda line: print(line, flush=True))
