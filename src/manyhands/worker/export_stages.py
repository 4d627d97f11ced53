"""Stages after the last step: the model is written, reopened in a fresh process, compared, and reported."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch

from manyhands.checkpoint.manifest import checkpoint_folder
from manyhands.core.collective_errors import run_on_rank_0
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.data.batches import collate
from manyhands.data.collate import BatchShape
from manyhands.data.streams import TOKENS, from_streams
from manyhands.export.card import make_card
from manyhands.export.outputs import Output, base_of, choose_output_dtype, list_outputs, write_output
from manyhands.export.record import mark_verified, name_source
from manyhands.export.reference import save_probe
from manyhands.export.verify_process import verify_in_fresh_process
from manyhands.infer.images import PromptImages, sizes_of
from manyhands.launch.resume_rules import refuse_other_checkpoint
from manyhands.metrics.report import write_report
from manyhands.metrics.summary import describe_data, describe_versions
from manyhands.worker.batches import images_of
from manyhands.worker.context import RankContext
from manyhands.worker.training import stop_if_asked

PROBE_TOKENS = 32
MAX_LOOKED_AT, MAX_IMAGE_PROBE = 10_000, 4096  # samples, and tokens of the one whose images are shown to the model


def export(rank: RankContext) -> None:
    """Writes what the run leaves, with the hashes and logits that verification compares with."""
    config, plan, folder = rank.config, rank.plan, rank.folder
    run_on_rank_0(folder.refuse_gone)
    if exports_best(rank):
        assert rank.state.best_step is not None
        _load_best(rank, checkpoint_folder(folder.checkpoints, rank.state.best_step))
        rank.print(
            f"exporting the best checkpoint: step {rank.state.best_step}, validation loss {rank.state.best_loss:.4f}"
        )
    for output in list_outputs(config):
        write_output(
            output,
            folder.path / output,
            rank.model,
            plan,
            config,
            rank=rank.world.rank,
            reference_path=_reference(rank, output),
            card=partial(_card, rank, output),
            replace=True,
        )
    _save_probe(rank)


def exports_best(rank: RankContext) -> bool:
    """Whether it is an earlier checkpoint than the last one that is exported."""
    return rank.config.checkpoint.keep_best and rank.state.best_step not in (None, rank.state.step)


def _load_best(rank: RankContext, best: Path) -> None:
    """UserError on every rank where it is damaged. A run resumes from its newest one, so nothing makes it again."""
    run_on_rank_0(lambda: refuse_other_checkpoint(best, rank.config, rank.folder))
    try:
        rank.engine.load(best)
    except UserError as error:
        last = checkpoint_folder(rank.folder.checkpoints, rank.state.step)
        raise UserError(
            f"the best checkpoint, of step {rank.state.best_step}, cannot be exported",
            where=error.where,
            why=f"{error.what}: {error.why}",
            fix=f"restore {best.name} from a copy and start the run again, or export the last one:"
            f" manyhands export {last}",
            details=error.details,
            exit_code=EXIT_FAILED,
        ) from error


def verify(rank: RankContext) -> None:
    """Everything that was written is reopened by a fresh process; a difference fails the run."""
    stop_if_asked(rank)
    for name in list_outputs(rank.config):
        folder, base = rank.folder.path / name, base_of(name, rank.plan, rank.config)
        said = run_on_rank_0(partial(_verify_one, rank, name, folder, base))
        stop_if_asked(rank)
        rank.measured.setdefault("verified", {})[name] = (said or "").partition(": ")[2]
        if said:
            rank.print(said)


def _verify_one(rank: RankContext, name: Output, folder: Path, base: Path | None) -> str | None:
    said = verify_in_fresh_process(folder, _reference(rank, name), base=base, probe_path=_probe(rank), stop=rank.stop)
    if said:
        step = rank.state.best_step if exports_best(rank) else rank.state.step
        checkpoint = checkpoint_folder(rank.folder.checkpoints, step or 0)
        source = name_source(name, choose_output_dtype(name, rank.plan, rank.config), checkpoint)
        mark_verified(folder, said.partition(": ")[2], source)
    return said


def report(rank: RankContext) -> None:
    """Writes the report, which compares the plan with what was measured; then the run is finished."""
    peak = torch.cuda.max_memory_allocated(rank.world.device) if rank.world.device.type == "cuda" else None
    peaks = rank.engine.all_gather(torch.tensor([peak or 0], dtype=torch.float64, device=rank.world.device))
    run_on_rank_0(rank.folder.refuse_gone)
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
    note = "; no weight has moved, see above" if "unmoved" in rank.measured else ""
    rank.print(f"finished: {rank.folder.path}{note}")


def _card(rank: RankContext, output: Output) -> str:
    state, run = rank.state, rank.folder.path
    step = state.best_step if rank.config.checkpoint.keep_best and state.best_step is not None else state.step
    dtype = choose_output_dtype(output, rank.plan, rank.config)
    versions, divergence = describe_versions(), state.divergence
    return make_card(
        output, rank.config, rank.plan, run, step=step, dtype=dtype, versions=versions, divergence=divergence
    )


def name_device(rank: RankContext) -> str | None:
    """What the GPU is called; None on a CPU."""
    return torch.cuda.get_device_name(rank.world.device) if rank.world.device.type == "cuda" else None


def _reference(rank: RankContext, name: str) -> Path:
    return rank.folder.path / "verify" / f"{name}.json"


def _probe(rank: RankContext) -> Path:
    return rank.folder.path / "verify" / "probe.safetensors"


def _row_with_images(rank: RankContext) -> int | None:
    """A short training sample with images; None where there is none, or the model reads text alone."""
    counts, lengths = rank.store.train.num_images, rank.store.train.lengths
    if counts is None or rank.plan.parts.get("vision", "left_out") == "left_out":
        return None
    images, tokens = rank.loss_model.images, rank.store.train.image_tokens
    shown = counts > 0
    if images is not None and tokens is not None and images.layout.kind.fails_on_one_token:
        shown = tokens > 1  # transformers' own forward pass takes no only image of one token
    found = np.flatnonzero(shown[:MAX_LOOKED_AT] & (lengths[:MAX_LOOKED_AT] <= MAX_IMAGE_PROBE))
    return int(found[0]) if len(found) else None


def _save_image_probe(rank: RankContext, number: int) -> None:
    """The last logits of a sample with images, and what transformers takes for these."""
    samples = rank.store.train
    shape = BatchShape(packed=rank.plan.packing, images=images_of(rank))
    batch = {
        name: value.to(rank.world.device) if isinstance(value, torch.Tensor) else value
        for name, value in collate(samples, np.array([number]), shape).items()
    }
    ids = torch.from_numpy(samples.sample(number)[TOKENS.name].copy()).long()[None]
    images = PromptImages(Path(rank.plan.model_folder), rank.tokenizer, sizes_of(rank.config))
    inputs = images.inputs(rank.model, ids[0].tolist(), from_streams(samples.sample(number)))
    with torch.no_grad():
        logits = rank.engine.logits(batch)[:, : ids.shape[1]][:, -PROBE_TOKENS:]
    dtype = rank.plan.layout.compute_dtype
    run_on_rank_0(lambda: save_probe(_probe(rank), ids, logits, dtype, inputs))


def _save_probe(rank: RankContext) -> None:
    """Logits of the model in memory on the first tokens of the first training row, or on a row with images."""
    rank.loss_model.eval()
    if rank.engine.is_local and (number := _row_with_images(rank)) is not None:
        _save_image_probe(rank, number)
        return
    ids = (
        torch.from_numpy(rank.store.train.sample(0)[TOKENS.name][:PROBE_TOKENS].copy())
        .long()[None]
        .to(rank.world.device)
    )
    length = ids.shape[1]
    positions = torch.arange(length, device=ids.device)[None]
    bounds = torch.tensor([0, length], dtype=torch.int32, device=ids.device)
    logits = rank.engine.logits(
        {"input_ids": ids, "position_ids": positions, "cu_seq_lens": bounds, "max_length": length}
    )
    run_on_rank_0(lambda: save_probe(_probe(rank), ids, logits, rank.plan.layout.compute_dtype))
