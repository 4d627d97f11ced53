"""Whether checkpoints are written beside the training, and the host memory that they pass through."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.plan.estimate_input import EstimateInput
from manyhands.plan.phrases import describe_waiting
from manyhands.plan.steps import Steps
from manyhands.plan.types import DiskEstimate, MemoryEstimate, Reason, reason

STAGING = "staging"  # the term of the estimate


@dataclass(frozen=True)
class Saving:
    """``memory`` is the layout's, with what is staged. ``why`` is empty where there is nothing to decide."""

    is_async: bool
    memory: MemoryEstimate
    why: tuple[Reason, ...]


def choose_saving(
    config: RunConfig,
    asked: EstimateInput,
    memory: MemoryEstimate,
    disk: DiskEstimate,
    steps: Steps,
    usable_host: int | None,
) -> Saving:
    """``asked`` has the chosen layout, ``memory`` is what it needs. ``usable_host``: of the host's memory, a rank's
    share in bytes; None on a CPU, where the device is the host. UserError where ``checkpoint.asynchronous: true``
    cannot be.

    The last checkpoint has no training beside it, so a run that saves once has nothing to decide.
    """
    wanted, on_host = config.checkpoint.asynchronous, usable_host is None
    if not _saves_between(config, steps):
        return Saving(False, memory, ())
    size = staging(asked, disk.checkpoint_bytes)
    free = memory.limit - memory.total if usable_host is None else usable_host - memory.host_total
    waits = None
    if asked.layout.zero_stage:
        waits = reason("saving", how="zero")
    elif wanted is False:
        waits = reason("saving", how="asked")
    elif size > free:
        waits = reason("saving", how="memory", bytes=size, free=max(0, free))
    if waits is not None and wanted is True:
        raise UserError(
            "checkpoints cannot be written while training continues",
            where="checkpoint.asynchronous: true",
            why=describe_waiting(waits.values),
            fix="write checkpoint.asynchronous: auto, which writes them as it can",
        )
    if waits is not None:
        return Saving(False, memory, (waits,))
    term = {STAGING: size}
    update = {"terms": memory.terms | term} if on_host else {"host_terms": memory.host_terms | term}
    if not on_host:
        update |= {"host_limit": usable_host}  # type: ignore[dict-item]
    return Saving(True, memory.model_copy(update=update), (reason("saving", how="beside", bytes=size),))


def staging(s: EstimateInput, checkpoint_bytes: int) -> int:
    """Host memory through which a checkpoint is written beside the training: this rank's share, ``checkpoint_bytes /
    world size``. Where ranks are replicas they share whole tensors out, and the largest one may come on top.
    """
    replicas = s.layout.world_size // s.num_shards
    largest = s.head_elements * s.master_bytes // s.num_shards if s.num_trained_in_head and replicas > 1 else 0
    return min(checkpoint_bytes // s.num_shards, checkpoint_bytes // s.layout.world_size + largest)


def _saves_between(config: RunConfig, steps: Steps) -> bool:
    section = config.checkpoint
    by_steps = steps.checkpoint_per_epoch > 0 or 0 < steps.checkpoint_every < steps.total
    return by_steps or section.keep_best or section.every_minutes is not None
