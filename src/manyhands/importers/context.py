"""What the translation of another tool's file may ask of the world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ImportContext:
    """What a translation may ask beside the file itself; None where nobody can say.

    ``gpus``: asked for on the command line. ``first_gpus``: what the run's first start multiplied by.
    ``count_gpus``: those of this machine.
    ``first_row``: of a data file or data set. ``model_config``: config.json of a model that is at hand.
    ``other_gpus``: what this machine's GPUs are, where they are none of the kind that is named.
    ``hub_file``: a file of a data set on the hub, fetched; it raises UserError where the hub has none.
    ``strict``: refuse substitutions. ``micro``, ``accumulation``: samples per GPU and micro-batches per step of the run
    file that a settings file belongs to. ``deepspeed``: whether the package is installed.
    ``variables``: of the environment, by which trackers name their projects.
    """

    folder: Path = Path()
    gpus: int | None = None
    first_gpus: int | None = None
    count_gpus: Callable[[], int] | None = None
    first_row: Callable[[str], Mapping[str, Any] | None] | None = None
    model_config: Callable[[str], Mapping[str, Any] | None] | None = None
    hub_file: Callable[[str, str], Path | None] | None = None
    other_gpus: Callable[[str], str | None] | None = None
    strict: bool = False
    micro: int | None = None
    accumulation: int | None = None
    deepspeed: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def columns(self, path: str) -> tuple[str, ...] | None:
        """Names of the columns of a data file or data set."""
        row = self.first_row(path) if self.first_row else None
        return None if row is None else tuple(row)
