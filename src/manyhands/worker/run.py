"""One rank, top to bottom: the list of its stages."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist

from manyhands.checkpoint.together import run_together
from manyhands.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from manyhands.train.loop import Interrupted
from manyhands.worker import build, finish, training
from manyhands.worker.agree import agree
from manyhands.worker.rank import Rank


def run_rank(rank: Rank, arguments: argparse.Namespace) -> int:
    """Runs every stage; returns the exit code."""
    stages: tuple[tuple[str, Callable[[Rank], None]], ...] = (
        ("open data", build.open_data),
        ("check base model", build.check_base),
        ("build model", build.build_model),
        ("check model", build.check_model),
        ("resume", build.resume),
        ("train", training.train_model),
        ("export", finish.export),
        ("verify", finish.verify),
        ("report", finish.report),
    )
    if agree(rank, arguments):
        rank.close_heartbeat()
        return 0
    for name, stage in stages:
        rank.stage = name
        rank.beat()
        try:
            stage(rank)
        except Interrupted:
            rank.close_heartbeat()
            rank.say(f"stopped after step {rank.state.step}; the same command goes on from there")
            return rank.stop.exit_code if rank.stop.number else EXIT_INTERRUPTED
        except torch.OutOfMemoryError as error:
            raise explain_out_of_memory(rank, error) from error
    run_together(lambda: None)  # nobody leaves before all have come this far
    dist.destroy_process_group()
    rank.close_heartbeat()
    if rank.is_first and rank.launcher.kind != "manyhands":  # our launcher does it itself
        rank.folder.clear_ranks()
    return 0


def explain_out_of_memory(rank: Rank, error: BaseException) -> UserError:
    """Sets the plan's estimate beside what was there when memory ran out."""
    peak = torch.cuda.max_memory_allocated(rank.world.device) if rank.world.device.type == "cuda" else 0
    gib = 2**30
    terms = [f"{name}: {size / gib:.1f} GiB estimated" for name, size in rank.plan.memory.terms.items()]
    return UserError(
        f"out of GPU memory in stage '{rank.stage}' at step {rank.state.step}",
        where=f"rank {rank.launcher.rank}: peak {peak / gib:.1f} GiB, planned {rank.plan.memory.total / gib:.1f} GiB",
        why=str(error).split(". ")[0],
        fix="lower batch.micro_tokens or batch.micro_rows, set parallel.recompute=block, or use more GPUs with parallel.strategy=fsdp",
        details=terms,
        exit_code=EXIT_FAILED,
    )
