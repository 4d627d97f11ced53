"""From measured rows of ``benchmarks.foresight`` to today's estimates, to fitted constants, and to a table.

Every row holds what the estimates are functions of, so that today's estimate is compared with any run measured before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.foresight_cases import CASES, HELD_OUT
from manyhands import families
from manyhands.facts.gpu_kinds import kind_of
from manyhands.facts.model import MLP_OUTPUT_NORMS
from manyhands.facts.types import Calibration, GpuKind, ModelFacts
from manyhands.planner.layout import Layout, Mesh
from manyhands.planner.memory.host import keep_on_device
from manyhands.planner.memory.input import EstimateInput, TrainedWeights
from manyhands.planner.memory.terms import estimate_terms
from manyhands.planner.time.input import TimeInput
from manyhands.planner.time.rates import REFERENCE_KIND, Fitted, load_fitted, rates_of, rates_of_kind
from manyhands.planner.time.terms import estimate_step
from manyhands.planner.time.work import work_of_lengths

GIB = 2**30
# Runs of code that has been changed where they show: their cases are to be measured again
OUTDATED = {
    # the first step's gradients lay apart for good (15 GiB); 127 more launches in each block's backward pass
    (
        "llama8b,full,2x1x4096,full,linear=fp8,activation_checkpointing=selective,offload_activations=False,"
        "reshard_after_forward=False,strategy=fsdp",
        "20261125T104916",
    ),
}
FAR = 0.25  # an error beyond it (of a logarithm) is a term that is missing, for which no constant makes up
PRIOR = 0.002  # how strongly a constant is drawn to its present value, where rows say little of it
MAX_SHARE = 0.9  # of a datasheet's rate: elementwise kernels alone reach 4.3 of an H200's 4.8 TB/s
TIME_FILE = Path(__file__).parents[1] / "src" / "manyhands" / "planner" / "time" / "fitted.toml"


INTRODUCTION = (
    "`python -m benchmarks.foresight report ROWS ...` writes this page from measured rows "
    "(`benchmarks/results/*foresight-*.jsonl`). Every row holds what the estimate is a function of, and today's code "
    "estimates it again. Memory is compared with the most that a process held, in torch's allocator and outside of it, "
    "on the rank that held most; for packs of mixed lengths at the largest pack that ran. Seconds, planned from "
    "datasheets and the constants of `src/manyhands/planner/time/fitted.toml`, are compared with the median of the "
    "timed steps; where lengths are mixed, each step is planned separately, and the step with the median error counts. "
    "An error is planned over measured, less one: below zero the plan was too low."
)


@dataclass(frozen=True)
class Measured:
    """One run: today's estimate, and what it took. ``time`` has no rates yet: they depend on what is fitted."""

    row: dict[str, Any]
    estimate: EstimateInput
    time: TimeInput
    kind: GpuKind
    steps: tuple[tuple[TimeInput, float], ...] = ()  # where lengths are mixed: each timed step, and its seconds
    calibration: Calibration | None = None  # what the same call measured first
    is_calibrated: bool = False  # seconds are planned from that

    @property
    def group(self) -> str:
        """What its error says: of shapes or of a kind of GPU that nothing was fitted to, or of the fit itself."""
        if self.kind.name != REFERENCE_KIND:
            return f"{self.kind.name}, datasheet alone"
        return "held out" if self.row["shape"] in HELD_OUT else "fitted"

    @property
    def held_gib(self) -> float:
        """Reserved by torch's allocator and outside of it, of the rank that holds most."""
        ranks = [stages for stages in self.row["ranks"] if stages.get("last_step")]
        return max(stages["last_step"]["peak_reserved"] + stages["outside_gib"] for stages in ranks)

    @property
    def planned_gib(self) -> float:
        terms = estimate_terms(self.estimate)
        return sum((keep_on_device(self.estimate, terms) if self.estimate.offloads else terms).values()) / GIB

    def seconds(self, fitted: Fitted, time: TimeInput | None = None) -> dict[str, float]:
        rates = rates_of(self.kind, self.calibration if self.is_calibrated else None, fitted)
        return estimate_step(replace(time or self.time, rates=rates, fitted=fitted))

    def compare_seconds(self, fitted: Fitted) -> tuple[float, float]:
        """Planned and measured: of the median of the timed steps, or where each has other lengths of the one whose
        error is the median."""
        if not self.steps:
            return sum(self.seconds(fitted).values()), self.row["step_s"]
        pairs = [(sum(self.seconds(fitted, time).values()), taken) for time, taken in self.steps]
        return sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]


def read_rows(files: Sequence[Path]) -> list[Measured]:
    """The newest row of each case on each kind of GPU that has all that is needed."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]
    rows = [row for row in rows if (row.get("case"), row.get("run")) not in OUTDATED]
    newest = {(row["case"], row["device"]): row for row in rows if "input" in row and row.get("ranks", [{}])[0]}
    calibrations = {row["run"]: row["calibration"] for row in rows if "calibration" in row}
    found = [rebuild(row, calibrations.get(row["run"])) for row in newest.values()]
    return [row for row in found if row is not None]


def rebuild(row: dict[str, Any], calibration: dict[str, Any] | None) -> Measured | None:
    """None of a run on a device that is in no list."""
    kind = kind_of(row["device"])
    if kind is None:
        return None
    given = dict(row["input"])
    model = ModelFacts.model_validate({"folder": "", "files": {}} | given.pop("model"))
    if model.num_windowed_layers is None and model.sliding_window is not None and "gemma3" in model.model_type:
        model = model.model_copy(update={"num_windowed_layers": model.num_layers - model.num_layers // 6})
    if set(MLP_OUTPUT_NORMS) & set(families.find(model.model_type).norms):  # a fact that older rows do not have
        model = model.model_copy(update={"norms_mlp_output": True})
    for gone in ("snapshots", "copies_snapshots"):  # false in all rows
        given.pop(gone, None)
    layout = given.pop("layout")
    attention = given.pop("attention")
    trained = given.pop("partially_trained")
    known = bool(families.find(model.model_type).known_modules) and (
        given["num_adapter_parameters"] > 0 or given["fp8_blocks"]
    )
    mesh = {axis: size for axis, size in layout["mesh"].items() if axis != "expert"}  # of rows before 2026-11-28
    estimate = EstimateInput(
        model=model,
        layout=Layout(**layout | {"mesh": Mesh(**mesh)}),
        partially_trained=TrainedWeights(**trained) if trained else None,
        **{"fuses_modules": known} | given,
    )
    warm = len(row["work"]) - row["num_timed_steps"] if len(row["work"]) > 1 else 0
    every = [[[lengthen(part) for part in micro] for micro in step] for step in row["work"]]
    estimate, steps = at_largest(estimate, every), every[warm:]
    flash4 = any("flash_attncute" in name.lower() for name in row.get("attention_kernels", []))
    time = TimeInput(
        estimate=estimate,
        work=work_of_lengths(steps, estimate.layout, model.sliding_window),
        rates=rates_of_kind(kind, load_fitted()),
        fitted=load_fitted(),
        attention=attention,
        num_local=row["gpus"],
        has_flash4=flash4,
    )
    one_by_one = ()
    if len(row["work"]) > 1 and len(row.get("steps_s", ())) == len(steps):
        layout, window = estimate.layout, model.sliding_window
        works = (work_of_lengths([step], layout, window) for step in steps)
        one_by_one = tuple((replace(time, work=work), taken) for work, taken in zip(works, row["steps_s"], strict=True))
    known_rates = {name: value for name, value in (calibration or {}).items() if name in Calibration.model_fields}
    return Measured(row, estimate, time, kind, one_by_one, Calibration(**known_rates) if known_rates else None)


def at_largest(estimate: EstimateInput, steps: list[list[list[np.ndarray]]]) -> EstimateInput:
    """The estimate of the largest pack that ran: the plan's is of a full one, which few steps may not have. Nor may
    any step have had several.
    """
    works = [work_of_lengths([step], estimate.layout, None) for step in steps]
    largest = max(micro.tokens for work in works for micro in work.micros)
    accumulates = estimate.layout.accumulates and any(work.num_micro > 1 for work in works)
    layout = replace(estimate.layout, full_micro_tokens=int(largest), accumulates=accumulates)
    return replace(estimate, layout=layout)


def lengthen(lengths: list[int]) -> np.ndarray:
    """``[-3, 512]`` as three samples of 512 tokens."""
    if lengths and lengths[0] < 0:
        return np.full(-lengths[0], lengths[1], dtype=np.int64)
    return np.array(lengths, dtype=np.int64)


def fit(rows: Sequence[Measured], fitted: Fitted, *, steps: int = 20) -> Fitted:
    """Constants that make the logarithms of predicted over measured seconds small (absolute errors to the power of 1.5,
    by reweighted least squares after Levenberg and Marquardt), near the present ones.
    """
    names = [part.name for part in fields(Fitted)]
    begin = np.log([getattr(fitted, name) for name in names])
    most = np.log([MAX_SHARE if name.endswith("_share") else np.inf for name in names])

    def constants(point: np.ndarray) -> Fitted:
        return replace(fitted, **{name: float(np.exp(value)) for name, value in zip(names, point, strict=True)})

    def errors(point: np.ndarray) -> np.ndarray:
        now = constants(point)
        return np.array([np.log(planned / taken) for planned, taken in (row.compare_seconds(now) for row in rows)])

    def loss(point: np.ndarray) -> float:
        return float(
            (np.minimum(np.abs(errors(point)), FAR) ** 1.5).sum() + PRIOR * len(rows) * ((point - begin) ** 2).sum()
        )

    point, best, damping = begin, loss(begin), 1e-2
    for _ in range(steps):
        now = errors(point)
        slopes = np.stack([(errors(point + 1e-3 * axis) - now) / 1e-3 for axis in np.eye(len(names))], axis=1)
        weights = np.where(np.abs(now) < FAR, np.maximum(np.abs(now), 0.005) ** -0.5, 0.0)
        normal = slopes.T @ (slopes * weights[:, None]) + PRIOR * len(rows) * np.eye(len(names))
        right = slopes.T @ (now * weights) + PRIOR * len(rows) * (point - begin)
        for _ in range(8):
            tried = np.minimum(point - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), right), most)
            if (value := loss(tried)) < best:
                point, best, damping = tried, value, damping / 3
                break
            damping *= 4
        else:
            break
    return constants(point)


def write_fitted(fitted: Fitted, file: Path = TIME_FILE) -> None:
    """The values in place; the comments stay where they are."""
    text = file.read_text()
    for name, value in asdict(fitted).items():
        text = re.sub(rf"^{name} = \S+ *# ", f"{name} = {value:.4g}".ljust(34) + "# ", text, flags=re.MULTILINE)
    file.write_text(text)


def errors_of(rows: Sequence[Measured], fitted: Fitted) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of memory and of seconds: (planned - measured) / measured."""
    memory = [row.planned_gib / row.held_gib - 1 for row in rows]
    seconds = [planned / taken - 1 for planned, taken in (row.compare_seconds(fitted) for row in rows)]
    return np.array(memory), np.array(seconds)


def by_group(rows: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Held-out shapes, other GPUs, and what was fitted to; within a group by number of GPUs and name."""
    ordered = sorted(rows, key=lambda row: (row.row["gpus"], row.row["case"]))
    groups = sorted({row.group for row in rows}, key=lambda name: (name != "held out", name == "fitted", name))
    return {name: [row for row in ordered if row.group == name] for name in groups}


def describe_errors(errors: np.ndarray) -> str:
    if not len(errors):
        return "none"
    sizes = np.abs(errors)
    return (
        f"{len(errors)} rows: median {np.median(sizes):.1%}, 95th percentile {np.quantile(sizes, 0.95):.1%}, "
        f"from {errors.min():+.1%} to {errors.max():+.1%}"
    )


def print_rows(rows: Sequence[Measured], fitted: Fitted) -> None:
    """Each row's errors and terms, beside the kernels' measured seconds by kind."""
    for row in rows:
        seconds, measured = row.seconds(fitted), row.row
        total, taken = row.compare_seconds(fitted)
        shown = " ".join(f"{name[:7]} {1000 * value:.0f}" for name, value in seconds.items() if value > 5e-4)
        kernels = " ".join(f"{name[:7]} {value:.0f}" for name, value in measured.get("kernels_ms", {}).items())
        print(
            f"{row.group}: {measured['case']:.100}\n"
            f"    memory {row.planned_gib:6.2f} of {row.held_gib:6.2f} GiB {row.planned_gib / row.held_gib - 1:+.1%}"
            f" (allocated {allocated_gib(row):.2f} of {measured['peak_allocated_gib']})"
            f"   step {total:.4f} of {taken:.4f} s {total / taken - 1:+.1%}\n"
            f"    planned ms: {shown}\n    kernels ms: {kernels}"
        )


def allocated_gib(row: Measured) -> float:
    terms = estimate_terms(row.estimate)
    outside = terms["overhead"] + terms["pools"] - 2**26
    return row.planned_gib - outside / GIB


def report(rows: Sequence[Measured], fitted: Fitted) -> str:
    """``docs/planner-accuracy.md``."""
    lines = [
        "# How accurate plans are",
        "",
        INTRODUCTION,
        "",
        f"{len({row.row['case'] for row in rows})} configurations of {len({row.row['shape'] for row in rows})} shapes "
        f"and {len({row.estimate.model.model_type for row in rows})} families were measured, of {len(CASES)} in "
        f"`benchmarks/foresight_cases.py`; constants were fitted on {REFERENCE_KIND}s, to no shape that is held out.",
        "",
        "| | memory | seconds a step |",
        "|---|---|---|",
    ]
    for name, some in by_group(rows).items():
        memory, seconds = errors_of(some, fitted)
        lines.append(f"| {name} | {describe_errors(memory)} | {describe_errors(seconds)} |")
        if calibrated := [replace(row, is_calibrated=True) for row in some if row.calibration is not None]:
            _, seconds = errors_of(calibrated, fitted)
            _, before = errors_of([replace(row, is_calibrated=False) for row in calibrated], fitted)
            lines.append(f"| {name}, calibrated by the same call | | {describe_errors(seconds)} |")
            lines.append(f"| the same, from datasheets | | {describe_errors(before)} |")
    lines += ["", "| configuration | kind | GPUs | GiB planned, held | error | s planned, measured | error |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in (row for some in by_group(rows).values() for row in some):
        (total, taken), measured = row.compare_seconds(fitted), row.row
        lines.append(
            f"| {measured['case'].replace(',', ', ')} | {row.group} | "
            f"{measured['gpus']} x {measured['device'].removeprefix('NVIDIA ')} | {row.planned_gib:.2f}, "
            f"{row.held_gib:.2f} | {row.planned_gib / row.held_gib - 1:+.1%} | {total:.4g}, {taken:.4g} | "
            f"{total / taken - 1:+.1%} |"
        )
    missing = [case.name for case in CASES if case.name not in {row.row["case"] for row in rows}]
    if missing:
        lines += ["", f"Not measured yet, {len(missing)}: {'; '.join(name.replace(',', ', ') for name in missing)}."]
    return "\n".join(lines) + "\n"
