"""Stages after the last step: the model is written, reopened in a fresh process, compared, and reported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from manyhands.checkpoint.manifest import checkpoint_folder
from manyhands.core.collective_errors import run_on_rank_0
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.export.card import make_card
from manyhands.export.outputs import Output, base_of, choose_output_dtype, list_outputs, write_output
from manyhands.export.probe import write_probe
from manyhands.export.record import mark_verified, name_source
from manyhands.export.verify_process import verify_in_fresh_process
from manyhands.launch.run.resume import refuse_other_checkpoint
from manyhands.metrics.report import write_report
from manyhands.metrics.summary import describe_data, describe_versions
from manyhands.training.types import TrainState
from manyhands.worker.rank import BuiltModel, Data, Rank, RunEngine
from manyhands.worker.training import stop_if_asked


def export(rank: Rank, data: Data, built: BuiltModel, state: TrainState) -> None:
    """Writes what the run leaves, with the hashes and logits that verification compares with."""
    config, plan, folder = rank.config, rank.plan, rank.folder
    run_on_rank_0(folder.refuse_gone)
    if exports_best(rank, state):
        _load_best(rank, built.engine, state)
        rank.process.print(
            f"exporting the best checkpoint: step {state.best_step}, validation loss {state.best_loss:.4f}"
        )
    for output in list_outputs(config):
        write_output(
            output,
            folder.path / output,
            built.model,
            plan,
            config,
            rank=rank.world.rank,
            reference_path=_reference(rank, output),
            card=partial(_card, rank, state, output),
            replace=True,
        )
    write_probe(
        _probe(rank), built.engine, built.loss_model, config, plan, data.store, data.tokenizer, rank.world.device
    )


def exports_best(rank: Rank, state: TrainState) -> bool:
    """Whether it is an earlier checkpoint than the last one that is exported."""
    return rank.config.checkpoint.keep_best and state.best_step not in (None, state.step)


def _load_best(rank: Rank, engine: RunEngine, state: TrainState) -> None:
    """UserError on every rank where it is damaged. A run resumes from its newest one, so nothing makes it again."""
    best = checkpoint_folder(rank.folder.checkpoints, state.best_step or 0)
    run_on_rank_0(lambda: refuse_other_checkpoint(best, rank.config, rank.folder))
    try:
        engine.load(best)
    except UserError as error:
        last = checkpoint_folder(rank.folder.checkpoints, state.step)
        raise UserError(
            f"the best checkpoint, of step {state.best_step}, cannot be exported",
            where=error.where,
            why=f"{error.what}: {error.why}",
            fix=f"restore {best.name} from a copy and start the run again, or export the last one:"
            f" manyhands export {last}",
            details=error.details,
            exit_code=EXIT_FAILED,
        ) from error


def verify(rank: Rank, engine: RunEngine, state: TrainState) -> dict[Output, str]:
    """A fresh process reopens all that was written; a difference fails the run. Returns findings by output."""
    stop_if_asked(rank, engine)
    verified: dict[Output, str] = {}
    for name in list_outputs(rank.config):
        line = run_on_rank_0(partial(_verify_one, rank, state, name))
        stop_if_asked(rank, engine)
        verified[name] = (line or "").partition(": ")[2]
        if line:
            rank.process.print(line)
    return verified


def _verify_one(rank: Rank, state: TrainState, name: Output) -> str | None:
    folder, base = rank.folder.path / name, base_of(name, rank.plan, rank.config)
    line = verify_in_fresh_process(
        folder, _reference(rank, name), base=base, probe_path=_probe(rank), stop=rank.process.stop
    )
    if line:
        step = state.best_step if exports_best(rank, state) else state.step
        checkpoint = checkpoint_folder(rank.folder.checkpoints, step or 0)
        source = name_source(name, choose_output_dtype(name, rank.plan, rank.config), checkpoint)
        mark_verified(folder, line.partition(": ")[2], source)
    return line


def report(rank: Rank, data: Data, engine: RunEngine, state: TrainState, measured: dict[str, Any]) -> None:
    """Writes the report, which compares the plan with what was ``measured``; then the run is finished."""
    device, folder = rank.world.device, rank.folder
    is_gpu = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) if is_gpu else 0
    peaks = engine.all_gather(torch.tensor([peak], dtype=torch.float64, device=device))
    run_on_rank_0(folder.refuse_gone)
    if not rank.world.is_first:
        return
    measured = {
        **measured,
        "data": describe_data(data.store.meta),
        "device": torch.cuda.get_device_name(device) if is_gpu else None,
        "started": folder.started,
        "peak_bytes_by_rank": [int(each.item()) for each in peaks] if is_gpu else None,
    }
    write_report(folder.path, rank.plan, rank.config, state, measured)
    folder.write_status("finished", step=state.step, reason=state.stop_reason)
    note = "; no weight has moved, see above" if "unmoved" in measured else ""
    rank.process.print(f"finished: {folder.path}{note}")


def _card(rank: Rank, state: TrainState, output: Output, *, vllm_misreads: bool = False) -> str:
    step = state.best_step if rank.config.checkpoint.keep_best and state.best_step is not None else state.step
    return make_card(
        output,
        rank.config,
        rank.plan,
        rank.folder.path,
        step=step,
        dtype=choose_output_dtype(output, rank.plan, rank.config),
        versions=describe_versions(),
        divergence=state.divergence,
        vllm_misreads=vllm_misreads,
    )


def _reference(rank: Rank, name: str) -> Path:
    return rank.folder.path / "verify" / f"{name}.json"


def _probe(rank: Rank) -> Path:
    return rank.folder.path / "verify" / "probe.safetensors"
