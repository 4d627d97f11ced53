"""Stages before the first step: data opened, model built on shards, parallelism applied, optimizer made, state resumed."""

from __future__ import annotations

from pathlib import Path

import torch

from manyhands.checkpoint.load import load_checkpoint, newest_checkpoint
from manyhands.checkpoint.retention import clean_leftovers
from manyhands.checkpoint.together import run_on_first
from manyhands.data.order import RowOrder
from manyhands.data.store import TokenStore
from manyhands.data.tokenizer import load_tokenizer
from manyhands.errors import EXIT_FAILED, UserError
from manyhands.model.checks import check_loss, check_packing
from manyhands.model.load import build_meta, materialize
from manyhands.model.lora import apply_lora
from manyhands.model.loss import LossModel
from manyhands.parallel.apply import apply
from manyhands.train.optimizer import make_optimizer
from manyhands.train.types import TrainState
from manyhands.worker.rank import Rank


def open_data(rank: Rank) -> None:
    """Memory-maps the rows that rank 0 has prepared, and makes sure that they are the same rows."""
    plan = rank.plan
    if not Path(plan.data_folder).is_dir():
        raise UserError(
            f"rank {rank.world.rank} does not see the prepared data",
            where=plan.data_folder,
            why="data is prepared by rank 0, and this machine does not share its disk",
            fix="put data.cache on a disk that all machines share, or copy the folder to the same place",
            exit_code=EXIT_FAILED,
        )
    rank.store = TokenStore.open(plan.data_folder)
    if rank.store.digest != plan.data_digest:
        raise UserError(
            "the prepared data is not the plan's", where=plan.data_folder, fix="start again; the cache is rebuilt", exit_code=EXIT_FAILED
        )
    train = rank.store.train
    rank.order = RowOrder(
        train.num_rows, rank.config.seed, batch_rows=plan.batch_rows, batch_tokens=plan.batch_tokens, num_targets=train.num_targets
    )
    rank.tokenizer = load_tokenizer(plan.model_folder, rank.config.model.chat_template, rank.config.model.trust_remote_code)


def build_model(rank: Rank) -> None:
    """Meta model, adapters, surgery, weights onto their shards, optimizer."""
    plan, config, world = rank.plan, rank.config, rank.world
    model = build_meta(plan, config)
    if config.method.name == "lora":
        rank.adapted = apply_lora(model, config.method, config.seed)
    rank.loss_model = LossModel(model)
    rank.parallel = apply(rank.loss_model, plan, world, lambda module: materialize(module, plan, config, world.device))
    rank.optimizer = make_optimizer(rank.model, config.optimizer, plan.learning_rate)
    trained = sum(p.numel() for p in rank.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in rank.model.parameters())
    rank.measured |= {"num_parameters": total, "num_trained_parameters": trained}
    rank.say(f"model: {total:,} parameters, {trained:,} trained ({trained / total:.2%})")


def check_model(rank: Rank) -> None:
    """What the fast paths claim is compared with the loaded model itself, before the first step."""
    check_loss(rank.parallel, rank.loss_model, rank.world.device)
    if rank.plan.packing:
        check_packing(rank.parallel, rank.loss_model, rank.world.device)
    if rank.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(rank.world.device)


def resume(rank: Rank) -> None:
    """From the newest whole checkpoint, on whatever number of ranks there is now."""
    checkpoints = rank.folder.checkpoints
    run_on_first(lambda: clean_leftovers(checkpoints))  # the others wait: it may rename what they would list
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        return
    rank.state = TrainState(**load_checkpoint(newest, rank.model, rank.optimizer))
    rank.say(f"resumed after step {rank.state.step} from {newest.name}")
