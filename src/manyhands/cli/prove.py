"""``manyhands prove``: the first steps of a run under several layouts, loss and gradient norm side by side. Imports no
torch.

Every layout trains the same samples from the same weights, by `train` itself, in a folder that is removed afterwards;
it is ended as soon as its steps are logged, so nothing is saved. The bounds are those of docs/equality.md.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from manyhands.cli.run_file import Overrides, RunFile, load_run
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import read_rows
from manyhands.core.text import report_aside
from manyhands.core.units import count_of

# Largest relative deviation allowed of the loss and of the gradient norm; why: docs/equality.md.
BOUNDS = {"float64": (1e-9, 1e-9), "float32": (1e-5, 1e-5), "bfloat16": (1e-3, 2e-2)}
STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
POLL_S = 0.2


@dataclass(frozen=True)
class LayoutRun:
    """A layout to try: its name as it was asked for, and the keys that make it."""

    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class LossCurve:
    """What a layout's steps were."""

    name: str
    losses: tuple[float | None, ...]  # None: not finite
    norms: tuple[float | None, ...]


def prove(
    run: RunFile,
    overrides: Overrides = None,
    layouts: Annotated[
        str, typer.Option("--layouts", help="Comma-separated: ddp:2 (strategy:processes), accumulation:4.")
    ] = "single:1,ddp:2,fsdp:2,accumulation:2",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compare.")] = 5,
    limit: Annotated[float, typer.Option("--limit", min=1, help="Seconds that one layout may take.")] = 1800,
) -> None:
    """Compare first steps under several layouts. Their losses and gradient norms; exit code 1 if one deviates."""
    batch, dtype = plan_batch(run, overrides)
    runs = parse_layouts(layouts, batch)
    curves = []
    with tempfile.TemporaryDirectory(prefix="manyhands-prove-") as folder:
        for layout_run in runs:
            report_aside(f"{layout_run.name}: {' '.join(layout_run.keys)}")
            name = layout_run.name.replace(":", "-")
            fixed = [f"output.dir={folder}", f"name={name}", "evaluate.at_start=false"]
            fixed += ["evaluate.every_steps=0", "log.every_steps=1", "log.tensorboard=false"]
            fixed += [f"log.{tracker}=null" for tracker in ("wandb", "mlflow", "trackio")]  # accounts are for real runs
            if batch is not None:
                fixed.append(f"batch.samples={batch}")
            words = ["train", str(run), *(overrides or []), *fixed, *layout_run.keys]
            command = [sys.executable, "-m", "manyhands", *words]
            curves.append(run_steps(command, Path(folder) / name, layout_run.name, steps, limit))
    rows, fine = compare(curves, dtype)
    print("\n".join(rows))
    if not fine:
        raise typer.Exit(EXIT_FAILED)


def plan_batch(run: Path, overrides: list[str] | None) -> tuple[int | None, str]:
    """Samples of a step where the plan chooses them, so that all layouts take as many; and the compute dtype."""
    from manyhands.launch.run.prepare import gather_facts
    from manyhands.planner.search import plan as make_plan

    config = load_run(run, overrides).config
    made = make_plan(config, gather_facts(config, identify=False, report=report_aside))
    return made.batch_samples, made.layout.compute_dtype


def parse_layouts(text: str, batch: int | None) -> list[LayoutRun]:
    """UserError for a layout that is none, or that a batch of so many samples does not fit."""
    runs = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        kind, _, number = name.partition(":")
        count = int(number) if number.isdigit() else 0
        if count < 1 or kind not in (*STRATEGIES, "accumulation"):
            raise UserError(
                f"{name!r} is no layout",
                where="--layouts",
                fix=f"write {', '.join(f'{one}:2' for one in STRATEGIES[1:4])} (strategy:processes) or accumulation:4",
            )
        if kind == "accumulation":
            if batch is None or batch % count:
                raise UserError(
                    f"{name}: a step cannot be cut into {count} equal micro-batches",
                    where="--layouts",
                    why="it is sized in tokens or packs" if batch is None else f"it has {count_of(batch, 'sample')}",
                    fix="choose a divisor of batch.samples",
                )
            keys = ["parallel.gpus=1", "data.packing=false", f"batch.micro_samples={batch // count}"]
        else:
            keys = [f"parallel.strategy={kind}", f"parallel.gpus={count}"]
        runs.append(LayoutRun(name, tuple(keys)))
    if len(runs) < 2:
        raise UserError("one layout has nothing to be compared with", where="--layouts", fix="name two or more")
    return runs


def run_steps(command: Sequence[str], folder: Path, name: str, steps: int, limit_s: float) -> LossCurve:
    """Starts ``train`` and ends it when it has logged its steps. UserError with its last lines where it fails."""
    import psutil

    with tempfile.TemporaryFile() as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        end = time.monotonic() + limit_s
        try:
            rows: list[dict[str, Any]] = []
            while len(rows) < steps:
                ended = process.poll() is not None
                rows = read_rows(folder / "metrics.jsonl", "step")
                if len(rows) >= steps or (ended and process.returncode == 0 and rows):
                    break
                if ended or time.monotonic() > end:
                    output.seek(0)
                    lines = output.read().decode(errors="replace").strip().splitlines()[-12:]
                    why = f"exit code {process.returncode}" if ended else f"no {steps} steps in {limit_s:.0f} s"
                    raise UserError(
                        f"the run cannot take {steps} steps as {name}",
                        where=f"--layouts {name}",
                        why=why,
                        details=lines,
                        exit_code=EXIT_FAILED,
                    )
                time.sleep(POLL_S)
        finally:
            _end(process)
    rows = rows[:steps]
    return LossCurve(name, tuple(row["loss"] for row in rows), tuple(row["grad_norm"] for row in rows))


def compare(curves: Sequence[LossCurve], dtype: str) -> tuple[list[str], bool]:
    """The table, and whether every layout stays within the bounds of ``dtype`` of the first one."""
    loss_bound, norm_bound = BOUNDS[dtype]
    first, fine = curves[0], True
    shown = [f"{'step':>4}  " + "  ".join(f"{curve.name:>24}" for curve in curves)]
    for step in range(min(len(curve.losses) for curve in curves)):
        cells = [f"{_show(curve.losses[step], '.6f')} {_show(curve.norms[step], '.4f'):>11}" for curve in curves]
        shown.append(f"{step + 1:>4}  " + "  ".join(f"{cell:>24}" for cell in cells))
    shown.append(f"loss and gradient norm, computed in {dtype}; bounds {loss_bound:g} and {norm_bound:g}")
    for curve in curves[1:]:
        loss, norm = (
            max(_deviation(mine, its) for mine, its in zip(getattr(curve, what), getattr(first, what), strict=False))
            for what in ("losses", "norms")
        )
        within = loss <= loss_bound and norm <= norm_bound
        fine &= within
        verdict = "within the bounds" if within else "OUTSIDE THE BOUNDS"
        shown.append(f"{curve.name} against {first.name}: loss {loss:.1e}, gradient norm {norm:.1e}: {verdict}")
    return shown, fine


def _show(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _deviation(found: float | None, expected: float | None) -> float:
    if found is None or expected is None:  # not finite
        return 0.0 if found is expected else float("inf")
    return abs(found - expected) / abs(expected) if expected else float(found != expected)


def _end(process: Any) -> None:
    """The launcher and all its ranks, without a checkpoint: what they have done is not wanted."""
    import psutil

    try:
        processes = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for one in processes:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=30)
