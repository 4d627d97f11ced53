"""What a run measures, and where that is shown and kept. Knows plan, config and training, and no model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from manyhands.config.schema import RunConfig
from manyhands.launch.run.resume import identify_rows
from manyhands.metrics.console import ConsoleSink
from manyhands.metrics.sinks import JsonlSink, Sink, TensorBoardSink
from manyhands.metrics.summary import describe_settings, read_evaluations
from manyhands.metrics.trackers import open_trackers
from manyhands.planner.types import Plan


def open_sinks(
    folder: str | os.PathLike[str],
    plan: Plan,
    config: RunConfig,
    terminal: TextIO,
    resumed_at: int = 0,
    evaluated_at: int | None = None,
    log: TextIO | None = None,
) -> list[Sink]:
    """The sinks of a run; ``log`` keeps what ``terminal`` shows.

    ``resumed_at`` is the last step that counts, and ``evaluated_at`` the last one whose evaluation does (by default the
    same): what was written after them is taken back.
    """
    path = Path(folder)
    rows = JsonlSink(
        path / "metrics.jsonl",
        every_steps=config.log.every_steps,
        resumed_at=resumed_at,
        evaluated_at=evaluated_at,
        run=identify_rows(config, plan),
    )
    if rows.lost:
        for stream in filter(None, (terminal, log)):
            print(f"warning: {rows.lost}: curves and report lack them; training is not affected", file=stream)
    sinks: list[Sink] = [rows]
    if config.log.tensorboard:
        sinks.append(TensorBoardSink(path / "tensorboard", every_steps=config.log.every_steps, resumed_at=resumed_at))
    settings = describe_settings(config, plan) | {"model.name": config.model.name}
    sinks += open_trackers(path, config, settings, terminal, resumes=resumed_at > 0, log=log)
    earlier = read_evaluations(path / "metrics.jsonl")
    sinks.append(ConsoleSink(terminal, num_steps=plan.num_steps, first=earlier[0] if earlier else None, log=log))
    return sinks
