"""Stages after the last step: the model is written, reopened in a fresh process, compared, and reported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import torch

from manyhands.checkpoint.load import load_checkpoint
from manyhands.checkpoint.retention import checkpoint_folder
from manyhands.convert.protocol import method_of
from manyhands.core.collectives import run_on_first
from manyhands.data.streams import TOKENS
from manyhands.export.adapter import export_adapter, name_base
from manyhands.export.card import make_card
from manyhands.export.model import choose_dtype, export_model
from manyhands.export.reference import round_weights, save_probe
from manyhands.export.verify_process import verify_in_fresh_process
from manyhands.metrics.report import write_report
from manyhands.metrics.summary import describe_data, describe_versions
from manyhands.worker.rank import Rank
from manyhands.worker.training import stop_if_asked

PROBE_TOKENS = 32


def export(rank: Rank) -> None:
    """Writes model/ or adapter/ (and merged/ if asked), with the hashes and logits that verification compares with."""
    config, plan, folder = rank.config, rank.plan, rank.folder
    if config.checkpoint.keep_best and rank.state.best_step not in (None, rank.state.step):
        assert rank.state.best_step is not None
        load_checkpoint(checkpoint_folder(folder.checkpoints, rank.state.best_step), rank.model, rank.optimizer)
        rank.say(
            f"exporting the best checkpoint: step {rank.state.best_step}, validation loss {rank.state.best_loss:.4f}"
        )
    source = Path(plan.model_folder)
    adapters = config.method.trains_adapters
    if not adapters or config.output.merge:
        name: Literal["merged", "model"] = "merged" if adapters else "model"
        dtype = choose_dtype(plan, config, merge=adapters)
        export_model(
            folder.path / name,
            rank.model,
            source,
            dtype,
            rank=rank.world.rank,
            merge=adapters,
            asked=config.model,
            replace=True,
            reference_path=_reference(rank, name),
            card=partial(_card, rank, name, dtype),
        )
    if adapters:
        export_adapter(
            folder.path / "adapter",
            rank.model,
            method_of(plan, config),
            name_base(config),
            rank=rank.world.rank,
            dtype=plan.output_dtype,
            source=source,
            asked=config.model,
            replace=True,
            reference_path=_reference(rank, "adapter"),
            card=partial(_card, rank, "adapter", plan.output_dtype),
        )
    else:
        round_weights(rank.model, plan.output_dtype)  # written; nothing trains them further
    _save_probe(rank)


def verify(rank: Rank) -> None:
    """Everything that was written is reopened by a fresh process; a difference fails the run."""
    plan = rank.plan
    stop_if_asked(rank)
    pretrained = rank.config.model.init == "pretrained"
    for name in ("model", "merged", "adapter"):
        folder = rank.folder.path / name
        if not _reference(rank, name).exists():
            continue
        base = Path(plan.model_folder) if name == "adapter" and pretrained else None
        said = run_on_first(
            lambda folder=folder, name=name, base=base: verify_in_fresh_process(  # type: ignore[misc]
                folder, _reference(rank, name), base=base, probe_path=_probe(rank), stop=rank.stop
            )
        )
        stop_if_asked(rank)
        rank.measured.setdefault("verified", {})[name] = (said or "").partition(": ")[2]
        if said:
            rank.say(said)


def report(rank: Rank) -> None:
    """Plan beside measurement; then the run is finished."""
    peak = torch.cuda.max_memory_allocated(rank.world.device) if rank.world.device.type == "cuda" else None
    peaks = rank.parallel.all_gather(torch.tensor([peak or 0], dtype=torch.float64, device=rank.world.device))
    if not rank.is_first:
        return
    rank.measured |= {
        "data": describe_data(rank.store.meta),
        "device": name_device(rank),
        "started": rank.folder.started,
    }
    rank.measured["peak_bytes_by_rank"] = [int(p.item()) for p in peaks] if peak is not None else None
    write_report(rank.folder.path, rank.plan, rank.config, rank.state, rank.measured)
    rank.folder.write_status("finished", step=rank.state.step, reason=rank.state.stop_reason)
    rank.say(f"finished: {rank.folder.path}")


def _card(rank: Rank, kind: Literal["adapter", "model", "merged"], dtype: str) -> str:
    state, run = rank.state, rank.folder.path
    step = state.best_step if rank.config.checkpoint.keep_best and state.best_step is not None else state.step
    versions, divergence = describe_versions(), state.divergence
    return make_card(
        kind, rank.config, rank.plan, run, step=step, dtype=dtype, versions=versions, divergence=divergence
    )


def name_device(rank: Rank) -> str | None:
    """What the GPU is called; None on a CPU."""
    return torch.cuda.get_device_name(rank.world.device) if rank.world.device.type == "cuda" else None


def _reference(rank: Rank, name: str) -> Path:
    return rank.folder.path / "verify" / f"{name}.json"


def _probe(rank: Rank) -> Path:
    return rank.folder.path / "verify" / "probe.safetensors"


def _save_probe(rank: Rank) -> None:
    """Logits of the model in memory on the first tokens of the first training row."""
    rank.loss_model.eval()
    ids = (
        torch.from_numpy(rank.store.train.sample(0)[TOKENS.name][:PROBE_TOKENS].copy())
        .long()[None]
        .to(rank.world.device)
    )
    length = ids.shape[1]
    positions = torch.arange(length, device=ids.device)[None]
    bounds = torch.tensor([0, length], dtype=torch.int32, device=ids.device)
    logits = rank.parallel.logits(
        {"input_ids": ids, "position_ids": positions, "cu_seq_lens": bounds, "max_length": length}
    )
    run_on_first(lambda: save_probe(_probe(rank), ids, logits, rank.plan.compute_dtype))
