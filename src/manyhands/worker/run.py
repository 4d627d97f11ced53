"""One rank, top to bottom: the list of its stages."""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Callable

import torch
import torch.distributed as dist

from manyhands.core.collective_errors import run_on_all_ranks
from manyhands.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, OUT_OF_MEMORY, PeerError, UserError
from manyhands.planner.types import MemoryFound
from manyhands.training.loop import Interrupted
from manyhands.worker import export_stages, stages, training
from manyhands.worker.context import RankContext
from manyhands.worker.health import check_machines
from manyhands.worker.hooks import read_hooks
from manyhands.worker.largest import try_largest
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
    if join(session, arguments):
        session.close_heartbeat()
        return 0
    rank = session.context
    rank.make_hooks = read_hooks(arguments.hook, arguments.metric)
    for name, stage in list_stages():
        session.enter(name)
        try:
            stage(rank)
        except Interrupted:
            return end_interrupted(session)
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


def end_interrupted(session: Session) -> int:
    """What is left to do when the run was asked to stop and is saved; returns the exit code. Every rank calls it."""
    rank, kind = session.context, session.launcher.kind
    # An agent of torch starts ranks that end with anything but 0 again, and Kubernetes may, without the file.
    is_final = kind in ("torchrun", "accelerate") and any(run_on_all_ranks(lambda: rank.stop_by_file))
    session.close_heartbeat()
    number = session.stop.number if session.stop is not None else 0
    if rank.stop_by_file:
        rank.folder.write_status("interrupted", reason=rank.folder.stop_file.name)
        rank.folder.stop_file.unlink(missing_ok=True)
    elif session.is_first and kind != "manyhands":  # our launcher does it itself
        asked = rank.folder.read_stop_reason() or "a rank was asked to stop"
        reason = signal.Signals(number).name if number else asked
        rank.folder.write_status("interrupted", reason=reason)
    rank.print(f"stopped after step {rank.state.step}; the same command resumes from there")
    if kind == "slurm":
        run_on_all_ranks(lambda: None)  # srun --kill-on-bad-exit ends all ranks with the first that leaves
    if is_final:
        return 0
    return session.stop.exit_code if session.stop is not None and number else EXIT_INTERRUPTED


def list_stages() -> tuple[tuple[str, Callable[[RankContext], None]], ...]:
    """All stages by name, in order. Each works on what those before it have put into the context."""
    return (
        ("check machines", check_machines),
        ("open data", stages.open_data),
        ("check base model", stages.check_base),
        ("find checkpoint", stages.find_checkpoint),
        ("build model", stages.build_model),
        ("check model", stages.check_model),
        ("resume", stages.resume),
        ("try largest batch", try_largest),
        ("train", training.train_model),
        ("export", export_stages.export),
        ("verify", export_stages.verify),
        ("report", export_stages.report),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, a driver or a library could not get the memory it asked for."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, PeerError):  # quotes another rank's, which says it itself
        return False
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def explain_out_of_memory(rank: RankContext, error: BaseException) -> UserError:
    """Sets the plan's estimate beside what was there when memory ran out. The launcher, or the next start, plans
    smaller.
    """
    device, gib, planned = rank.world.device, 2**30, rank.plan.memory
    found = measure_memory(device, str(error), planned.outside_bytes) if device.type == "cuda" else None
    had = ""
    if found is not None:
        had = f"{found.needed / gib:.1f} GiB needed or more, {found.available / gib:.1f} GiB available, "
    helps = rank.stage not in NOT_OF_MICRO_BATCHES
    fix = "start it again: the next start plans a smaller micro-batch with the same global batch"
    if not helps:
        fix = "use more GPUs with parallel.strategy=fsdp, or end other programs that hold memory;"
        fix += " the same command resumes"
    return UserError(
        f"out of {'GPU ' if device.type == 'cuda' else ''}memory in stage '{rank.stage}' at step {rank.state.step}",
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
    """While the tensors of the failed step are still there: what they and the request need, and what this process could
    have had. ``outside``: bytes that are planned outside of torch's allocator. None where the GPU does not answer.
    """
    asked = _ASKED.search(message)
    try:
        held, (free, _) = torch.cuda.memory_reserved(device) + outside, torch.cuda.mem_get_info(device)
        peak = torch.cuda.max_memory_allocated(device) + outside
    except RuntimeError:
        return None
    request = int(float(asked[1]) * _UNITS[asked[2]]) if asked else 0
    return MemoryFound(needed=max(peak, held + request), available=held + free)
