"""One rank, top to bottom: the list of its stages."""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from manyhands.core.collective_errors import run_on_all_ranks
from manyhands.core.errors import EXIT_FAILED, OUT_OF_MEMORY, PeerError, UserError
from manyhands.launch.run.folder import RunFolder
from manyhands.planner.types import MemoryFound
from manyhands.training.loop import Interrupted
from manyhands.training.types import Hook
from manyhands.worker import export_stages, stages, training
from manyhands.worker.health import check_machines
from manyhands.worker.hooks import MakeHook, make_hooks, read_hooks
from manyhands.worker.rank import Rank
from manyhands.worker.reference import attach_reference, has_reference
from manyhands.worker.rendezvous import join
from manyhands.worker.session import Session

# A smaller micro-batch does not help these: they have none, or come after the last.
NOT_OF_MICRO_BATCHES = (
    "check machines",
    "open data",
    "check base model",
    "find checkpoint",
    "build model",
    "resume",
    "checkpoint",
    "export",
    "verify",
    "report",
)
# What memory that has run out is called where it is no torch.OutOfMemoryError: by the driver, cuBLAS, cuDNN, torch on a
# CPU.
_OUT_OF_MEMORY = re.compile(r"out of memory|STATUS_ALLOC_FAILED|can't allocate memory", re.IGNORECASE)


def run_rank(session: Session, arguments: argparse.Namespace) -> int:
    """Runs every stage; returns the exit code."""
    owns_group = not dist.is_initialized()
    rank = join(session, arguments)
    if rank is None:
        session.close_heartbeat()
        return 0
    try:
        run_stages(rank, session.hooks, read_hooks(arguments.hook, arguments.metric))
    except Interrupted:
        return end_interrupted(session, rank.folder)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise explain_out_of_memory(rank, error) from error
    run_on_all_ranks(lambda: None)  # barrier before teardown
    if owns_group:
        dist.destroy_process_group()
    session.close_heartbeat()
    if session.is_first and session.launcher.kind != "manyhands":  # our launcher does it itself
        rank.folder.clear_ranks()
    return 0


def run_stages(rank: Rank, hooks: Sequence[Hook], makers: Sequence[MakeHook]) -> None:
    """One rank, top to bottom. ``hooks`` of the loop; ``makers`` of further ones, called when the model is there."""
    enter = rank.process.enter
    enter("check machines")
    check_machines(rank)
    enter("open data")
    data = stages.open_data(rank)
    enter("check base model")
    stages.check_base(rank)
    enter("find checkpoint")
    checkpoint = stages.find_checkpoint(rank)
    enter("build model")
    built = stages.build_model(rank, resumes=checkpoint is not None and has_reference(rank, data))
    enter("reference")
    data = attach_reference(rank, data, built)
    measured: dict[str, Any] = {**built.measured}  # for the report
    enter("check model")
    measured |= stages.check_model(rank, data, built)
    enter("resume")
    state = stages.resume(rank, built.engine, checkpoint)
    enter("try largest batch")
    stages.try_largest(rank, data, built)
    enter("train")
    hooks = [*hooks, *make_hooks(makers, rank, data, built)]
    state = training.train_model(rank, data, built, state, hooks, measured)
    enter("export")
    export_stages.export(rank, data, built, state)
    enter("verify")
    measured["verified"] = export_stages.verify(rank, built.engine, state)
    enter("report")
    export_stages.report(rank, data, built.engine, state, measured)


def end_interrupted(session: Session, folder: RunFolder) -> int:
    """What is left to do when the run was asked to stop and is saved; returns the exit code. Every rank calls it."""
    kind, number = session.launcher.kind, session.stop.number
    # An agent of torch starts ranks that end with anything but 0 again, and Kubernetes may, without the file.
    is_final = kind in ("torchrun", "accelerate") and any(run_on_all_ranks(lambda: session.stop_by_file))
    session.close_heartbeat()
    if session.stop_by_file:
        folder.write_status("interrupted", reason=folder.stop_file.name)
        folder.stop_file.unlink(missing_ok=True)
    elif session.is_first and kind != "manyhands":  # our launcher does it itself
        asked = folder.read_stop_reason() or "a rank was asked to stop"
        reason = signal.Signals(number).name if number else asked
        folder.write_status("interrupted", reason=reason)
    session.print(f"stopped after step {session.step}; the same command resumes from there")
    if kind == "slurm":
        run_on_all_ranks(lambda: None)  # srun --kill-on-bad-exit ends all ranks with the first that leaves
    if is_final:
        return 0
    return session.stop.exit_code


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, a driver or a library could not get the memory it asked for."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, PeerError):  # quotes another rank's, which says it itself
        return False
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def explain_out_of_memory(rank: Rank, error: BaseException) -> UserError:
    """The plan's estimate beside what there was. The launcher, or the next start, plans smaller."""
    device, gib, planned = rank.world.device, 2**30, rank.plan.memory
    found = measure_memory(device, str(error), planned.outside_bytes) if device.type == "cuda" else None
    had = ""
    if found is not None:
        had = f"{found.needed / gib:.1f} GiB needed or more, {found.available / gib:.1f} GiB available, "
    helps = rank.process.stage not in NOT_OF_MICRO_BATCHES
    fix = "start it again: the next start plans a smaller micro-batch with the same global batch"
    if not helps:
        fix = "use more GPUs with parallel.strategy=fsdp, or end other programs that hold memory;"
        fix += " the same command resumes"
    process, what = rank.process, "GPU memory" if device.type == "cuda" else "memory"
    return UserError(
        f"out of {what} in stage '{process.stage}' at step {process.step}",
        where=f"rank {rank.world.rank}: {had}planned {planned.total / gib:.1f} GiB",
        why=str(error).split(". ")[0],
        fix=fix,
        details=[f"{name}: {size / gib:.1f} GiB estimated" for name, size in planned.terms.items()],
        exit_code=EXIT_FAILED,
        kind=OUT_OF_MEMORY if helps else "",
        data=found.model_dump() if found is not None else None,
    )


_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def measure_memory(device: torch.device, message: str, outside: int) -> MemoryFound | None:
    """Memory needed and available as a step fails, or None. ``outside``: planned outside of torch's allocator."""
    asked = _ASKED.search(message)
    try:
        held, (free, _) = torch.cuda.memory_reserved(device) + outside, torch.cuda.mem_get_info(device)
        peak = torch.cuda.max_memory_allocated(device) + outside
    except RuntimeError:
        return None
    request = int(float(asked[1]) * _UNITS[asked[2]]) if asked else 0
    return MemoryFound(needed=max(peak, held + request), available=held + free)
