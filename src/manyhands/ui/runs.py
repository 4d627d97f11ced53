"""What the page shows of runs: a line of each, all of one, several beside each other. Reads the runs' folders alone."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.core.files import read_object
from manyhands.core.text import flatten, printable
from manyhands.launch.local.heartbeat import Beat, read_beats, was_killed
from manyhands.launch.run.folder import RunFolder
from manyhands.ui.follow import Axis, Metrics, Tail, parse_row, to_number

SCAN_S, QUIET_S = 5.0, 5.0  # between looks for new runs; between looks at one that is not running
AFTER_PREVIEW_S = 0.5  # until the rest of a large file is read: the answer with the preview comes first
MAX_FOLLOWED = 8  # runs whose rows are kept in memory
LOG_BYTES, LOG_LINES, HANG_CHARACTERS = 16 << 10, 60, 20_000
EVALUATION, STEP = b'{"kind": "evaluation"', b'{"kind": "step"'
NUM_POINTS = 600
CHARTS = ("loss", "grad_norm", "tokens_per_s", "learning_rate")
NOT_COMPARED = ("name", "output.dir", "data.cache")  # what any two runs differ in
COLORS = re.compile("\x1b\\[[0-?]*[ -/]*[@-~]")


def clean(value: Any) -> Any:
    """The value with all text in it printable: no controls, nothing that reorders a line."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):  # JSON has none
        return None
    return [clean(item) for item in value] if isinstance(value, list | tuple) else value


class Run:
    """One run's folder, and what was read of it. ``version`` grows whenever ``summary`` changes."""

    def __init__(self, path: Path) -> None:
        self.folder, self.version = RunFolder(path), 0
        self.summary: dict[str, Any] = {}
        self.metrics: Metrics | None = None
        self.reading = threading.Lock()
        self._tail = Tail(self.folder.metrics)
        self._best: tuple[float, int] | None = None
        self._held_out: float | None = None
        self._step: dict[str, Any] = {}
        self._signature: tuple[Any, ...] = ()
        self._fixed: dict[str, Any] = {}
        self._looked = 0.0

    def look(self, now: float) -> bool:
        """Reads what has changed; returns whether the summary is another one."""
        is_running = self.summary.get("state") == "running"
        if self.summary and not is_running and not self._tail.is_behind and now - self._looked < QUIET_S:
            return False
        self._looked = now
        files = (self.folder.metrics, self.folder.status_json, self.folder.plan_json, self.folder.run_json)
        signature = tuple(mark_of(file) for file in files)
        if signature == self._signature and not is_running and not self._tail.is_behind:
            return False
        if signature[2:] != self._signature[2:]:
            self._fixed = describe_plan(self.folder)
        if signature[:1] != self._signature[:1] or self._tail.is_behind:
            self._read_rows()
        self._signature = signature
        status = self.folder.read_status()
        state = str(status.get("state", "planned"))
        if state == "running" and was_killed(self.folder, status, read_beats(self.folder)):
            state = "killed"
        summary = self._summarize(status, state, signature)
        if summary == self.summary:
            return False
        self.summary = summary
        return True

    def _read_rows(self) -> None:
        data, is_other = self._tail.read()
        if is_other:
            self._best, self._held_out, self._step = None, None, {}
        at = data.find(EVALUATION)
        while at >= 0:
            row = parse_row(data[at : data.find(b"\n", at)])
            loss = to_number(row.get("loss"))
            if loss is not None:
                self._held_out = loss
                if self._best is None or loss < self._best[0]:
                    self._best = loss, row["step"]
            at = data.find(EVALUATION, at + 1)
        if self._tail.is_behind:  # the newest row at once
            try:
                with self.folder.metrics.open("rb") as file:
                    file.seek(max(0, self._tail.size - LOG_BYTES))
                    data = file.read(LOG_BYTES)
            except OSError:
                return
        at = data.rfind(STEP, 0, data.rfind(b"\n") + 1)
        if at >= 0:
            self._step = parse_row(data[at : data.find(b"\n", at)]) or self._step

    def _summarize(self, status: Mapping[str, Any], state: str, signature: tuple[Any, ...]) -> dict[str, Any]:
        row = self._step
        waiting = self._tail.is_behind  # the best of a part would be a wrong one
        return clean(
            {
                "name": self.folder.path.name,
                "state": state,
                "reason": status.get("reason") or "",
                "step": row.get("step"),
                "loss": to_number(row.get("loss")),
                "tokens_per_s": to_number(row.get("tokens_per_s")),
                "seconds": to_number(row.get("seconds")),
                "row_time": to_number(row.get("time")),
                "best": None if waiting or self._best is None else self._best[0],
                "best_step": None if waiting or self._best is None else self._best[1],
                "held_out": None if waiting else self._held_out,
                "changed": max((mark[0] for mark in signature if mark), default=0) / 1e9,
                **self._fixed,
            }
        )

    def follow(self) -> Metrics:
        """The rows of the run: at once those of a small file, of a large one a preview, until a thread has read all."""
        is_first, metrics = self.metrics is None, self.metrics or Metrics(self.folder.metrics)
        is_preview = is_first and metrics.preview()
        self.metrics = metrics
        if self.reading.acquire(blocking=False):
            if is_preview or metrics.update():
                reader = threading.Timer(AFTER_PREVIEW_S if is_preview else 0.0, self._read_on, (metrics,))
                reader.daemon = True
                reader.start()
            else:
                self.reading.release()
        return metrics

    def _read_on(self, metrics: Metrics) -> None:
        try:
            while self.metrics is metrics and metrics.update():
                time.sleep(0.001)  # others want the interpreter too
        finally:
            self.reading.release()

    def describe(self, axis: Axis = "step") -> dict[str, Any]:
        """Everything of the run's own view."""
        metrics, beats = self.follow(), read_beats(self.folder)
        charts = metrics.series(CHARTS, axis, NUM_POINTS)
        return clean(
            {
                "run": self.summary,
                "charts": charts,
                "share_read": metrics.share_read,
                "evaluations": metrics.evaluations[-200:],
                "samples": metrics.samples,
                "ranks": _describe_ranks(metrics.newest, beats),
                "wait_share": _wait_share(metrics.newest),
                "messages": read_log(self.folder.launcher_log),
                "output": read_log(self.folder.log(0)),
                "launcher_is_newer": (mark_of(self.folder.launcher_log) or (0,))
                > (mark_of(self.folder.log(0)) or (0,)),
                "hang": _read_hang(self.folder),
                "settings": read_settings(self.folder),
                "folder": str(self.folder.path),
            }
        )


def mark_of(file: Path) -> tuple[int, int, int] | None:
    """Another one whenever the file has changed."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _get(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def describe_plan(folder: RunFolder) -> dict[str, Any]:
    """What run.json and the newest plan say: files of earlier versions too, so each value may be missing."""
    config = read_object(folder.run_json)
    newest = read_object(folder.plan_json).get("newest")
    plan = read_object(folder.path / newest) if isinstance(newest, str) and ".." not in newest else {}
    terms, mesh = _integers(_get(plan, "memory", "terms")), _integers(_get(plan, "layout", "mesh"))
    device = _get(plan, "layout", "device")
    outside = terms.get("overhead", 0) + terms.get("pools", 0) if device == "cuda" else 0  # of what tensors hold
    return {
        "model": Path(str(_get(config, "model", "name") or "")).name,
        "method": _get(config, "method", "name"),
        "task": _get(config, "task"),
        "learning_rate": _get(plan, "learning_rate"),
        "num_steps": _get(plan, "num_steps"),
        "batch": _get(plan, "batch_samples"),
        "num_ranks": math.prod(mesh.values()) if mesh else None,
        "device": device,
        "strategy": _get(plan, "layout", "strategy"),
        "planned_tokens_per_s": _get(plan, "time", "tokens_per_s"),
        "planned_bytes": sum(terms.values()) or None,
        "tensor_bytes": sum(terms.values()) - outside or None,
        "limit_bytes": _get(plan, "memory", "limit"),
    }


def _integers(value: Any) -> dict[str, int]:
    return {name: each for name, each in value.items() if isinstance(each, int)} if isinstance(value, dict) else {}


def read_settings(folder: RunFolder) -> dict[str, Any]:
    """run.json by dotted key."""
    return flatten(read_object(folder.run_json))


def _describe_ranks(row: Mapping[str, Any], beats: Mapping[int, Beat]) -> list[dict[str, Any]]:
    found = (row.get(key) for key in ("devices", "rank_losses", "rank_seconds"))
    devices, losses, seconds = (value if isinstance(value, list) else [] for value in found)
    ranks = []
    for rank in range(max(len(devices), len(losses), 1 + max(beats, default=-1))):
        device = devices[rank] if rank < len(devices) and isinstance(devices[rank], dict) else {}
        beat = beats.get(rank)
        ranks.append(
            {
                "rank": rank,
                "used": to_number(device.get("memory_allocated_bytes")),
                "peak": to_number(device.get("peak_bytes")),
                "utilization": to_number(device.get("utilization")),
                "loss": to_number(losses[rank]) if rank < len(losses) else None,
                "seconds": to_number(seconds[rank]) if rank < len(seconds) else None,
                "at": str(beat) if beat is not None else "",
                "is_gone": beat is not None and beat.is_gone,
            }
        )
    return ranks


def _wait_share(row: Mapping[str, Any]) -> float | None:
    wait, seconds = to_number(row.get("input_wait_s")), to_number(row.get("seconds"))
    return wait / seconds if wait is not None and seconds else None


def read_log(file: Path) -> list[str]:
    """The last lines of a log; of a line that a progress bar has written over, what was left."""
    try:
        with file.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - LOG_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = COLORS.sub("", text).split("\n")[0 if size <= LOG_BYTES else 1 :]
    return [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines if line.strip()][-LOG_LINES:]


def _read_hang(folder: RunFolder) -> str:
    """What all ranks did when progress stopped last in this launch."""
    files = sorted(folder.logs.glob("hang-*.txt"), key=lambda file: file.stat().st_mtime)
    if not files:
        return ""
    with files[-1].open(encoding="utf-8", errors="replace") as file:
        return file.read(HANG_CHARACTERS)


class Runs:
    """All runs right below a folder. One thread at a time calls ``look``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, 0
        self._runs: dict[str, Run] = {}
        self._followed: list[str] = []
        self._scanned = 0.0

    def look(self, now: float | None = None) -> int:
        """Reads what has changed since the last call; returns the version of all."""
        now = time.monotonic() if now is None else now
        if now - self._scanned >= SCAN_S or not self._scanned:
            self._scanned = now
            found = {path.parent.name: path.parent for path in self.folder.glob("*/run.json")}
            if gone := self._runs.keys() - found.keys():
                self._runs = {name: run for name, run in self._runs.items() if name not in gone}
                self.version += 1
            for name in sorted(found.keys() - self._runs.keys()):
                self._runs[name] = Run(found[name])
        for run in list(self._runs.values()):
            if run.look(now):
                self.version += 1
                run.version = self.version
        return self.version

    def get(self, name: str) -> Run | None:
        """The run of this name, a key and never a path."""
        run = self._runs.get(name)
        if run is not None:
            self._followed = [one for one in self._followed if one != name] + [name]
            for old in self._followed[:-MAX_FOLLOWED]:
                if old in self._runs:
                    self._runs[old].metrics = None
            self._followed = self._followed[-MAX_FOLLOWED:]
        return run

    def since(self, version: int) -> dict[str, Any]:
        """The lines that have changed since ``version``, and the names of all."""
        runs = [run.summary for run in list(self._runs.values()) if run.version > version]
        return {"version": self.version, "runs": runs, "names": list(self._runs)}

    def compare(self, names: Sequence[str], axis: Axis) -> dict[str, Any]:
        """Curves of several runs, and the keys in which they differ."""
        runs = [run for name in names if (run := self.get(name)) is not None]
        settings = [read_settings(run.folder) for run in runs]
        keys = [key for key in dict.fromkeys(key for one in settings for key in one) if key not in NOT_COMPARED]
        differing = [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]
        return clean(
            {
                "runs": [
                    {"run": run.summary, "charts": run.follow().series(("loss",), axis, NUM_POINTS)} for run in runs
                ],
                "differences": [
                    {"key": key, "values": [_text(one[key]) if key in one else "-" for one in settings]}
                    for key in differing
                ],
            }
        )


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)
