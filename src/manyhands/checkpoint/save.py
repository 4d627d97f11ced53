"""Saves a checkpoint while training waits: ranks write shards, rank 0 commits. Collective; order: see the package."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.checkpoint.manifest import PARTIAL, REPLACED, TRAIN_STATE, FileEntry, Manifest, hash_file, write_manifest
from manyhands.checkpoint.shard_writer import write_file
from manyhands.checkpoint.shards import own_files, read_bytes
from manyhands.checkpoint.staging import WriterEnded
from manyhands.checkpoint.tensors import checkpoint_tensors, describe
from manyhands.core.collective_errors import run_on_all_ranks, run_on_rank_0
from manyhands.core.errors import EXIT_FAILED, FAULT, UserError
from manyhands.core.files import explain_full_disk, is_disk_full, rename_synced, write_json
from manyhands.core.progress import advance

POLL_S = 0.05
SEEN_LATE_S = 120.0  # a network's file system may show another machine's new files, or their sizes, a minute later


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    *,
    rank: int,
    world_size: int,
    manifest_extra: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Saves trained parameters, optimizer states and ``state`` (JSON) as ``folder``. Collective over all ranks.

    ``model`` is the Hugging Face model inside every wrapper. An earlier checkpoint of the same name is replaced.
    UserError on every rank if one of them cannot write, or if they do not see the same folder. ``progress`` hears of
    parts that are done: folder made, files written, manifest written.
    """
    progress(0, 3)
    partial = folder.with_name(folder.name + PARTIAL)
    tensors = checkpoint_tensors(model, optimizer)
    run_on_rank_0(lambda: _make_empty(partial))
    progress(1, 3)
    files: dict[str, FileEntry] = {}
    for entries in run_on_all_ranks(lambda: write_own(partial, tensors, state, rank)):
        files.update(entries)
    progress(2, 3)
    manifest = Manifest(world_size=world_size, files=files, tensors=describe(tensors), extra=manifest_extra or {})
    run_on_rank_0(lambda: commit(partial, folder, manifest))
    progress(3, 3)


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def write_own(
    partial: Path, tensors: dict[str, torch.Tensor], state: dict[str, Any], rank: int
) -> dict[str, FileEntry]:
    """Writes this rank's files, on rank 0 the state; returns their manifest entries. UserError names the file."""
    try:
        files = {}
        for file in own_files(tensors, rank):
            parts = (part for group in ((file.header,), *map(read_bytes, file.pieces)) for part in group)
            entry = write_file(str(partial / file.name), parts, lambda _: advance())
            files[file.name] = FileEntry.model_validate(entry)
        return files | write_state(partial, state, rank)
    except OSError as error:
        raise explain_unwritten(error, partial, rank) from error


def write_state(partial: Path, state: dict[str, Any], rank: int) -> dict[str, FileEntry]:
    """train_state.json, by rank 0."""
    if rank:
        return {}
    write_json(partial / TRAIN_STATE, state)
    return {TRAIN_STATE: hash_file(partial / TRAIN_STATE)}


def explain_unwritten(error: OSError, partial: Path, rank: int) -> UserError:
    """The error for the user, wherever it happened."""
    if is_disk_full(error):
        return explain_full_disk(error, partial)
    if isinstance(error, WriterEnded):
        return UserError(
            str(error.strerror),
            where=str(error.filename or partial),
            why=f"rank {rank}: something outside the run ended it; where memory is short, the system does",
            fix="start again: the run resumes from its newest checkpoint; or set checkpoint.asynchronous=false",
            exit_code=EXIT_FAILED,
            kind=FAULT,
        )
    return UserError(
        "the checkpoint cannot be written",
        where=str(error.filename or partial),
        why=f"rank {rank}: {error.strerror or error}",
        fix="choose another output.dir, or correct its permissions; the checkpoints before this one are untouched",
        exit_code=EXIT_FAILED,
    )


def commit(partial: Path, folder: Path, manifest: Manifest) -> None:
    """The last step, by rank 0, once every rank's files are on the disk: the checkpoint exists from here on. UserError
    if they are not all there, ``SEEN_LATE_S`` later where other ranks have written some.
    """
    wanted = {name: entry.bytes for name, entry in manifest.files.items()}
    deadline = time.monotonic() + (SEEN_LATE_S if manifest.world_size > 1 else 0)
    while (seen := {path.name: path.stat().st_size for path in partial.iterdir()}) != wanted:
        if time.monotonic() < deadline:
            advance()
            time.sleep(POLL_S)
            continue
        missing = sorted(name for name in wanted if seen.get(name) != wanted[name]) or sorted(set(seen) - set(wanted))
        raise not_shared(partial, missing[0])
    write_manifest(partial, manifest)
    old = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    rename_synced(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def not_shared(partial: Path, name: str) -> UserError:
    """Rank 0 does not find the file ``name`` of another rank."""
    return UserError(
        "the ranks do not see the same checkpoint folder",
        where=str(partial),
        why=f"rank 0 does not find {name} as another rank wrote it",
        fix="set output.dir to a folder that all machines share",
        exit_code=EXIT_FAILED,
    )
