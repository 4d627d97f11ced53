"""A run on the terminal: a progress bar, or plain lines in a file or a pipe; a log gets these, too."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from manyhands.core.limits import GIB
from manyhands.core.terms import find_metric
from manyhands.core.text import open_console
from manyhands.core.units import count_of
from manyhands.metrics.sinks import Devices, Outcome, Sink
from manyhands.training.types import Evaluation, StepResult, TrainState

PLAIN_PAUSE_S = 15.0  # at least this long between two plain lines, unless a tenth of the run has passed
Part = tuple[int, str]  # of a line: when to drop it, the highest number first and 0 never, and its text


def fit(parts: Sequence[Part], width: int | None) -> str:
    """The parts of a line that together take at most ``width`` columns, each whole; all of them where it is None."""
    kept = list(parts)
    while width is not None and sum(cell_len(text) for _, text in kept) > width and any(rank for rank, _ in kept):
        del kept[max(range(len(kept)), key=lambda place: (kept[place][0], place))]
    return "".join(text for _, text in kept)


@dataclass(frozen=True)
class _Fitted:
    """What a cell shows of a line's parts."""

    parts: Sequence[Part]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(fit(self.parts, options.max_width), end="", no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(0, cell_len(fit(self.parts, None)))


class _FiguresColumn(ProgressColumn):
    """The only column that gives way where the terminal is narrow: others are ``no_wrap``."""

    def render(self, task: Task) -> _Fitted:  # type: ignore[override]  # any renderable will do
        return _Fitted(task.fields["values"])


class ConsoleSink(Sink):
    """Loss, tokens/s, memory and time left; evaluations with samples; before and after at the end."""

    def __init__(
        self, stream: TextIO, *, num_steps: int, first: Evaluation | None = None, log: TextIO | None = None
    ) -> None:
        """``first``: the evaluation before training by an earlier launch. ``log``: a file that keeps the text."""
        self.num_steps = num_steps
        self._console = open_console(stream, highlight=False, soft_wrap=True)
        knows_width = self._console.is_terminal or "COLUMNS" in os.environ
        self._width = (lambda: self._console.width) if knows_width else (lambda: None)
        self._log = (
            open_console(log, highlight=False, soft_wrap=True, force_terminal=False, color_system=None) if log else None
        )
        self._progress: Progress | None = None
        self._stages: dict[str, TaskID] = {}
        self._stage_shown = 0.0
        self._devices: Devices = ()
        self._first = first
        self._last: Evaluation | None = None
        self._begin_step, self._spent_s = 0, 0.0
        self._shown, self._shown_step = 0.0, -1

    def before_training(self, state: TrainState) -> None:
        self._begin_step = state.step
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        width = self._console.width
        columns = (
            TextColumn("{task.description}"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=min(24, width // 10), table_column=Column(no_wrap=True)),
            _FiguresColumn(),
            *([TimeElapsedColumn(table_column=Column(no_wrap=True))] if width >= 100 else []),
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=self._console, refresh_per_second=4)
        self._progress.add_task("step", total=self.num_steps, completed=state.step, values=(), left="")
        self._progress.start()

    def record_devices(self, step: int, devices: Devices) -> None:
        self._devices = devices

    def after_step(self, state: TrainState, result: StepResult) -> None:
        self._spent_s += result.seconds
        loss, rate = f"  loss {result.loss:.4f}", f"  {result.tokens_per_s:,.0f} tokens/s"
        memory, left = self._memory(), self._time_left(result.step)
        if self._progress is not None:
            values = [(1, loss.strip()), (2, rate), (3, memory)]
            self._progress.update(self._progress.task_ids[0], completed=result.step, values=values, left=left)
        if self._is_due(result.step):
            parts = [(0, f"step {result.step}/{self.num_steps}{loss}"), (2, rate), (3, memory)]
            parts += [(5, f"  lr {result.learning_rate:.2e}"), (6, f"  grad norm {result.grad_norm:.3f}")]
            parts += [(4, f"  {name.replace('_', ' ')} {figure:.3g}") for name, figure in result.figures.items()]
            self._show([*parts, (1, f"  {left}")], on_terminal=self._progress is None)

    def show_progress(self, stage: str, done: int, total: int) -> None:
        """A bar of its own below that of the steps; in plain text a line now and then."""
        if self._progress is None:
            now = time.monotonic()
            if done == 0:
                self._stage_shown = now
            elif done < total and now - self._stage_shown >= PLAIN_PAUSE_S:
                self._show(f"{stage}: {done}/{total}")
                self._stage_shown = now
            return
        if stage not in self._stages and done < total:
            self._stages[stage] = self._progress.add_task(stage, total=total, values=(), left="")
        if stage in self._stages:
            self._progress.update(self._stages[stage], completed=done)
            if done >= total:
                self._progress.remove_task(self._stages.pop(stage))

    def after_evaluation(self, state: TrainState, evaluation: Evaluation) -> None:
        self._first, self._last = self._first or evaluation, evaluation
        self._spent_s += evaluation.seconds * (evaluation.step > self._begin_step)
        counts = f"{count_of(evaluation.num_samples, 'sample')}, {count_of(evaluation.num_loss_tokens, 'loss token')}"
        metrics = [find_metric(name, evaluation.declared) for name in evaluation.figures]
        texts = [f", {each.label} {each.format(evaluation.figures[each.name], '.2f', '.1%')}" for each in metrics]
        parts = [(0, f"{_when(evaluation)}: held-out loss {evaluation.loss:.4f}"), *((1, text) for text in texts)]
        self._show([*parts, (2, f" ({counts}, {evaluation.seconds:.1f} s)")])
        for name, figures in evaluation.sets.items():
            shares = [each for each in metrics if each.is_share and each.name in figures]
            texts = [f", {each.label} {figures[each.name]:.1%}" for each in shares]
            self._show(f"  {name}: loss {figures['loss']:.4f}{''.join(texts)}")
        for prompt, answer in evaluation.samples:
            self._show(f"  {_one_line(prompt)}\n    -> {_one_line(answer)}")

    def after_training(self, state: TrainState) -> None:
        self.close()
        first, last = self._first, self._last
        if first is None or last is None or first.step == last.step:
            return
        self._show(f"held-out loss: {first.loss:.4f} {_when(first)}, {last.loss:.4f} {_when(last)}")
        for (prompt, before), (_, after) in list(zip(first.samples, last.samples, strict=False))[:1]:
            self._show(
                f"one question, before and after: {_one_line(prompt)}\n"
                f"  before: {_one_line(before)}\n"
                f"  after:  {_one_line(after)}"
            )

    def close(self, outcome: Outcome = "finished") -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show(self, line: str | Sequence[Part], on_terminal: bool = True) -> None:
        parts = [(0, line)] if isinstance(line, str) else line
        if on_terminal:
            self._console.print(Text(fit(parts, self._width())))
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk, which writing the run's own files reports
                self._log.print(Text(fit(parts, None)))

    def _is_due(self, step: int) -> bool:
        """The first and the last step; between them every tenth of the run, or more often where steps are slow."""
        now = time.monotonic()
        tenth = step - self._shown_step >= max(1, self.num_steps // 10)
        due = now - self._shown >= PLAIN_PAUSE_S or (tenth and now - self._shown >= 1.0)
        if not (due or step in (self._begin_step + 1, self.num_steps)):
            return False
        self._shown, self._shown_step = now, step
        return True

    def _time_left(self, step: int) -> str:
        """As steps and the evaluations between them have taken so far; those before the first step are not repeated."""
        seconds = self._spent_s / max(1, step - self._begin_step) * (self.num_steps - step)
        return f"{seconds / 60:.0f} min left" if seconds >= 100 else f"{seconds:.0f} s left"

    def _memory(self) -> str:
        if not self._devices:
            return ""
        return f"  memory {max(device['peak_bytes'] for device in self._devices) / GIB:.1f} GiB"


def _when(evaluation: Evaluation) -> str:
    return "before training" if evaluation.step == 0 else f"after step {evaluation.step}"


def _one_line(text: str) -> str:
    return " / ".join(line.strip() for line in text.splitlines() if line.strip()) or "(nothing)"
