"""``manyhands.plan``, and reading a run from a file or from keys as the commands do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.api.sources import write_rows
from manyhands.config.read import ParsedFile
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.text import report_aside
from manyhands.importers.load import LoadedRun
from manyhands.importers.translation import ImportContext, Translation
from manyhands.launch.environment import accelerate_settings, detect_launcher
from manyhands.launch.run.file import load_for_start

if TYPE_CHECKING:
    from manyhands.facts.types import HostFacts
    from manyhands.planner.types import Plan

Run = str | os.PathLike[str] | Mapping[str, Any] | RunConfig


def plan(
    run: Run,
    overrides: Mapping[str, Any] | None = None,
    *,
    gpus: int | str | None = None,
    train_data: Any = None,
    validation_data: Any = None,
) -> Plan:
    """What ``train`` would do, and why: ``print(plan.explain())``. Starts nothing.

    ``run``: a run file, ours or another tool's; or its keys, nested as in the file. ``overrides``: ``{"batch.samples":
    64}``. ``gpus``: a number, or GPUs that need not be here (``"8xH200"``, ``"2x4xH100-80GB"``). ``train_data``,
    ``validation_data``: rows in memory in place of files (see ``train``). Raises ``UserError``.
    """
    from manyhands.launch.run.prepare import plan_here

    number, host = _read_gpus(gpus)
    loaded = open_run(run, overrides, gpus=number, train_data=train_data, validation_data=validation_data)
    launcher = detect_launcher()
    launched = None if launcher.kind == "none" or host is not None else launcher.world_size
    return plan_here(loaded.config, world_size=launched, host=host, report=report_aside)


def open_run(
    run: Run,
    overrides: Mapping[str, Any] | None = None,
    *,
    gpus: int | str | None = None,
    train_data: Any = None,
    validation_data: Any = None,
) -> LoadedRun:
    """The run as the command would read it: the same file, checks and messages. Raises ``UserError``."""
    given = dict(check_overrides(overrides) or {})
    if gpus is not None:
        if isinstance(gpus, bool) or (not isinstance(gpus, str) and not hasattr(gpus, "__index__")):
            raise UserError(f"gpus is {gpus!r}, not a number of GPUs", fix="give a whole number, or 'auto' for all")
        _refuse_both("gpus", gpus, "parallel.gpus", given)
        given["parallel.gpus"] = gpus
    source: str | os.PathLike[str] | ParsedFile
    if isinstance(run, RunConfig):
        source = ParsedFile(run.model_dump(mode="json", exclude_unset=True), "the given RunConfig")
    elif isinstance(run, Mapping):
        keys = {"name": "run", **plain(run)}
        source = ParsedFile(keys, "the given keys", text=json.dumps(keys, indent=2) + "\n")
    elif isinstance(run, (str, os.PathLike)):
        source = run
    else:
        raise UserError(
            f"a run is a file or its keys, not a {type(run).__name__}",
            fix='give the path of a run file, or its keys: {"model": {"name": ...}, "data": {"train": ...}}',
        )
    file = source if isinstance(source, ParsedFile) else Path(source)
    if train_data is not None or validation_data is not None:
        found = read_keys(file, {**given, "data.train": given.get("data.train", "rows")})
        cache = Path(found.config.data.cache)
        for name, data in (("train", train_data), ("validation", validation_data)):
            if data is not None:
                _refuse_both(f"{name}_data", ..., f"data.{name}", given)
                given[f"data.{name}"] = write_rows(data, cache, name)
    return read_keys(file, given)


def check_overrides(overrides: Any) -> Mapping[str, Any] | None:
    """``overrides``. UserError for what is no dict."""
    if overrides is None or isinstance(overrides, Mapping):
        return overrides
    fix = 'give a dict of keys and values: {"batch.samples": 64}'
    raise UserError(f"overrides are a {type(overrides).__name__}", fix=fix)


def _refuse_both(option: str, value: Any, key: str, overrides: Mapping[str, Any]) -> None:
    """UserError where a parameter and an override ask for different things; ... differs from everything."""
    if key not in overrides or overrides[key] == value:
        return
    given = option if value is ... else f"{option}={value!r}"
    raise UserError(
        f"{given} and overrides {key}={overrides[key]!r} contradict each other",
        fix=f"keep one: {option} is short for the key {key}",
    )


def read_keys(
    source: Path | ParsedFile,
    overrides: Mapping[str, Any] | None = None,
    read: Callable[[ParsedFile, ImportContext], Translation | None] | None = None,
) -> LoadedRun:
    """A run file, or its keys, for the processes that there are or will be."""
    texts = [f"{key}={json.dumps(plain(value), ensure_ascii=False)}" for key, value in (overrides or {}).items()]
    launcher = detect_launcher()
    num_gpus = None if launcher.kind == "none" else launcher.world_size
    try:
        return load_for_start(source, texts, num_gpus=num_gpus, settings=accelerate_settings(), read=read)
    except UserError as error:  # a script or a notebook has no command line
        error.details = tuple(re.sub("^command line: ", "overrides: ", detail) for detail in error.details)
        raise


def plain(value: Any) -> Any:
    """Paths, tuples and numpy's numbers as JSON has them. UserError for what JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return plain(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise UserError(
        f"a key of the run has a value that is a {type(value).__name__}",
        why=f"{value!r:.80} is nothing that a run file can hold",
        fix="give texts, numbers, booleans, None, lists and dicts",
    )


def _read_gpus(gpus: int | str | None) -> tuple[int | str | None, HostFacts | None]:
    """A number of GPUs, and the machine that has them where they are named by kind."""
    if not isinstance(gpus, str):
        return gpus, None
    from manyhands.facts.gpu_kinds import describe_host, parse_gpus, plain_number

    if (number := plain_number(gpus)) is not None:
        return number, None
    asked = parse_gpus(gpus, "gpus")
    return asked.total, describe_host(asked)
