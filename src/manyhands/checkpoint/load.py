"""Loading a checkpoint into any layout: plain tensors, DTensors, another number of ranks than saved it. Collective."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from manyhands.checkpoint.manifest import (
    TRAIN_STATE,
    Manifest,
    TensorEntry,
    check_hashes,
    check_sizes,
    list_checkpoints,
    read_manifest,
)
from manyhands.checkpoint.tensors import (
    MODEL,
    OPTIMIZER,
    LoadPlanner,
    checkpoint_tensors,
    create_optimizer_state,
    describe,
    trained_parameters,
)
from manyhands.core.collective_errors import run_on_all_ranks, this_rank
from manyhands.core.errors import UserError

MAX_DETAILS = 20


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint, its files present and of the right size; None if there is none.

    Hashes are compared by ``load_checkpoint``, where all ranks share the work. UserError if a file is missing or cut:
    it names the file and the checkpoint before.
    """
    found = list_checkpoints(checkpoints)
    if not found:
        return None
    folder = found[-1][1]
    check_sizes(folder, read_manifest(folder))
    return folder


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Loads trained parameters and optimizer states in place, bit for bit; returns the saved state. Collective.

    Optimizer states are created as the checkpoint has them; without an ``optimizer`` only parameters are loaded, cast
    to the model's dtypes. UserError on every rank for a damaged file (named) or for names, shapes or dtypes that do not
    fit.
    """
    rank, world_size = this_rank()
    manifest = run_on_all_ranks(lambda: read_manifest(folder))[rank]

    def check_files() -> None:
        check_sizes(folder, manifest)
        check_hashes(folder, manifest, part=rank, num_parts=world_size)

    run_on_all_ranks(check_files)
    trained = trained_parameters(model)
    run_on_all_ranks(lambda: _check_fit(folder, trained, manifest.tensors, exact=optimizer is not None))
    if optimizer is not None:
        create_optimizer_state(optimizer, trained, manifest.tensors)
    tensors = checkpoint_tensors(model, optimizer)
    if optimizer is not None:
        run_on_all_ranks(lambda: _check_states(folder, describe(tensors), manifest))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), planner=LoadPlanner())
    return json.loads((folder / TRAIN_STATE).read_text(encoding="utf-8"))


def _check_states(folder: Path, wanted: dict[str, TensorEntry], manifest: Manifest) -> None:
    """Refuses optimizer states that cannot be loaded in this layout, such as 8-bit blocks cut for other shards."""

    def of_optimizer(tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        return {name: entry for name, entry in tensors.items() if name.startswith(OPTIMIZER)}

    here, there = of_optimizer(wanted), of_optimizer(manifest.tensors)
    other = [name for name in sorted(here.keys() | there.keys()) if not _agree(here.get(name), there.get(name))]
    if other:
        raise UserError(
            "the checkpoint's optimizer states cannot be loaded in this layout of ranks",
            where=str(folder),
            why=f"{len(other)} of them are kept in blocks over each rank's shard, as {manifest.world_size} ranks"
            " had them",
            fix=f"resume on {manifest.world_size} processes with the same parallel.strategy",
            details=[name.removeprefix(OPTIMIZER) for name in other[:MAX_DETAILS]],
        )


def _agree(here: TensorEntry | None, there: TensorEntry | None) -> bool:
    return (
        here is not None
        and there is not None
        and (here.shape or (1,)) == (there.shape or (1,))
        and here.dtype == there.dtype
    )


def _check_fit(folder: Path, trained: dict[str, nn.Parameter], saved: dict[str, TensorEntry], exact: bool) -> None:
    """Refuses a checkpoint of another model or method; ``exact`` also compares dtypes."""
    wanted = describe({MODEL + name: parameter for name, parameter in trained.items()})
    parameters = {name: entry for name, entry in saved.items() if name.startswith(MODEL)}
    findings = [f"missing in the checkpoint: {name.removeprefix(MODEL)}" for name in wanted if name not in parameters]
    findings += [f"not trained in this run: {name.removeprefix(MODEL)}" for name in parameters if name not in wanted]
    for name in wanted.keys() & parameters.keys():
        here, there = wanted[name], parameters[name]
        if (here.shape or (1,)) != there.shape:
            findings.append(
                f"{name.removeprefix(MODEL)}: shape {list(here.shape)} here, {list(there.shape)} in the checkpoint"
            )
        elif exact and here.dtype != there.dtype:
            findings.append(f"{name.removeprefix(MODEL)}: {here.dtype} here, {there.dtype} in the checkpoint")
    states = (name.removeprefix(OPTIMIZER).partition(".") for name in saved if name.startswith(OPTIMIZER))
    findings += [
        f"optimizer state {key} of an unknown parameter: {name}" for key, _, name in states if name not in trained
    ]
    if not findings:
        return
    hidden = len(findings) - MAX_DETAILS
    raise UserError(
        "the checkpoint does not fit this model",
        where=str(folder),
        why=f"{len(findings)} of its tensors differ from what this run trains",
        fix="resume with the model, method, rank and target modules that it was saved with",
        details=findings[:MAX_DETAILS] + ([f"... and {hidden} more"] if hidden > 0 else []),
    )
