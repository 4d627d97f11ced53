"""Reading a run file for a start: what a translation of another tool's file may ask of this machine, and the number of
GPUs that the run's first start multiplied by.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.config.read import ParsedFile
from manyhands.config.schema import Source
from manyhands.core.errors import UserError, has_deepspeed
from manyhands.core.files import read_json
from manyhands.data.read.hub_sets import fetch_file
from manyhands.data.read.sources import is_hub, read_rows
from manyhands.facts.gpu_kinds import kind_of, kinds_named
from manyhands.facts.host import read_host_facts
from manyhands.facts.hub import find_config
from manyhands.importers.load import LoadedRun, load_run
from manyhands.importers.translation import ImportContext, Translation
from manyhands.launch.environment import requested_processes
from manyhands.launch.run.folder import OUTCOMES
from manyhands.launch.run.resume import folder_of


def load_for_start(
    path: Path | ParsedFile,
    overrides: Sequence[str] = (),
    *,
    num_gpus: int | None = None,
    settings: Mapping[str, Path | ParsedFile] | None = None,
    strict: bool = False,
    read: Callable[[ParsedFile, ImportContext], Translation | None] | None = None,
) -> LoadedRun:
    """The run of a file, ours or another tool's, or of its keys. ``num_gpus``: processes that a launcher has started
    already. ``read``: in place of recognizing whose keys they are (``load_run``).

    A file that counts batches per GPU is multiplied out once: where its run has started before, by the number of GPUs
    of that first start, so that the same command resumes it on any other number. Raises ``UserError``.
    """
    context = probe_host(num_gpus=requested_processes() if num_gpus is None else num_gpus, strict=strict)
    loaded = load_run(path, overrides, context=context, settings=settings, read=read)
    first = _first_gpus(loaded)
    if first is None or loaded.translation is None or first == loaded.translation.gpus:
        return loaded
    return load_run(path, overrides, context=replace(context, first_gpus=first), settings=settings, read=read)


def probe_host(*, num_gpus: int | None = None, strict: bool = False) -> ImportContext:
    """What this machine answers: GPUs, columns of local data, config.json, hub data sets, DeepSpeed."""
    count: Callable[[], int] = (lambda: len(read_host_facts().gpus)) if num_gpus is None else lambda: num_gpus
    return ImportContext(
        count_gpus=count,
        first_row=_first_row,
        model_config=_model_config,
        hub_file=fetch_file,
        other_gpus=_other_gpus,
        strict=strict,
        deepspeed=has_deepspeed(),
        variables=os.environ,
    )


def _other_gpus(name: str) -> str | None:
    """The names of this machine's GPUs if none of them can be a ``name``; None without GPUs, and for unknown kinds."""
    gpus, wanted = read_host_facts().gpus, kinds_named(name)
    kinds = {kind.name for gpu in gpus if (kind := kind_of(gpu.name))}
    return " and ".join(sorted({gpu.name for gpu in gpus})) if gpus and wanted and kinds.isdisjoint(wanted) else None


def _first_gpus(loaded: LoadedRun) -> int | None:
    folder = folder_of(loaded.config)
    if loaded.translation is None or not folder.was_started():
        return None
    recorded = read_json(folder.origin / OUTCOMES)
    gpus = recorded.get("gpus") if isinstance(recorded, dict) else None
    return gpus if isinstance(gpus, int) and gpus > 0 else None


def _first_row(path: str) -> Mapping[str, Any] | None:
    """The first row; None if the data are on the hub or cannot be read (which the run will say)."""
    if is_hub(path):
        return None
    try:
        row = next(iter(read_rows(Source(path=path))), None)
    except (UserError, OSError):
        return None
    return None if row is None else row.fields


def _model_config(name: str) -> dict[str, Any] | None:
    """The config.json that ``find_config`` finds; None without it, or where it cannot be read."""
    file = find_config(name)
    try:
        read = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None
