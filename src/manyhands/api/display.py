"""What a run shows where this process's output is no terminal and no file: in a notebook, or where it is captured."""

import re
import sys
import time
from html import escape
from pathlib import Path
from typing import Any

from manyhands.api.callbacks import Row
from manyhands.core.errors import UserError
from manyhands.core.limits import GIB
from manyhands.core.text import printable
from manyhands.launch.run.folder import RunFolder

STEP_LINE = re.compile(r"step \d+/\d+  ")
CURVE_POINTS = 300
PAUSE_S = 0.5  # between two updates
# Output goes through a pipe, whatever these say of this process's own.
TERMINAL_VARIABLES = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
PIPE_VARIABLES = {"NO_COLOR": "1", "COLUMNS": "120", "TERM": "dumb"}


class Display:
    """Prints the launcher's lines."""

    def begin(self, folder: Path) -> None:
        """The run's folder is known."""

    def line(self, text: str) -> None:
        print(printable(text), flush=True)

    def take(self, row: Row) -> None:
        """A new row of metrics.jsonl."""

    def end(self) -> None:
        """The run has ended."""


class NotebookDisplay(Display):
    """The launcher's lines; in place of step lines a bar with figures, the loss curve and a table of evaluations."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.step: Row = {}
        self.losses: list[tuple[int, float]] = []
        self.evaluations: list[Row] = []
        self._handle: Any = None
        self._shown = 0.0

    def begin(self, folder: Path) -> None:
        try:
            self.num_steps = RunFolder(folder).read_plan().num_steps
        except UserError:  # not planned yet: asked again at the first row
            self.num_steps = 0
        self._folder = folder

    def line(self, text: str) -> None:
        if not STEP_LINE.match(text):
            print(printable(text), flush=True)

    def take(self, row: Row) -> None:
        if row["kind"] == "step":
            self.step = row
            if row["loss"] is not None:
                self.losses.append((row["step"], row["loss"]))
        elif row["kind"] == "evaluation":
            self.evaluations.append(row)
        if time.monotonic() - self._shown >= PAUSE_S:
            self._update()

    def end(self) -> None:
        if self.step:
            self._update()

    def _update(self) -> None:
        from IPython.display import display  # type: ignore[import-not-found]

        if not self.num_steps:
            self.begin(self._folder)
        self._shown = time.monotonic()
        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def __repr__(self) -> str:
        lines = [f"step {self.step.get('step', 0)}/{self.num_steps}  {self._figures()}"]
        return "\n".join([*lines, *("  ".join(cells) for cells in self._rows())])

    def _repr_html_(self) -> str:
        """The bar is the browser's own element, so it follows the notebook's theme."""
        step = self.step.get("step", 0)
        bar = f'<progress value="{step}" max="{self.num_steps or step or 1}" style="width: 16em"></progress>'
        text = f"<div>{bar} step {step}/{self.num_steps} &nbsp; {escape(self._figures())}</div>"
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in self._rows())
        return text + self._curve() + (f"<table>{rows}</table>" if rows else "")

    def _curve(self) -> str:
        """Draws the training loss (means of a few steps) and held-out losses as points; empty before step 2."""
        if len(self.losses) < 2:
            return ""
        size = -(-len(self.losses) // CURVE_POINTS)
        parts = [self.losses[begin : begin + size] for begin in range(0, len(self.losses), size)]
        line = [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]
        points = [(row["step"], row["loss"]) for row in self.evaluations if row["loss"] is not None]
        low, high = min(y for _, y in line + points), max(y for _, y in line + points)
        end = max(self.num_steps, line[-1][0])

        def place(x: float, y: float) -> tuple[float, float]:
            return round(4 + 392 * x / end, 1), round(96 - 92 * (y - low) / ((high - low) or 1), 1)

        drawn = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line))
        circles = "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="currentColor"/>' for x, y in
                          (place(*point) for point in points))  # fmt: skip
        return (
            f'<svg viewBox="0 0 400 100" style="width: 32em; display: block" role="img" aria-label="loss from '
            f'{line[0][1]:.4f} to {line[-1][1]:.4f}"><polyline points="{drawn}" fill="none" stroke="currentColor"/>'
            f"{circles}</svg><div>loss {high:.4f} (top) to {low:.4f}; points: held-out loss</div>"
        )

    def _figures(self) -> str:
        if not self.step:
            return ""
        left_s = self.step["seconds"] * (self.num_steps - self.step["step"])
        peak = max((device["peak_bytes"] or 0 for device in self.step["devices"]), default=0)
        memory = f"  memory {peak / GIB:.1f} GiB" if peak else ""
        loss = "-" if self.step["loss"] is None else f"{self.step['loss']:.4f}"
        return f"loss {loss}  {self.step['tokens_per_s']:,.0f} tokens/s{memory}  about {left_s:,.0f} s left"

    def _rows(self) -> list[list[str]]:
        return [
            [
                f"step {row['step']}",
                f"held-out loss {row['loss']:.4f}",
                *(f"perplexity {value:.2f}" for value in [row.get("perplexity")] if value is not None),
            ]
            for row in self.evaluations
            if row["loss"] is not None
        ]


def open_display() -> Display | None:
    """None where the launcher can write to this process's own output."""
    if sys.stdout is sys.__stdout__:
        return None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return NotebookDisplay() if getattr(shell, "kernel", None) is not None else Display()
