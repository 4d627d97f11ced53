"""What a start finds: a new run, one to resume, a finished one, or something that must not be touched. Imports no
torch.

Two starts are the same run when every key of run.json agrees, except those below: they say where and how the work is
done, not what the result is. The plan guards the rest: ``refuse_other_course`` compares what a resumed run would
compute (rows, steps, dtypes) with the plan before it. A folder that was only planned (``--dry-run``) may be planned
with any other key.

The limits of ``stop`` may make a run longer, a finished one too: it is resumed from its newest checkpoint, by the
schedule of all its steps. They never make a run shorter that has a checkpoint.

Where the run's folder holds no checkpoint, and ``checkpoint.copy_to`` does, the run is resumed from there. What is
fetched is the run's folder as far as a resumed run needs it, so that every rule of a resumed run applies: run.json, the
plans, metrics, and the newest complete checkpoint.
"""

import fnmatch
import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from manyhands.config.schema import RunConfig
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import read_json, rename_synced, write_atomically
from manyhands.core.progress import advance
from manyhands.core.remote import RemoteError, RemoteFolder
from manyhands.core.text import flatten
from manyhands.core.units import count_of
from manyhands.launch.run.folder import RunFolder
from manyhands.planner.types import Plan

Finding = Literal["new", "unfinished", "finished"]

# Keys that may differ between two starts of one run. What the limits of `stop` come to is judged by the plan.
MAY_DIFFER = (
    "stop.*",
    "guards.*",
    "parallel.*",
    "launch.*",
    "batch.micro_samples",
    "batch.micro_tokens",
    "batch.accumulation",
    "log.*",
    "checkpoint.asynchronous",
    "checkpoint.every_steps",
    "checkpoint.hours_between_faults",
    "checkpoint.per_epoch",
    "checkpoint.every_minutes",
    "checkpoint.keep_last",
    "checkpoint.copy_to",
    "data.cache",
    "data.workers",
    "data.image_cache_gb",
    "data.image_memory_gb",
    "data.cache_features",
    "data.feature_cache_gb",
    "output.dir",
    "submit.*",
)


# What a resumed run computes. Everything else in a plan may change from launch to launch.
COURSE = (
    "data_digest",
    "data_content",
    "batch_samples",
    "batch_loss_tokens",
    "batch_packs",
    "steps_per_epoch",
    "num_steps",
    "warmup_steps",
    "learning_rate",
    "layout.compute_dtype",
    "layout.master_dtype",
    "layout.frozen_dtype",
)
OF_LIMITS = ("num_steps", "warmup_steps")  # of COURSE: follow from stop.epochs and stop.max_steps
STEP_LIMITS = ("epochs", "max_steps")  # known before the run, as a number of steps
EARLY_LIMITS = ("max_tokens", "max_time_s", "patience")  # end the loop while it runs
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-\d{6,}")


def folder_of(config: RunConfig) -> RunFolder:
    return RunFolder(Path(config.output.dir).expanduser() / config.name)


def find_run(folder: RunFolder, config: RunConfig) -> Finding:
    """What ``folder`` holds. Reads only. UserError if it is another run, or no run at all."""
    if not folder.path.exists() or _is_empty(folder):
        return "new"
    if not folder.path.is_dir() or not folder.run_json.exists():
        raise UserError(
            "the run's folder exists but contains no run",
            where=str(folder.path),
            why="it has no run.json, so manyhands did not create it; it was not changed",
            fix="choose another name=..., or move the folder away",
        )
    before = folder.read_config()
    if not folder.was_started() and differing_keys(before, config):
        return "new"  # only planned (--dry-run): nothing can be lost
    refuse_other_run(before, config, str(folder.path))
    return "finished" if folder.is_finished and not differing_limits(before, config) else "unfinished"


def differing_limits(before: RunConfig, config: RunConfig) -> tuple[str, ...]:
    """``stop.max_steps: 3 -> 6`` for every limit of the run that differs."""
    pairs = {key: (getattr(before.stop, key), getattr(config.stop, key)) for key in (*STEP_LIMITS, *EARLY_LIMITS)}
    return tuple(f"stop.{key}: {_show(old)} -> {_show(new)}" for key, (old, new) in pairs.items() if old != new)


def _show(limit: float | None) -> str:
    return "none" if limit is None else f"{limit:.10g}"


def changed_limits(folder: RunFolder, config: RunConfig) -> tuple[str, ...]:
    """The same for the run that ``folder`` holds; none where nothing was trained there yet."""
    if not folder.run_json.exists() or not folder.was_started():
        return ()
    return differing_limits(folder.read_config(), config)


def refuse_without_checkpoint(folder: RunFolder, config: RunConfig) -> None:
    """UserError where a finished run is to become longer and has no checkpoint to resume from."""
    if folder.is_finished and folder.newest_step() is None:
        raise UserError(
            "the finished run cannot be made longer: it has no checkpoint to resume from",
            where=str(folder.checkpoints),
            details=changed_limits(folder, config),
            fix=f"{train_further(config, str(folder.path))}, or restore the keys",
        )


def refuse_no_longer(before: Plan, after: Plan, folder: RunFolder, config: RunConfig) -> None:
    """UserError unless limits that have changed make the run longer."""
    old, new, step = folder.read_config().stop, config.stop, folder.newest_step()
    changed = changed_limits(folder, config)
    lower = [key for key in EARLY_LIMITS if (getattr(new, key) or math.inf) < (getattr(old, key) or math.inf)]
    if lower or after.num_steps < before.num_steps:
        steps = f"it was planned for {count_of(before.num_steps, 'step')}, and would have {after.num_steps:,}"
        why = f"{' and '.join(f'stop.{key}' for key in lower)} would end it earlier" if lower else steps
        raise UserError(
            "the limits of `stop` would make this run shorter: they may only grow where a run is resumed",
            where=str(folder.path),
            why=why,
            details=changed,
            fix=f"restore the keys (Ctrl-C or a file {folder.stop_file} ends a run early, and `manyhands export "
            f"{folder.path}` writes the model of its newest checkpoint), or use --fresh for a new run",
        )
    if not folder.is_finished or step is None:
        return
    ended_by = [f"stop.{key}" for key in EARLY_LIMITS if getattr(new, key) == getattr(old, key) is not None]
    ended_by = [key for key in ended_by if key in str(folder.read_status().get("reason"))]
    if step >= after.num_steps:
        ended_by = ["stop.max_steps" if after.num_steps == new.max_steps else "stop.epochs"]
    if ended_by:
        raise UserError(
            f"this run is finished after {count_of(step, 'step')}, and would not be longer",
            where=str(folder.path),
            why=f"{ended_by[0]} ends it there",
            details=changed,
            fix=f"raise {ended_by[0]} too, or {train_further(config, str(folder.path))}",
        )


def train_further(config: RunConfig, where: str) -> str:
    """How a new run continues from the result of the one in the folder ``where``, with any other key."""
    key = "method.adapter" if config.method.trains_adapters else "model.name"
    return f"train further from its result in a new run: name=NEW {key}={where}"


def refuse_other_run(before: RunConfig, config: RunConfig, where: str) -> None:
    """UserError if the folder ``where`` holds another run than ``config``."""
    differences = differing_keys(before, config)
    if differences:
        _refuse_lost_data(before, config)
        restore = "restore the keys"
        if before.name != config.name:  # the old name alone would start a new run in another folder
            restore = f"rename the folder to {before.name} and restore the keys"
        raise UserError(
            f"this folder contains another run named {before.name!r}",
            where=where,
            why=f"{len(differences)} {'key differs' if len(differences) == 1 else 'keys differ'} from its run.json "
            "(there -> now)",
            fix=f"{restore} to resume that run, choose another name=..., or use --fresh for a new folder; or "
            + train_further(before, where),
            details=differences,
        )


def _refuse_lost_data(before: RunConfig, config: RunConfig) -> None:
    """UserError where a name in ``data`` was that of a file, which is gone: it is taken for a dataset of the hub."""
    for key in ("train", "validation"):
        old, new = getattr(before.data, key), getattr(config.data, key)
        if not isinstance(old, str) or not isinstance(new, str) or old == new or Path(old).exists():
            continue
        if Path(old).is_absolute() and not Path(new).is_absolute() and Path(old).name == Path(new).name:
            why = f"the run {config.name!r} was started with it"
            raise UserError("no such data file", where=old, why=why, fix=f"restore the file of data.{key}")


def refuse_other_course(before: Plan, after: Plan, folder: RunFolder, *, longer: bool = False) -> None:
    """UserError unless samples, steps and numerics of the resumed run are the same. ``longer``: by changed limits."""
    from manyhands.facts.identity import differing_files

    # A plan of an earlier version names neither the base model's files nor the tokens.
    files = (
        differing_files(before.model_files, after.model_files, weights=after.keeps_base) if before.model_files else []
    )
    pairs = [
        (name, attrgetter(name)(before), attrgetter(name)(after))
        for name in COURSE
        if (name != "data_content" or before.data_content) and not (longer and name in OF_LIMITS)
    ]
    changed = [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]
    changed += files
    if not changed:
        return
    if before.data_digest != after.data_digest:
        why, fix = "the data, the tokenizer or the chat template has changed since", "restore the old data"
    elif before.data_content and before.data_content != after.data_content:
        why = "the tokens differ from those it was trained on, though made of the same files by the same versions"
        fix = "restore the token cache of the run's first launch (data.cache)"
    elif files:
        why = "the base model's files have changed since; what was trained belongs to the old ones"
        fix = "restore the old files (model.revision pins a commit of the hub)"
    else:
        old, new = before.layout, after.layout
        why = f"it was planned for {old.world_size} process(es) on {old.device},"
        why += f" now for {new.world_size} on {new.device}"
        fix = "start it as before (parallel.gpus, parallel.device, batch.micro_samples, batch.accumulation)"
    raise UserError(
        "this launch would not continue the run as it was",
        where=str(folder.path),
        why=why,
        fix=f"{fix}, or use --fresh for a new run",
        details=changed,
    )


def describe_run(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """What each checkpoint's manifest carries of its run (``extra``), for ``refuse_other_checkpoint``."""
    return {"config": config.model_dump(mode="json"), "course": _course(plan)}


def identify_rows(config: RunConfig, plan: Plan) -> str:
    """Which run a row of metrics.jsonl is of: its keys, but for those that may differ, and its data."""
    keys = flatten(config.model_dump(mode="json"))
    own = {key: value for key, value in keys.items() if key != "name" and not _matches(key, MAY_DIFFER)}
    return hashlib.sha256(json.dumps([own, plan.data_digest], sort_keys=True).encode()).hexdigest()[:16]


def refuse_other_checkpoint(checkpoint: Path, config: RunConfig, folder: RunFolder) -> None:
    """UserError where a checkpoint in the folder of the run is another run's, by what its manifest carries: its keys
    (the name alone does not make it another), or what its launch computed, which one of this run's plans must have.
    One of an earlier version, which carries neither, passes.
    """
    extra = (read_json(checkpoint / MANIFEST) or {}).get("extra", {})
    if "config" not in extra:
        return
    try:
        before = RunConfig.model_validate(extra["config"])
        changed = differing_keys(before.model_copy(update={"name": config.name}), config)
    except ValidationError:
        changed = ["its manifest names a run of another version of manyhands"]
    if not changed:
        courses = [_course(plan) for plan in folder.read_plans()]
        there, here = extra.get("course"), courses[-1] if courses else None
        if courses and there not in courses:
            there, here = (flatten(course) if isinstance(course, dict) else {} for course in (there, here))
            changed = [
                f"{key}: {there.get(key)} -> {here.get(key)}"
                for key in sorted(there | here)
                if there.get(key) != here.get(key)
            ]
    if changed:
        raise UserError(
            "the checkpoint is of another run",
            where=str(checkpoint),
            why=f"{len(changed)} {'value differs' if len(changed) == 1 else 'values differ'} (checkpoint -> this run)",
            fix="move it out of this run's folder, or use --fresh for a new run; method.adapter and model.name begin"
            " with what another run has trained",
            details=changed,
        )


def _course(plan: Plan) -> dict[str, Any]:
    """What a launch of ``plan`` computes, as JSON has it."""
    weights = plan.keeps_base
    files = {name: sha for name, sha in plan.model_files.items() if weights or not name.endswith(".safetensors")}
    return json.loads(json.dumps({name: attrgetter(name)(plan) for name in COURSE} | {"model_files": files}))


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def differing_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """``key: old -> new`` for every key that makes it another run."""
    before, after = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in before | after
        if before.get(key) != after.get(key) and not _matches(key, MAY_DIFFER)
    ]


def fresh_name(config: RunConfig, is_taken: Callable[[RunConfig], bool] = lambda config: False) -> RunConfig:
    """The config under the first free name NAME, NAME-2, ...; ``is_taken``: elsewhere than in the runs' folder."""
    for number in itertools.count(1):
        name = config.name if number == 1 else f"{config.name}-{number}"
        candidate = config.model_copy(update={"name": name})
        folder = folder_of(candidate)
        if (not folder.path.exists() or _is_empty(folder)) and not is_taken(candidate):
            return candidate
    raise AssertionError("unreachable")


def _is_empty(folder: RunFolder) -> bool:
    """Whether it holds nothing but a job to start it, or what a start ended before run.json leaves."""
    if not folder.path.is_dir():
        return False
    for entry in folder.path.iterdir():
        leftover = entry in (folder.submit, folder.lock_file) or (
            entry.name.startswith(".run.json.") and entry.suffix == ".tmp"
        )
        if not leftover and not (entry in (folder.plans, folder.logs) and entry.is_dir() and not any(entry.iterdir())):
            return False
    return True


def remote_of(config: RunConfig) -> RemoteFolder | None:
    """Where copies of this run's checkpoints are, if anywhere. RemoteError."""
    url = config.checkpoint.copy_to
    return RemoteFolder(f"{url.rstrip('/')}/{config.name}") if url is not None else None


def is_taken(config: RunConfig) -> bool:
    """Whether there are copies under this run's name. UserError where the store cannot be read."""
    try:
        remote = remote_of(config)
        return remote is not None and remote.read("run.json") is not None
    except RemoteError as error:
        raise _unreadable(error) from error


def fetch_run(folder: RunFolder, config: RunConfig, report: Callable[[str], object]) -> None:
    """Fills a folder without checkpoint from its copies. UserError: unreadable, or of another run."""
    if folder.newest_step() is not None:
        return
    try:
        remote = remote_of(config)
        if remote is not None:
            _fetch(remote, folder, config, report)
    except RemoteError as error:
        raise _unreadable(error) from error


def _fetch(remote: RemoteFolder, folder: RunFolder, config: RunConfig, report: Callable[[str], object]) -> None:
    text = remote.read("run.json")
    steps = [name for name in remote.list("checkpoints") if _STEP.fullmatch(name)]
    for step in sorted(steps, key=lambda name: int(name.removeprefix("step-")), reverse=True):
        manifest = remote.read(f"checkpoints/{step}/{MANIFEST}")
        if text is not None and manifest is not None:
            break
    else:
        return
    try:
        refuse_other_run(RunConfig.model_validate_json(text), config, remote.url)
        names = list(json.loads(manifest)["files"])
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise UserError("the copies of this run cannot be read", where=remote.url, why=why) from error
    if any(name != name.rpartition("/")[2] or name in ("", ".", "..") for name in names):
        raise UserError(
            "the copies of this run cannot be read", where=remote.url, why="a file's name leaves its folder"
        )
    report(f"fetching {step} from {remote.url}, as {folder.path} has no checkpoint")
    folder.create()
    for name in ("plan.json", "metrics.jsonl", *(f"plans/{name}" for name in remote.list("plans"))):
        content = remote.read(name)
        if content is not None:
            write_atomically(folder.path / name, content.decode("utf-8"))
    partial = folder.checkpoints / f"{step}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in (*names, MANIFEST):
        remote.get(f"checkpoints/{step}/{name}", partial / name, lambda _: advance())
    folder.write_config(text.decode("utf-8"))
    rename_synced(partial, folder.checkpoints / step)


def _unreadable(error: RemoteError) -> UserError:
    return UserError(
        "the copies of this run's checkpoints cannot be read",
        where="checkpoint.copy_to",
        why=str(error),
        fix="check the URL, its credentials and the package that fsspec needs for it (s3fs, gcsfs, adlfs), or remove"
        " the key",
        exit_code=EXIT_FAILED,
    )
