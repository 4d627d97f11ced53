"""A start where the run's folder holds no checkpoint, and ``checkpoint.copy_to`` does: the run is resumed from there.

What is fetched is the run's folder as far as a resumed run needs it, so that every rule of a resumed run applies:
run.json, the plans, metrics, and the newest complete checkpoint. Imports no torch.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable

from pydantic import ValidationError

from manyhands.config.schema import RunConfig
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import rename_synced, write_atomically
from manyhands.core.progress import advance
from manyhands.core.remote import RemoteError, RemoteFolder
from manyhands.launch.resume_rules import refuse_other_run
from manyhands.launch.run_folder import RunFolder

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-\d{6,}")


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
    """Fills the run's folder from its copies where it has no checkpoint itself. UserError: the copies are of another
    run, or cannot be read.
    """
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
    write_atomically(folder.run_json, text.decode("utf-8"))
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
