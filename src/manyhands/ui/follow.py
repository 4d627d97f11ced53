"""Metrics of a run while they grow: the rows of metrics.jsonl as columns, and few points of many for a chart."""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

HEAD_BYTES = 256
SLICE_BYTES = 4 << 20
LARGE_BYTES = 16 << 20  # of a file that is shown by samples of its rows until all of them are read
NUM_PLACES, PLACE_BYTES = 1500, 8192
MAX_SAMPLES = 40  # answers to prompts that are kept, the newest
KEYS = ("step", "time", "loss", "grad_norm", "learning_rate", "tokens_per_s", "seconds", "input_wait_s", "num_tokens")
Axis = Literal["step", "tokens", "time"]


class Tail:
    """The complete lines that were added to a file since the last call. The file may be replaced, or cut."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.size = path, 0, 0
        self.is_behind = False  # whether there may be more than the last call has read
        self._inode, self._head = -1, b""

    def read(self) -> tuple[bytes, bool]:
        """Up to ``SLICE_BYTES``, and whether the file is another one by now: what was read before is void."""
        try:
            with self.path.open("rb") as file:
                stat, head = os.fstat(file.fileno()), file.read(HEAD_BYTES)
                is_same = stat.st_ino == self._inode and stat.st_size >= self.offset and head.startswith(self._head)
                is_other = self.offset > 0 and not is_same
                self.offset = 0 if is_other else self.offset
                self._inode, self.size = stat.st_ino, stat.st_size
                file.seek(self.offset)
                data = file.read(SLICE_BYTES)
        except OSError:
            is_other, self.offset, self.size, data, head = self.offset > 0, 0, 0, b"", b""
        end, self.is_behind = data.rfind(b"\n") + 1, len(data) == SLICE_BYTES
        if not end and self.is_behind:  # no row is so long: the rest of it is skipped as damaged
            end = SLICE_BYTES
        self.offset += end
        self._head = head[: self.offset]
        return data[:end], is_other


class Metrics:
    """A run's rows: steps as columns, evaluations as they are. One thread updates, others may read series."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._previewed: dict[str, array[float]] | None = None
        self._clear()
        self._tail = Tail(path)
        self.is_exact = False  # whether all rows were read

    def _clear(self) -> None:
        self._columns = {key: array("d") for key in KEYS}
        self.evaluations: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.newest: dict[str, Any] = {}  # row of a step

    def preview(self) -> bool:
        """Reads a row at ``NUM_PLACES`` places of a large file, to show at once. Returns whether it is large."""
        columns = {key: array("d") for key in KEYS}
        try:
            with self._path.open("rb", buffering=0) as file:  # a buffer would be filled at every place
                size = os.fstat(file.fileno()).st_size
                if size < LARGE_BYTES:
                    return False
                for place in [*range(NUM_PLACES), NUM_PLACES - 1]:
                    at = place * (size - PLACE_BYTES) // (NUM_PLACES - 1)
                    for line in os.pread(file.fileno(), PLACE_BYTES, at).split(b"\n")[1:-1]:
                        row = parse_row(line)
                        if row.get("kind") == "step":
                            _append(columns, row)
                            self.newest = row
                            break
        except OSError:
            return False
        self._previewed = columns
        return True

    def update(self) -> bool:
        """Reads what was added, up to ``SLICE_BYTES``; returns whether there is more."""
        data, is_other = self._tail.read()
        rows = [parse_row(line) for line in data.split(b"\n")]
        with self._lock:
            if is_other:
                self._clear()
                self.is_exact, self._previewed = False, None
            for row in rows:
                if row.get("kind") == "step":
                    self._cut(_append(self._columns, row))
                    self.newest = row
                elif row.get("kind") == "evaluation":
                    self._add_evaluation(row)
            is_behind = self._tail.is_behind
            if not is_behind:
                self.is_exact, self._previewed = True, None
            return is_behind

    @property
    def share_read(self) -> float:
        return 1.0 if self.is_exact else self._tail.offset / max(1, self._tail.size)

    def _cut(self, step: float | None) -> None:
        """Removes evaluations from ``step`` on: a resumed run does the step again."""
        if step is not None:
            self.evaluations = [row for row in self.evaluations if row["step"] < step]
            self.samples = [row for row in self.samples if row["step"] < step]

    def _add_evaluation(self, row: dict[str, Any]) -> None:
        figures = {key: to_number(value) for key, value in row.items() if isinstance(value, int | float)}
        self.evaluations = [one for one in self.evaluations if one["step"] != figures["step"]] + [figures]
        given = row.get("samples")
        given = given if isinstance(given, list) else []
        samples = [{**one, "step": row["step"]} for one in given if isinstance(one, dict)]
        self.samples = ([one for one in self.samples if one["step"] != row["step"]] + samples)[-MAX_SAMPLES:]

    def series(self, keys: Sequence[str], axis: Axis, num_points: int) -> dict[str, Any]:
        """``{"x": [...], key: {"mean", "low", "high"}}`` of at most ``num_points``: lowest and highest value of the
        rows that a point stands for, so that a peak of one step is seen.
        """
        with self._lock:
            columns = self._previewed or self._columns
            copied = {key: np.array(columns[key]) for key in {*keys, "step", "num_tokens", "seconds"}}
            held_out = [(row["step"], row.get("loss")) for row in self.evaluations]
        steps = copied["step"]
        x = steps
        if axis != "step":  # a row stands for all steps since the one before
            each = np.nan_to_num(copied["num_tokens" if axis == "tokens" else "seconds"])
            x = np.cumsum(each * np.diff(steps, prepend=0))
        edges = np.linspace(0, len(steps), min(num_points, len(steps)) + 1).astype(np.int64)
        found: dict[str, Any] = {"x": x[edges[1:] - 1].tolist(), "num_rows": len(steps)}
        for key in keys:
            found[key] = _summarize(copied[key], edges)
        places = [int(np.searchsorted(steps, step, side="right")) for step, _ in held_out]
        found["held_out"] = {
            "x": [float(x[place - 1]) if place else 0.0 for place in places],
            "loss": [loss for _, loss in held_out],
        }
        return found


def _summarize(values: np.ndarray, edges: np.ndarray) -> dict[str, list[float | None]]:
    if not len(values):
        return {"mean": [], "low": [], "high": []}
    starts, known = edges[:-1], ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0.0), starts) / np.add.reduceat(known.astype(np.float64), starts)
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    return {"mean": _to_list(mean), "low": _to_list(low), "high": _to_list(high)}


def _to_list(values: np.ndarray) -> list[float | None]:
    """For JSON, which has no NaN."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]


def _append(columns: dict[str, array[float]], row: dict[str, Any]) -> float | None:
    """Adds a row; where its step was there already, it replaces all from there on, and the step is returned."""
    steps, step, cut = columns["step"], float(row["step"]), None
    if steps and step <= steps[-1]:
        place, cut = bisect_left(steps, step), step
        for column in columns.values():
            del column[place:]
    for key, column in columns.items():
        value = row.get(key)
        if (
            type(value) is not float or value - value != 0.0
        ):  # most are finite numbers: a call for each is half the time
            value = to_number(value)
        column.append(math.nan if value is None else value)
    return cut


def parse_row(line: bytes) -> dict[str, Any]:
    """A row with a step; {} for what is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) and to_number(row.get("step")) is not None else {}


def to_number(value: Any) -> float | None:
    """A finite number of JSON that is no truth value; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
