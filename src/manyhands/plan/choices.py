"""Decisions that need no search: device, number of processes, dtypes, attention, compilation, environment. Pure.

Each function returns its value and one sentence that says why; ``decide`` makes them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from manyhands.config.schema import RunConfig
from manyhands.errors import UserError
from manyhands.facts.types import Facts, GpuFacts, ModelFacts

Device = Literal["cuda", "cpu"]
Dtype = Literal["bfloat16", "float16", "float32", "float64"]
ComputeDtype = Literal["bfloat16", "float32", "float64"]
MasterDtype = Literal["float32", "float64"]

DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
MAX_FLASH_HEAD_DIM = 256
MIN_FLASH_CAPABILITY = (8, 0)
AUTO_LEARNING_RATE = {"lora": 2e-4, "full": 2e-5}


@dataclass(frozen=True)
class Decisions:
    """What stands before the search. ``gpus`` is empty on CPU; the ``why_`` tuples are read before and after the search's."""

    device: Device
    world_size: int
    gpus: tuple[GpuFacts, ...]
    compute: ComputeDtype
    master: MasterDtype
    attention: Literal["varlen", "sdpa"]
    compile: bool
    learning_rate: float
    output: Dtype
    why_ranks: tuple[str, ...]
    why_numerics: tuple[str, ...]
    why_rate: tuple[str, ...]

    @property
    def ranks(self) -> str:
        one, many = ("GPU", "GPUs") if self.device == "cuda" else ("process", "processes")
        return f"{self.world_size} {one if self.world_size == 1 else many}"


def decide(config: RunConfig, facts: Facts) -> Decisions:
    """All decisions of this module. UserError where keys contradict the facts."""
    device, why_device = choose_device(config, facts)
    world_size, why_world = choose_world_size(config, facts, device)
    gpus = facts.host.gpus[:world_size] if device == "cuda" else ()
    compute, why_compute = choose_compute_dtype(config, gpus)
    attention, why_attention = choose_attention(config, facts.model, gpus, compute)
    compiled, why_compile = choose_compile(config, device)
    rate, why_rate = choose_learning_rate(config)
    output, why_output = choose_output_dtype(config, facts.model)
    return Decisions(
        device=device,
        world_size=world_size,
        gpus=gpus,
        compute=compute,
        master="float64" if compute == "float64" else "float32",
        attention=attention,
        compile=compiled,
        learning_rate=rate,
        output=output,
        why_ranks=(why_device, why_world),
        why_numerics=(why_compute, why_attention, why_compile),
        why_rate=(why_rate, why_output),
    )


def choose_device(config: RunConfig, facts: Facts) -> tuple[Device, str]:
    asked, num_gpus = config.parallel.device, len(facts.host.gpus)
    if asked == "cuda" and not num_gpus:
        raise UserError(
            "parallel.device is cuda, but no GPU is visible",
            where="parallel.device",
            why="there is no GPU or no driver, or CUDA_VISIBLE_DEVICES hides them",
            fix="set parallel.device=cpu, or look at `manyhands gpu-info`",
        )
    if asked == "auto":
        return ("cuda" if num_gpus else "cpu"), f"device: {'GPUs' if num_gpus else 'CPU'}, as {num_gpus or 'no'} GPUs are visible"
    return asked, f"device: {asked}, as asked"


def choose_world_size(config: RunConfig, facts: Facts, device: Device) -> tuple[int, str]:
    """Processes: given by whoever launched us, else as asked, else one a GPU, else one."""
    asked, given, num_gpus = config.parallel.gpus, facts.world_size, len(facts.host.gpus)
    if given is not None:
        if asked not in ("auto", given):
            raise UserError(
                f"parallel.gpus is {asked}, but {given} processes were launched",
                where="parallel.gpus",
                fix=f"set parallel.gpus to {given} or auto, or launch {asked} processes",
            )
        size, why = given, f"processes: {given}, as launched"
    elif asked != "auto":
        if device == "cuda" and asked > num_gpus:
            raise UserError(
                f"parallel.gpus is {asked}, but {num_gpus} GPU{'s are' if num_gpus != 1 else ' is'} visible",
                where="parallel.gpus",
                fix=f"set parallel.gpus to {num_gpus} or auto, or parallel.device=cpu",
            )
        size, why = asked, f"processes: {asked}, as asked"
    else:
        size = num_gpus if device == "cuda" else 1
        why = f"processes: {size}, one a GPU" if device == "cuda" else "processes: 1, as auto takes one on CPU"
    if config.parallel.strategy == "one" and size > 1:
        raise UserError(
            f"parallel.strategy: one is one process, but there are {size} (parallel.gpus: {asked})",
            where="parallel.strategy",
            fix="set parallel.strategy to auto, ddp or fsdp, or parallel.gpus to 1",
        )
    return size, why


def choose_compute_dtype(config: RunConfig, gpus: tuple[GpuFacts, ...]) -> tuple[ComputeDtype, str]:
    """``gpus`` is empty on CPU."""
    asked = config.model.dtype
    without = next((gpu for gpu in gpus if not gpu.has_bfloat16), None)
    if asked == "bfloat16" and without is not None:
        raise UserError(
            f"model.dtype is bfloat16, which {without.name} does not have", where="model.dtype", fix="set model.dtype to float32 or auto"
        )
    if asked != "auto":
        return asked, f"compute: {asked}, as asked"
    if not gpus:
        return "float32", "compute: float32, as on every CPU"
    if without is not None:
        return "float32", f"compute: float32, as {without.name} has no bfloat16"
    return "bfloat16", "compute: bfloat16, float32 masters, reduced as float32 sums"


def choose_attention(
    config: RunConfig, model: ModelFacts, gpus: tuple[GpuFacts, ...], compute: ComputeDtype
) -> tuple[Literal["varlen", "sdpa"], str]:
    """varlen where rows are packed and its kernel, FlashAttention 2, can: half precision, head_dim, no soft-cap, Ampere or newer."""
    old = next((gpu for gpu in gpus if gpu.compute_capability and gpu.compute_capability < MIN_FLASH_CAPABILITY), None)
    obstacles = {
        "rows are not packed": not config.data.packing,
        "there is no GPU": not gpus,
        f"{compute} is no half precision": compute != "bfloat16",
        f"a head has {model.head_dim} dimensions": model.head_dim > MAX_FLASH_HEAD_DIM or model.head_dim % 8 != 0,
        "attention scores are soft-capped": model.attention_softcap is not None,
        f"{old.name if old else ''} is too old": old is not None,
    }
    obstacle = next((text for text, stands in obstacles.items() if stands), None)
    if obstacle is None:
        return "varlen", "attention: varlen, each packed row by itself and no mask"
    return "sdpa", f"attention: sdpa, as {obstacle}"


def choose_compile(config: RunConfig, device: Device) -> tuple[bool, str]:
    asked = config.parallel.compile
    if asked != "auto":
        return asked, f"compile: {'each block' if asked else 'no'}, as asked"
    if device == "cpu":
        return False, "compile: no, as on CPU it costs more than it gains"
    shapes = "packs of one shape: one graph for all blocks" if config.data.packing else "dynamic shapes, as rows differ in length"
    return True, f"compile: each block, {shapes}"


def choose_learning_rate(config: RunConfig) -> tuple[float, str]:
    asked = config.optimizer.learning_rate
    if asked != "auto":
        return asked, f"learning rate: {asked:g}, as asked"
    rate = AUTO_LEARNING_RATE[config.method.name]
    return rate, f"learning rate: {rate:g}, the usual one for {config.method.name}"


def choose_output_dtype(config: RunConfig, model: ModelFacts) -> tuple[Dtype, str]:
    asked = config.output.dtype
    if asked != "auto":
        return asked, f"saved weights: {asked}, as asked"
    if config.method.name == "lora":
        return "float32", "saved adapter: float32, as trained"
    return model.stored_dtype, f"saved weights: {model.stored_dtype}, as the source's"


def choose_environment(device: Device, num_cores: int, world_size: int) -> dict[str, str]:
    """Variables that every worker gets; ``launch/env.py`` sets them."""
    # Without the first a second attempt of torch's agent reads the first one's addresses.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if device == "cuda":
        return environment | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return environment | {"OMP_NUM_THREADS": str(max(1, num_cores // world_size))}


def count_adapter_parameters(config: RunConfig, model: ModelFacts) -> int:
    """``r (in + out)`` for each adapted layer of each block; 0 where everything is trained.

    Targets are matched as model/lora.py does: by full name, by its end, or by glob.
    """
    method = config.method
    if method.name == "full":
        return 0
    patterns = ("*",) if method.targets == "all-linear" else method.targets
    total = 0
    for index in range(model.num_layers):
        for name, (out, into) in model.block_linear_shapes.items():
            full_name = f"model.layers.{index}.{name}"
            if any(fnmatchcase(full_name, pattern) or fnmatchcase(full_name, f"*.{pattern}") for pattern in patterns):
                total += method.rank * (out + into)
    if not total:
        raise UserError(
            f"no layer matches method.targets: {', '.join(patterns)}",
            where="method.targets",
            fix="name linear layers of the blocks, or use all-linear",
            details=list(model.block_linear_shapes),
        )
    return total
