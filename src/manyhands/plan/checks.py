"""What a plan warns of although it can be carried out, values that hardly anybody means, and whether the disk has room.
Pure.
"""

from __future__ import annotations

import math
from dataclasses import replace

from manyhands.config.patterns import matches
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.types import Facts, ModelFacts
from manyhands.plan.estimate_input import EstimateInput
from manyhands.plan.layout import Mesh, change
from manyhands.plan.memory import GIB, optimizer
from manyhands.plan.steps import Steps
from manyhands.plan.types import DiskEstimate

LOG_BYTES = 2**24  # logs, metrics, TensorBoard, reports: a few hundred bytes a step

ABSURD_RATE = (
    1.0  # an update of Adam, Adafactor or Muon has about the size of the learning rate, weights are mostly far below 1
)


def warn_of_values(config: RunConfig, model: ModelFacts, learning_rate: float) -> tuple[str, ...]:
    """One sentence for each learning rate and LoRA rank that cannot be meant."""
    rates = {"optimizer.learning_rate": learning_rate}
    rates |= {f"optimizer.learning_rates, {pattern}": rate for pattern, rate in config.optimizer.learning_rates.items()}
    absurd = [
        f"warning: {key}: {rate:g} moves a weight by about that much in each step, more than most weights are; 1e-5 to 1e-3 are usual"
        for key, rate in rates.items()
        if rate >= ABSURD_RATE
    ]
    return (*absurd, *_warn_of_rank(config, model))


def _warn_of_rank(config: RunConfig, model: ModelFacts) -> tuple[str, ...]:
    """LoRA factors of rank r hold ``r (in + out)`` values; from the layer's smaller width on they add nothing that it
    has not itself.
    """
    method = config.method
    if not method.trains_adapters:
        return ()
    patterns = ("*",) if method.target_modules == "all-linear" else method.target_modules
    narrow = [
        f"{name.rpartition('.')[2]} ({min(shape)})"
        for name, shape in model.block_linear_shapes.items()
        if method.rank >= min(shape)
        and any(matches(f"{model.decoder}.layers.0.{name}", pattern) for pattern in patterns)
    ]
    if not narrow:
        return ()
    return (
        f"warning: method.rank: {method.rank} is not below the width of {', '.join(narrow)}: such factors are larger than they need be",
    )


def estimate_disk(
    config: RunConfig, facts: Facts, setup: EstimateInput, steps: Steps, output_bytes: int
) -> DiskEstimate:
    """A checkpoint holds masters and optimizer states of what is trained; ``keep_last`` of them stay, one more while it
    is written, and the best if asked. The result is the model, towers included, or the adapter, and the merged model
    too if asked.
    """
    alone = replace(
        setup,
        layout=change(setup.layout, strategy="single", mesh=Mesh(), offload="none"),
        optimizer_name=setup.optimizer_name.removeprefix("paged_"),
    )
    num_saves = math.ceil(steps.total / steps.checkpoint_every) if steps.checkpoint_every else 1
    kept = config.checkpoint.keep_last + 1 + config.checkpoint.keep_best
    model, adapters = facts.model, config.method.trains_adapters
    result = setup.num_adapter_parameters * output_bytes
    if not adapters or config.output.merge:
        width = output_bytes if not adapters or config.output.dtype != "auto" else setup.frozen_bytes
        result += (model.num_parameters + model.num_tower_parameters) * width
    return DiskEstimate(
        checkpoint_bytes=setup.num_trained * setup.master_bytes + optimizer(alone),
        num_checkpoints=min(num_saves, kept),
        result_bytes=result,
        free_bytes=facts.free_disk_bytes,
    )


def check_disk(config: RunConfig, disk: DiskEstimate) -> str:
    """One sentence for the plan. UserError where checkpoints and result do not fit on the disk."""
    one, result = _size(disk.checkpoint_bytes), _size(disk.result_bytes)
    parts = f"{disk.num_checkpoints} checkpoint{'s' * (disk.num_checkpoints != 1)} of {one} at once and a result of {result}"
    if disk.free_bytes is None:
        return f"disk: {_size(disk.total)}, {parts}"
    if disk.total + LOG_BYTES <= disk.free_bytes:
        return f"disk: {_size(disk.total)} of {_size(disk.free_bytes)} free, {parts}"
    advice = ["free some space", "choose an output.dir on a larger disk"]
    if disk.num_checkpoints > 1 + config.checkpoint.keep_best:
        advice.append("keep fewer checkpoints (checkpoint.keep_last=1, or checkpoint.every_steps=0 for one at the end)")
    raise UserError(
        f"the disk has no room for this run: it needs {_size(disk.total + LOG_BYTES)}, and {_size(disk.free_bytes)} are free",
        where=f"output.dir: {config.output.dir}",
        why=f"{parts}, and {_size(LOG_BYTES)} for logs",
        fix=", or ".join(advice),
    )


def _size(number: int) -> str:
    return f"{number / GIB:,.1f} GiB" if number >= GIB / 10 else f"{number / 2**20:,.1f} MiB"
