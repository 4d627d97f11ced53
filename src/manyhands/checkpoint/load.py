"""Loading a checkpoint into any layout: plain tensors, DTensors, another number of ranks than saved it. Collective."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    set_aside,
)
from manyhands.checkpoint.tensors import (
    MODEL,
    OPTIMIZER,
    STEP,
    ConvertsState,
    LoadPlanner,
    checkpoint_tensors,
    create_optimizer_state,
    describe,
    trained_parameters,
)
from manyhands.core.collective_errors import run_on_all_ranks, run_on_rank_0, this_rank
from manyhands.core.errors import DAMAGED, EXIT_FAILED, UserError
from manyhands.core.progress import advance

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
    try:
        check_sizes(folder, read_manifest(folder))
    except (UserError, OSError):
        if folder.exists():
            raise
        return newest_checkpoint(checkpoints)  # the run has removed it meanwhile, as it has a newer one
    return folder


def find_sound(checkpoints: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are all there with the hashes of its manifest; None if there is none at all.
    Collective: ranks share the reading.

    Damaged ones that are newer are renamed, never deleted, and ``report`` hears what that costs. UserError where none
    is sound.
    """
    names = run_on_all_ranks(lambda: [path.name for _, path in reversed(list_checkpoints(checkpoints))])[0]
    damaged: list[UserError] = []
    for name in names:
        try:
            check_files(checkpoints / name)
        except UserError as error:
            if error.kind != DAMAGED:
                raise
            damaged.append(error)
            continue
        for other, fault in zip(names, damaged, strict=False):
            place = run_on_rank_0(functools.partial(set_aside, checkpoints / other))
            lost = _step_of(other) - _step_of(name)
            kept = place.name if place is not None else other
            report(
                f"warning: {fault.what} in {other}: {fault.why}; it is kept as {kept}. The run resumes from {name}:"
                f" {lost} step{'s' * (lost != 1)} {'are' if lost != 1 else 'is'} trained again"
            )
        return checkpoints / name
    if len(damaged) > 1:
        raise UserError(
            "the only checkpoint is damaged" if len(damaged) == 1 else f"all {len(damaged)} checkpoints are damaged",
            where=str(checkpoints),
            why=damaged[0].why,
            fix="restore one of them from a copy, or use --fresh to start over in a new folder",
            details=[str(error.where) for error in damaged],
            exit_code=EXIT_FAILED,
            kind=DAMAGED,
        )
    if damaged:
        raise damaged[0]
    return None


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def check_files(folder: Path) -> Manifest:
    """Checks size and hash of every file, shared by the ranks; returns the manifest. UserError. Collective."""
    rank, world_size = this_rank()
    manifest = run_on_all_ranks(lambda: read_manifest(folder))[rank]

    def check() -> None:
        check_sizes(folder, manifest)
        check_hashes(folder, manifest, part=rank, num_parts=world_size)

    run_on_all_ranks(check)
    return manifest


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    is_checked: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Loads trained parameters and optimizer states in place, bit for bit; returns the saved state. Collective.

    Optimizer states are created as the checkpoint has them; without an ``optimizer`` only parameters are loaded, cast
    to the model's dtypes. States that this layout of ranks keeps in another form are converted, as ``report`` hears on
    every rank. UserError on every rank for a damaged file (named), unless ``check_files`` has seen them, or for names,
    shapes or dtypes that do not fit.
    """
    rank, _ = this_rank()
    manifest = run_on_all_ranks(lambda: read_manifest(folder))[rank] if is_checked else check_files(folder)
    trained = trained_parameters(model)
    run_on_all_ranks(lambda: _check_fit(folder, trained, manifest.tensors, exact=optimizer is not None))
    if optimizer is not None:
        create_optimizer_state(optimizer, trained, manifest.tensors)
    tensors = checkpoint_tensors(model, optimizer)
    others: list[str] = []
    if optimizer is not None:
        others = run_on_all_ranks(lambda: _find_others(folder, trained, optimizer, describe(tensors), manifest))[rank]
    for name in others:
        entry = manifest.tensors[name]
        tensors[name] = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), planner=LoadPlanner())
    if others:
        _convert(optimizer, trained, {name: tensors[name] for name in others}, manifest.world_size, report)
    return json.loads((folder / TRAIN_STATE).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Opened:
    """A checkpoint that fits. ``has_states``: of the optimizer, which it lacks before the first step."""

    saved: dict[str, Any]
    has_states: bool


def open_checkpoint(
    folder: Path, trained: dict[str, nn.Parameter], states: Sequence[str], *, is_checked: bool
) -> Opened:
    """For a layout that reads the files itself: checks that they hold ``trained`` (whose shapes and dtypes are asked
    alone), and for each the optimizer states ``states`` of its shape and dtype, and ``step``, or none at all. UserError
    on every rank. Collective.
    """
    rank, _ = this_rank()
    manifest = run_on_all_ranks(lambda: read_manifest(folder))[rank] if is_checked else check_files(folder)
    wanted = describe({f"{OPTIMIZER}{key}.{name}": p for name, p in trained.items() for key in states})
    saved = {name: entry for name, entry in manifest.tensors.items() if name.startswith(OPTIMIZER)}
    steps = {f"{OPTIMIZER}{STEP}.{name}" for name in trained}

    def check() -> None:
        _check_fit(folder, trained, manifest.tensors, exact=True)
        others = [name for name in saved.keys() | wanted.keys() if not _agree(wanted.get(name), saved.get(name))]
        if saved and (others := sorted(set(others) - (steps & saved.keys()))):
            raise _refused(folder, others, manifest.world_size)

    run_on_all_ranks(check)
    return Opened(json.loads((folder / TRAIN_STATE).read_text(encoding="utf-8")), bool(saved))


def _refused(folder: Path, states: Sequence[str], world_size: int) -> UserError:
    return UserError(
        "the checkpoint's optimizer states cannot be loaded in this layout of ranks",
        where=str(folder),
        why=f"{len(states)} of them are kept in another form than {world_size} ranks had them in",
        fix=f"resume on {world_size} processes with the same parallel.strategy",
        details=[name.removeprefix(OPTIMIZER) for name in states[:MAX_DETAILS]],
    )


def _find_others(
    folder: Path,
    trained: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    wanted: dict[str, TensorEntry],
    manifest: Manifest,
) -> list[str]:
    """Optimizer states with the shapes of another layout, to be converted. UserError for those that cannot be."""

    def of_optimizer(tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        return {name: entry for name, entry in tensors.items() if name.startswith(OPTIMIZER)}

    def converts(full_name: str) -> bool:
        mine, saved = here.get(full_name), there.get(full_name)
        key, name = _split(full_name)
        if mine is None or saved is None or mine.dtype != saved.dtype or not isinstance(optimizer, ConvertsState):
            return False
        return optimizer.converts(trained[name], key, saved.shape)

    here, there = of_optimizer(wanted), of_optimizer(manifest.tensors)
    others = [name for name in sorted(here.keys() | there.keys()) if not _agree(here.get(name), there.get(name))]
    refused = [name for name in others if not converts(name)]
    if refused:
        raise _refused(folder, refused, manifest.world_size)
    return others


def _convert(
    optimizer: torch.optim.Optimizer | None,
    trained: dict[str, nn.Parameter],
    saved: dict[str, torch.Tensor],
    world_size: int,
    report: Callable[[str], None],
) -> None:
    assert isinstance(optimizer, ConvertsState)
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, tensor in saved.items():
        key, name = _split(full_name)
        by_parameter.setdefault(name, {})[key] = tensor
    for name, states in by_parameter.items():
        optimizer.convert_state(trained[name], states)
        advance()
    names = list(by_parameter)
    more = f" and {len(names) - MAX_DETAILS} more" if len(names) > MAX_DETAILS else ""
    report(
        f"note: quantized optimizer states of {len(names)} weight{'s' * (len(names) != 1)} were quantized again, as the"
        f" shards of the {world_size} rank{'s' * (world_size != 1)} that saved them cut other blocks:"
        f" {', '.join(names[:MAX_DETAILS])}{more}"
    )


def _split(full_name: str) -> tuple[str, str]:
    """The key and the parameter's name of an optimizer state."""
    key, _, name = full_name.removeprefix(OPTIMIZER).partition(".")
    return key, name


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
