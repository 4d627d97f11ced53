"""Stages before the first step: data opened, model built on shards, parallelism applied, optimizer made, state
resumed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from manyhands.checkpoint.load import load_checkpoint, newest_checkpoint
from manyhands.checkpoint.retention import clean_leftovers
from manyhands.convert.adapter import adapt
from manyhands.convert.attention import choose_attention_kernels
from manyhands.convert.loftq_init import begin_at_loss
from manyhands.convert.loss import LossModel
from manyhands.convert.quantize import count_parameters
from manyhands.core.collectives import run_on_first
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.holding import first_index, reshard
from manyhands.data.store import TokenStore
from manyhands.data.tokenizer import load_tokenizer
from manyhands.engine.apply import apply
from manyhands.engine.optimizer_offload import StreamedOptimizer
from manyhands.facts.identity import check_files
from manyhands.kernels import nf4
from manyhands.kernels.adamw import FusedAdamW
from manyhands.kernels.adamw import choose_backend as choose_adamw
from manyhands.kernels.backend import Backend
from manyhands.kernels.modules import fuse_lora
from manyhands.model.blocks import find_blocks
from manyhands.model.checks import check_loss, check_packing, check_padding
from manyhands.model.load import build_meta, materialize
from manyhands.train.optimizer import make_optimizer
from manyhands.train.types import TrainState
from manyhands.worker.fp8_stage import begin_fp8, check_products, code_weights_once, fuse_trained
from manyhands.worker.rank import Rank


def open_data(rank: Rank) -> None:
    """Opens the rows that rank 0 has prepared, and makes sure that they are the same rows."""
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
    if (rank.store.digest, rank.store.content) != (plan.data_digest, plan.data_content):
        raise UserError(
            "the prepared data is not the plan's",
            where=f"{plan.data_folder}, as rank {rank.world.rank} sees it",
            why="its tokens differ from those that rank 0 has prepared",
            fix="copy rank 0's folder to this machine again, or start again",
            exit_code=EXIT_FAILED,
        )
    rank.order = rank.store.order_samples(
        rank.config.seed, batch_samples=plan.batch_samples, batch_loss_tokens=plan.batch_loss_tokens
    )
    model = rank.config.model
    rank.tokenizer = load_tokenizer(plan.model_folder, model.chat_template, model.trust_remote_code, model.new_tokens)


def check_base(rank: Rank) -> None:
    """One rank of each machine makes sure that the model's files there are those of the plan, which holds another
    machine's.
    """
    if rank.launcher.local_rank == 0:
        check_files(Path(rank.plan.model_folder), rank.config, rank.plan.model_files, progress=lambda _: rank.beat())


def build_model(rank: Rank) -> None:
    """Meta model, adapters, surgery, weights onto their shards, optimizer."""
    plan, config, world = rank.plan, rank.config, rank.world
    model = build_meta(plan, config, say=rank.say)
    in_fp8 = config.kernels.linear == "fp8"
    if in_fp8:
        begin_fp8(rank, model)
    if config.method.name != "full":
        rank.adapted = adapt(model, plan, config)
        if config.method.name == "qlora":
            _choose_dequantisation(rank)
        if plan.fuse_lora:
            _fuse_adapters(rank, model)
    elif in_fp8:
        fuse_trained(rank, model)
    if plan.fast_attention:
        _choose_attention(rank, model)
    rank.loss_model = LossModel(model, fuse=plan.fuse_loss)
    rank.parallel = apply(
        rank.loss_model, plan, world, lambda module, device: materialize(module, plan, config, device)
    )
    if in_fp8:
        code_weights_once(rank)
    rank.optimizer = _make_optimizer(rank)
    if plan.offload == "optimizer":
        rank.optimizer = StreamedOptimizer(rank.optimizer, world.device)
    trained = sum(p.numel() for p in rank.model.parameters() if p.requires_grad)
    total = count_parameters(rank.model)
    rank.measured |= {"num_parameters": total, "num_trained_parameters": trained}
    rank.say(f"model: {total:,} parameters, {trained:,} trained ({trained / total:.2%})")


def _make_optimizer(rank: Rank) -> torch.optim.Optimizer:
    """The optimizer. AdamW in one pass where weights have a copy that computes, and for weights in bfloat16; which, and
    why, is said.
    """
    plan, config, copy = rank.plan, rank.config, rank.parallel.compute_copy
    blocks, compute_dtype = list(find_blocks(rank.model)), getattr(torch, plan.compute_dtype)
    make = partial(
        make_optimizer, rank.model, config.optimizer, plan.learning_rate, blocks, compute_dtype=compute_dtype
    )
    narrow = plan.master_dtype == "bfloat16"
    if not narrow and (copy is None or not plan.fuse_optimizer or plan.offload != "none"):
        return make()
    backend = (
        Backend("eager", "as asked") if config.kernels.optimizer == "reference" else choose_adamw(rank.world.device)
    )
    why = f" ({backend.reason})" if backend.reason else ""
    if backend.name == "eager" and not narrow:
        rank.say(f"optimizer: torch's own AdamW{why}")
        return make()
    make_adamw = partial(FusedAdamW, backend=backend.name, seed=config.seed, first_index=first_index)
    if copy is not None:
        make_adamw = partial(make_adamw, copies=copy.hand_over(), written=copy.mark_written)
    rank.say(f"optimizer: AdamW with clipping{' and casts' if copy else ''} in one pass, {backend.name}{why}")
    return make(make_adamw=make_adamw)


def _fuse_adapters(rank: Rank, model: Any) -> None:
    """Known attention and MLP modules on fused layers; what stays as it is, and why, is said."""
    report = fuse_lora(model)
    if rank.config.kernels.lora == "fused" and not report.fused:
        raise UserError(
            "no adapted module can be fused", where="kernels.lora", why=str(report), fix="set kernels.lora: auto"
        )
    rank.say(f"adapters: {report}")


def _choose_dequantisation(rank: Rank) -> None:
    """What makes weights from NF4, for all layers of this process; which, and why not a faster one, is said."""
    device, dtype = rank.world.device, getattr(torch, rank.plan.compute_dtype)
    asked = rank.config.kernels.nf4
    backend = Backend("bitsandbytes", "as asked") if asked == "reference" else nf4.choose_backend(device, dtype)
    nf4.use(backend, dtype)
    rank.say(f"nf4: weights dequantised by {nf4.describe(backend)}")


def _choose_attention(rank: Rank, model: Any) -> None:
    """Kernels for packs, and for rows of one length where all have it; which ones, and why not faster ones, is said."""
    plan, dtype = rank.plan, getattr(torch, rank.plan.compute_dtype)
    kernels = choose_attention_kernels(model.config, rank.world.device, dtype, one_length=plan.pack_tokens is not None)
    rank.say(f"attention: {kernels.describe()}")


def check_model(rank: Rank) -> None:
    """What the fast paths claim is compared with the loaded model itself, before the first step."""
    check_loss(rank.parallel, rank.loss_model, rank.world.device)
    check_rows = check_packing if rank.plan.packing else check_padding
    check_rows(rank.parallel, rank.loss_model, rank.world.device)
    if rank.config.kernels.loss == "fused" and rank.loss_model.why_chunked:
        raise UserError(
            "the loss cannot be fused",
            where="kernels.loss",
            why=rank.loss_model.why_chunked,
            fix="set kernels.loss: auto",
        )
    rank.say(f"loss: {rank.loss_model.how_loss}")
    if rank.config.kernels.linear == "fp8":
        check_products(rank)
    if rank.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(rank.world.device)


def resume(rank: Rank) -> None:
    """From the newest whole checkpoint, on whatever number of ranks there is now; without one, factors get their first
    values.
    """
    checkpoints = rank.folder.checkpoints
    run_on_first(lambda: clean_leftovers(checkpoints))  # the others wait: it may rename what they would list
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        if rank.config.method.init == "loftq":
            _begin_at_loss(rank)
        return
    rank.state = TrainState(**load_checkpoint(newest, rank.model, rank.optimizer))
    rank.say(f"resumed after step {rank.state.step} from {newest.name}")


def _begin_at_loss(rank: Rank) -> None:
    """LoftQ's factors, for a run that begins; a resumed one has them in its checkpoint."""
    reshard(rank.model)
    share = begin_at_loss(rank.model, rank.plan, rank.config, rank.world, rank.beat)
    if rank.world.device.type == "cuda":  # what training takes is measured from here
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(rank.world.device)
    rank.say(f"factors: LoftQ, rank {rank.config.method.rank}: {share:.0%} of what NF4 loses (squared) is taken up")
    rank.say(
        "factors: the adapter belongs to the weights in 4 bits; those in 16 bits lack nothing, and would get that part twice"
    )
