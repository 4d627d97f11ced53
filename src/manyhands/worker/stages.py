"""Stages before step 1: open data, build, shard and optimize the model, check, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from manyhands.checkpoint.load import find_sound
from manyhands.checkpoint.manifest import clean_leftovers
from manyhands.convert.build import build_on_meta, count_parameters, describe_new, load_weights, make_all
from manyhands.convert.protocol import Context
from manyhands.core.collective_errors import run_on_rank_0, user_errors_on_all_ranks
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.holding import full_numel
from manyhands.data.store.store import TokenStore
from manyhands.data.tokenize.tokenizer import open_tokenizer
from manyhands.engine.apply import apply
from manyhands.facts.identity import check_files
from manyhands.launch.run.resume import refuse_other_checkpoint
from manyhands.model.checks import (
    check_batches,
    check_context,
    check_loss,
    check_packing,
    check_padding,
    check_prompts,
    foreign_errors,
)
from manyhands.model.inputs import check_inputs, describe_batch, keep_features
from manyhands.training.types import TrainState
from manyhands.worker.batches import largest_batches, probe_batch
from manyhands.worker.rank import BuiltModel, Data, Rank, RunEngine


def open_data(rank: Rank) -> Data:
    """Opens the samples that rank 0 has prepared, and checks that they are the same."""
    plan = rank.plan
    if not Path(plan.data_folder).is_dir():
        raise UserError(
            f"rank {rank.world.rank} does not see the prepared data",
            where=plan.data_folder,
            why="data is prepared by rank 0, and this machine does not share its disk",
            fix="put data.cache on a disk that all machines share, or copy the folder to the same place",
            exit_code=EXIT_FAILED,
        )
    store = TokenStore.open(plan.data_folder)
    if (store.digest, store.content) != (plan.data_digest, plan.data_content):
        raise UserError(
            "the prepared data is not the plan's",
            where=f"{plan.data_folder}, as rank {rank.world.rank} sees it",
            why="its tokens differ from those that rank 0 has prepared",
            fix="copy rank 0's folder to this machine again, or start again",
            exit_code=EXIT_FAILED,
        )
    if plan.shares_prompts:
        store = store.share_prompts()
    order = store.order_samples(rank.config.seed, **plan.step_size)
    return Data(store, order, open_tokenizer(plan.model_folder, rank.config.model))


def check_base(rank: Rank) -> None:
    """One rank of each machine checks that the model's files there are those of the plan, which rank 0 has made."""
    if rank.world.local_rank == 0:
        folder = Path(rank.plan.model_folder)
        check_files(folder, rank.config, rank.plan.model_files, progress=lambda _: rank.process.beat())


def find_checkpoint(rank: Rank) -> Path | None:
    """The newest checkpoint that is sound, from which the run resumes; None where there is none."""
    folder, report = rank.folder.checkpoints, rank.process.print
    run_on_rank_0(lambda: clean_leftovers(folder, report))  # the others wait: it may rename what they would list
    found = find_sound(folder, report)
    if found is not None:
        run_on_rank_0(lambda: refuse_other_checkpoint(found, rank.config, rank.folder))
    return found


def build_model(rank: Rank, *, resumes: bool = False) -> BuiltModel:
    """Builds the model: meta, converters, weights, optimizer. ``resumes``: a checkpoint brings first values."""
    plan, config, world, report = rank.plan, rank.config, rank.world, rank.process.print
    if config.kernels.deterministic:  # before kernels are chosen: what has none that sums in a fixed order raises
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it
    context = Context(config, plan, world.device, resumes=resumes)
    reported: set[str] = set()
    with user_errors_on_all_ranks():  # such as a kernel that fails its self-test on one GPU alone
        converters = make_all(context)
        loss_model = build_on_meta(context, converters, report)
    for line in describe_new(converters, reported):
        report(line)
    engine = apply(
        loss_model, plan, world, lambda module, device: load_weights(context, converters, module, device), config
    )
    for line in describe_new(converters, reported):
        report(line)
    if note := engine.make_optimizer(plan, config):
        report(note)
    trained = sum(full_numel(p) for p in loss_model.model.parameters() if p.requires_grad)
    total = count_parameters(loss_model.model)
    report(f"model: {total:,} parameters, {trained:,} trained ({trained / total:.2%})")
    keep_features(config, plan, loss_model)
    measured = {"num_parameters": total, "num_trained_parameters": trained}
    return BuiltModel(loss_model, engine, converters, measured)


def check_model(rank: Rank, data: Data, built: BuiltModel) -> dict[str, Any]:
    """Compares fast paths with the loaded model before a launch's first step; returns converters' figures."""
    engine, loss_model, device = built.engine, built.loss_model, rank.world.device
    packing, report = rank.plan.packing, rank.process.print
    measured: dict[str, Any] = {}
    with foreign_errors(loss_model):
        check_loss(engine, loss_model, device)
        check_rows = check_packing if packing else check_padding
        routes_at_random = rank.config.model.init == "random" and rank.plan.num_active > 0
        check_rows(engine, loss_model, device, routes_at_random=routes_at_random)
        if rank.plan.shares_prompts:
            check_prompts(engine, loss_model, device, routes_at_random=routes_at_random)
        mesh = rank.plan.layout.mesh
        if mesh.context > 1:
            place = mesh.coordinates(rank.world.rank)["context"]
            check_context(engine, loss_model, device, place, mesh.context)
        sets = (data.store.train, data.store.validation)
        longest = max(int(each.lengths.max()) for each in sets if len(each.lengths))
        check_batches(engine, loss_model, device, packing=packing, longest=longest)
        if line := check_inputs(engine, loss_model, rank.config, rank.plan, data.store, data.tokenizer, device):
            report(line)
        batch = probe_batch(rank, data, loss_model)
        for converter in built.converters:
            with user_errors_on_all_ranks():
                found = converter.before_first_step(built.model, engine, batch)
            if found is not None:
                report(found.text)
                measured |= found.measured
    report(f"loss: {loss_model.how_loss}")
    if loss_model.states and packing:
        report(f"mixers: {loss_model.states}")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the checks held, in pieces of other sizes than a step's
        torch.cuda.reset_peak_memory_stats(device)
    return measured


def try_largest(rank: Rank, data: Data, built: BuiltModel) -> None:
    """The largest micro-batch before the first step, on GPUs by torch's own engine: too little memory shows at once.

    It is as large as any of the run, of the longest samples (two where another needs more for its length), while all
    else that a step holds is there. Nothing is trained: the loss is times zero, its gradients are dropped. Collective.
    """
    if rank.world.device.type == "cuda" and not rank.plan.layout.zero_stage:
        run_largest(rank, data, built)


def run_largest(rank: Rank, data: Data, built: BuiltModel) -> None:
    """Forward and backward (twice if gradients accumulate), then the evaluation's forward pass."""
    engine, loss_model, layout, device = built.engine, built.loss_model, rank.plan.layout, rank.world.device
    states = None
    if not engine.optimizer.state and layout.offload == "none" and layout.device != "cpu":
        # As many bytes as optimizer states will take, where these are only made in the first update.
        states = torch.empty(rank.plan.memory.terms.get("optimizer", 0), dtype=torch.uint8, device=device)
    sizes = []
    loss_model.train()
    for batch in largest_batches(rank, data, loss_model, "train"):
        for last in (False, True) if layout.accumulates else (True,):
            terms = engine.forward(batch)
            engine.backward(torch.stack([term_sum for term_sum, _ in terms.values()]).sum() * 0, last=last)
            del terms
        engine.gradient_norm()
        engine.drop_gradients()
        sizes.append(describe_batch(batch))
    if len(data.store.validation.lengths):
        loss_model.eval()
        with torch.no_grad():
            for batch in largest_batches(rank, data, loss_model, "validation"):
                engine.forward(batch)
        loss_model.train()
    del states
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    rank.process.print(f"largest micro-batch: {' and '.join(sizes)}, forward and backward, fits")


def resume(rank: Rank, engine: RunEngine, checkpoint: Path | None) -> TrainState:
    """The state of the checkpoint, on whatever number of ranks there is now; that of the start where there is none."""
    if checkpoint is None:
        return TrainState()
    state = TrainState(**engine.load(checkpoint, is_checked=True, report=rank.process.print))
    rank.process.step = state.step
    rank.process.print(f"resumed after step {state.step} from {checkpoint.name}")
    return state
