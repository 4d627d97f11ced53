"""Saving a checkpoint: every rank writes its own shards, rank 0 commits. Collective; see the package for the order."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from manyhands.checkpoint.manifest import PARTIAL, REPLACED, TRAIN_STATE, FileEntry, Manifest, hash_file, write_manifest
from manyhands.checkpoint.tensors import SavePlanner, checkpoint_tensors, describe
from manyhands.core.collective_errors import run_on_all_ranks, run_on_rank_0
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import explain_full_disk, is_disk_full, rename_synced, sync, write_json

FILE_BYTES = 2 * 2**30  # a rank's share of one file: the writer holds a file twice in memory while it writes


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
    parts that are done:
    tensors written, files hashed, manifest written.
    """
    progress(0, 3)
    partial = folder.with_name(folder.name + PARTIAL)
    run_on_rank_0(lambda: _make_empty(partial))
    tensors = checkpoint_tensors(model, optimizer)
    _write_tensors(partial, tensors, world_size)
    progress(1, 3)
    if rank == 0:
        write_json(partial / TRAIN_STATE, state)
    files: dict[str, FileEntry] = {}
    for entries in run_on_all_ranks(lambda: _hash_own(partial, rank)):
        files.update(entries)
    progress(2, 3)
    manifest = Manifest(world_size=world_size, files=files, tensors=describe(tensors), extra=manifest_extra or {})
    run_on_rank_0(lambda: _commit(partial, folder, manifest))
    progress(3, 3)


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_tensors(partial: Path, tensors: dict[str, torch.Tensor], world_size: int) -> None:
    writer = HuggingFaceStorageWriter(
        str(partial), fqn_to_index_mapping=_file_numbers(tensors, world_size), save_distributed=True
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(tensors, storage_writer=writer, planner=SavePlanner())
    except CheckpointException as error:
        failures = [(rank, cause) for rank, (cause, _) in sorted(error.failures.items()) if isinstance(cause, OSError)]
        if not failures:
            raise
        if is_disk_full(failures[0][1]):
            raise explain_full_disk(failures[0][1], partial) from error
        raise UserError(
            "the checkpoint cannot be written",
            where=str(partial),
            why=f"rank {failures[0][0]}: {failures[0][1]}",
            fix="choose another output.dir, or correct its permissions; the checkpoints before this one are untouched",
            exit_code=EXIT_FAILED,
        ) from error


def _file_numbers(tensors: dict[str, torch.Tensor], world_size: int) -> dict[str, int]:
    """File number of each tensor, from 1, so that no rank holds much more than FILE_BYTES for one file."""
    numbers, total = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + total // (FILE_BYTES * world_size)
        total += tensor.numel() * tensor.element_size()
    return numbers


def _hash_own(partial: Path, rank: int) -> dict[str, FileEntry]:
    """Files that this rank wrote, once they are on the disk; torch numbers the ranks' shards from 1."""
    own = sorted(partial.glob(f"shard-{rank + 1:05d}-*.safetensors"))
    own += [partial / TRAIN_STATE] if rank == 0 else []
    for path in own:
        sync(path)
    return {path.name: hash_file(path) for path in own}


def _commit(partial: Path, folder: Path, manifest: Manifest) -> None:
    seen = {path.name: path.stat().st_size for path in partial.iterdir()}
    wanted = {name: entry.bytes for name, entry in manifest.files.items()}
    if seen != wanted:
        missing = sorted(name for name in wanted if seen.get(name) != wanted[name]) or sorted(set(seen) - set(wanted))
        raise UserError(
            "the ranks do not see the same checkpoint folder",
            where=str(partial),
            why=f"rank 0 does not find {missing[0]} as another rank wrote it",
            fix="set output.dir to a folder that all machines share",
            exit_code=EXIT_FAILED,
        )
    write_manifest(partial, manifest)
    old = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    rename_synced(partial, folder)
    shutil.rmtree(old, ignore_errors=True)
