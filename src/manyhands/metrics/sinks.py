"""Where measurements go: rows in metrics.jsonl, TensorBoard, a line or a bar for the person who waits; and what one
rank's device holds.

Sinks are hooks of rank 0. They know results and never the model; ``open_sinks`` is the one place that chooses them.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from manyhands.core.files import write_atomically
from manyhands.core.limits import GIB
from manyhands.core.text import code_block
from manyhands.training.types import Evaluation, Hook, StepResult, TrainState

Outcome = Literal["finished", "interrupted", "failed"]
Devices = Sequence[Mapping[str, float]]  # what ``meters.Meter.read`` gave on each rank, in rank order


class Sink(Hook):
    def record_devices(self, step: int, devices: Devices) -> None:
        """Called just before ``after_step`` of the same step, at steps that are logged."""

    def show_progress(self, stage: str, done: int, total: int) -> None:
        """What the run does between steps and how much is done; ``done == total`` ends it."""

    def close(self, outcome: Outcome = "finished") -> None:
        """Called once, however training ended."""


class JsonlSink(Sink):
    """JSON lines, ``kind`` is ``step``, ``evaluation`` or ``checkpoint``; numbers that are not finite are null."""

    def __init__(
        self, path: Path, *, every_steps: int = 1, resumed_at: int = 0, evaluated_at: int | None = None, run: str = ""
    ) -> None:
        """``run``: which one the rows are of; those of another are kept aside (``path``.other)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        last_evaluation = resumed_at if evaluated_at is None else evaluated_at
        last = {"step": resumed_at, "evaluation": last_evaluation, "checkpoint": resumed_at}
        self.run = run
        self.lost = _take_back(path, last if resumed_at else {}, every_steps, run)  # what was damaged; nothing if empty
        self.every_steps = every_steps
        self._file = open(path, "a", encoding="utf-8")
        self._devices: Devices = []

    def record_devices(self, step: int, devices: Devices) -> None:
        self._devices = devices

    def after_step(self, state: TrainState, result: StepResult) -> None:
        if result.step % self.every_steps == 0:
            self._write({"kind": "step", **asdict(result), "devices": list(self._devices)})

    def after_evaluation(self, state: TrainState, evaluation: Evaluation) -> None:
        samples = [{"prompt": prompt, "answer": answer} for prompt, answer in evaluation.samples]
        self._write({"kind": "evaluation", **evaluation.to_row(), "samples": samples})

    def after_checkpoint(self, state: TrainState, folder: Path) -> None:
        self._write({"kind": "checkpoint", "step": state.step, "folder": str(folder)})

    def close(self, outcome: Outcome = "finished") -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self._put(without_nan({**row, "time": round(time.time(), 3), **({"run": self.run} if self.run else {})}))

    def _put(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


def without_nan(value: Any) -> Any:
    """Return the value with null in place of numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def _take_back(path: Path, last: Mapping[str, int], every_steps: int, run: str) -> str:
    """Removes rows beyond the ``last`` step of their kind, which will be written again, and a last line that was cut
    off when the run was killed. A kind that is not named loses all. Rows of another run than ``run`` are removed, once
    the file has been copied. Returns what is missing of the others, in words.
    """
    kept, steps, num_broken, num_foreign = [], [0], 0, 0
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in io.StringIO(text):  # str.splitlines would also cut a row at U+2028 and the like inside an answer
        try:
            row = json.loads(line)
            kind, step = row["kind"], row["step"]
            if row.get("run", run) != run:
                num_foreign += 1
                continue
            counts = step <= last.get(kind, -1)
        except (ValueError, KeyError, TypeError):
            num_broken += line.endswith("\n")
            continue
        if counts and line.endswith("\n"):
            kept.append(line)
            steps += [step] * (kind == "step")
    if num_foreign:
        aside = path.with_name(f"{path.name}.other")
        shutil.copyfile(path, aside)
        write_atomically(path, "".join(kept))
        return f"{path.name} had rows of another run ({num_foreign}), kept in {aside.name}"
    if path.exists():
        write_atomically(path, "".join(kept))
    widest = max((after - before for before, after in itertools.pairwise(steps)), default=0)
    if last.get("step", 0) - steps[-1] >= max(every_steps, widest):
        return f"{path.name} has no steps from {steps[-1] + 1} to {last['step']}"
    return f"{path.name} had damaged lines ({num_broken})" if num_broken and last else ""


def step_values(result: StepResult) -> dict[str, float]:
    """A step's measurements under the names that TensorBoard and trackers show; some may be nan."""
    values = {
        "loss/all": result.loss,
        "train/gradient_norm": result.grad_norm,
        "train/learning_rate": result.learning_rate,
        "train/epoch": result.epoch,
        "speed/tokens_per_s": result.tokens_per_s,
        "speed/step_s": result.seconds,
        "speed/input_wait_s": result.input_wait_s,
    }
    values |= {f"train/learning_rate/{pattern}": rate for pattern, rate in result.learning_rates.items()}
    values |= {f"loss/{term}": loss for term, loss in result.terms.items()}
    values |= {f"train/{name}": figure for name, figure in result.figures.items()}
    return values | {f"loss/rank{rank}": loss for rank, loss in enumerate(result.rank_losses)}


def device_values(devices: Devices) -> dict[str, float]:
    """The same of what ranks' devices hold."""
    values = {}
    for rank, device in enumerate(devices):
        values[f"memory_gib/rank{rank}"] = device["memory_allocated_bytes"] / GIB
        values[f"peak_memory_gib/rank{rank}"] = device["peak_bytes"] / GIB
        values[f"utilization_percent/rank{rank}"] = device["utilization"] * 100
    return values


def evaluation_values(evaluation: Evaluation) -> dict[str, float]:
    """The same of an evaluation."""
    values = {"loss": evaluation.loss, **evaluation.figures}
    values |= {f"loss/{term}": loss for term, loss in evaluation.terms.items()}
    values |= {f"metrics/{name}": value for name, value in evaluation.metrics.items()}
    for name, figures in evaluation.sets.items():
        values |= {f"{name}/{metric}": value for metric, value in figures.items() if metric != "num_loss_tokens"}
    return {f"validation/{name}": value for name, value in values.items()}


class TensorBoardSink(Sink):
    """Event files: loss over all ranks and of each, memory and utilization of each device, speed, evaluations."""

    def __init__(self, folder: Path, *, every_steps: int = 1, resumed_at: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.every_steps = every_steps
        # TensorBoard hides what older files hold from the purge step on; before the first checkpoint that is all of it.
        purge_step = resumed_at + 1 if resumed_at else 0
        is_first = not any(folder.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(folder), purge_step=None if is_first else purge_step, flush_secs=10)

    def after_step(self, state: TrainState, result: StepResult) -> None:
        if result.step % self.every_steps:
            return
        self._add(step_values(result), result.step)

    def record_devices(self, step: int, devices: Devices) -> None:
        if step % self.every_steps:
            return
        self._add(device_values(devices), step)

    def after_evaluation(self, state: TrainState, evaluation: Evaluation) -> None:
        self._add(evaluation_values(evaluation), evaluation.step)
        for number, (prompt, answer) in enumerate(evaluation.samples):
            shown = "\n".join([*code_block(prompt), "", *code_block(answer)])  # TensorBoard reads Markdown
            self._writer.add_text(f"sample/{number}", shown, evaluation.step)
        self._writer.flush()

    def close(self, outcome: Outcome = "finished") -> None:
        self._writer.close()

    def _add(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            if not math.isnan(value):  # a rank without a loss token has no loss, a CPU no utilization
                self._writer.add_scalar(tag, value, step)


RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # of getrusage's ru_maxrss


class Meter:
    """The meter of this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handle = _find_nvml_handle(device) if device.type == "cuda" else None

    def read(self) -> dict[str, float]:
        """Numbers only, the same keys on every rank, so that they can be gathered as one tensor.

        ``memory_allocated_bytes`` and ``peak_bytes``: held by tensors on a GPU, now and at most since the peak was last
        reset (caches and the CUDA context not included); on a CPU the process's resident memory, now and at most.
        ``utilization``: share in [0, 1] of the last sampling period (some 0.2 to 1 s, see
        nvmlDeviceGetUtilizationRates) in which a kernel ran; nan where nothing can tell.
        """
        if self.device.type == "cuda":
            allocated, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        else:
            allocated = psutil.Process().memory_info().rss
            peak = max(allocated, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT_BYTES)
        return {
            "memory_allocated_bytes": float(allocated),
            "peak_bytes": float(peak),
            "utilization": self._read_utilization(),
        }

    def _read_utilization(self) -> float:
        if self._handle is None:
            return math.nan
        import pynvml

        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        except pynvml.NVMLError:
            return math.nan


def _find_nvml_handle(device: torch.device) -> object | None:
    """By UUID, because NVML counts all GPUs of the host and CUDA only the visible ones. None where NVML cannot help."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except (AttributeError, pynvml.NVMLError):
        return None
