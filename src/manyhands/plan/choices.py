"""Decisions that need no search: device, number of processes, dtypes, attention, compilation, environment. Pure.

Each function returns its value and one sentence that says why; ``decide`` makes them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyhands.config.patterns import matches
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.types import DataFacts, Facts, GpuFacts, ModelFacts, NewTokens
from manyhands.plan.batch import has_one_length
from manyhands.plan.layout import DTYPE_BYTES, ComputeDtype, Device, Dtype

Attention = Literal["varlen", "sdpa", "blockwise"]

MAX_FLASH_HEAD_DIM = 256
MIN_FLASH_CAPABILITY = (8, 0)
MIN_FP8_CAPABILITY = (8, 9)
AUTO_LEARNING_RATE = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5, "patterns": 2e-5}


@dataclass(frozen=True)
class Decisions:
    """What stands before the search. ``gpus`` is empty on CPU; the ``why_`` tuples are read before and after the
    search's.
    """

    device: Device
    world_size: int
    shard_degree: int  # hybrid: that hold one copy together
    gpus: tuple[GpuFacts, ...]
    compute: ComputeDtype
    master: ComputeDtype
    attention: Attention
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
    compiled, why_compile = choose_compile(config, device, facts.data)
    why_frozen: tuple[str, ...] = (describe_frozen(compute),) if config.method.name == "qlora" else ()
    why_frozen += choose_linear(config, device, gpus)
    if facts.model.num_tower_parameters:
        why_frozen += (
            f"text alone is trained: towers of {facts.model.num_tower_parameters:,} parameters stay on disk",
        )
    rate, why_rate = choose_learning_rate(config)
    check_optimizer(config, device, compute)
    master, why_master = choose_master_dtype(config, compute)
    output, why_output = choose_output_dtype(config, facts.model, compute)
    return Decisions(
        device=device,
        world_size=world_size,
        shard_degree=choose_shard_ranks(config, facts, device, world_size),
        gpus=gpus,
        compute=compute,
        master=master,
        attention=attention,
        compile=compiled,
        learning_rate=rate,
        output=output,
        why_ranks=(why_device, why_world),
        why_numerics=(why_compute, *why_master, *why_frozen, why_attention, why_compile),
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
        return (
            "cuda" if num_gpus else "cpu"
        ), f"device: {'GPUs' if num_gpus else 'CPU'}, as {num_gpus or 'no'} GPUs are visible"
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
    if config.parallel.strategy == "single" and size > 1:
        raise UserError(
            f"parallel.strategy: single is one process, but there are {size} (parallel.gpus: {asked})",
            where="parallel.strategy",
            fix="set parallel.strategy to auto, ddp or fsdp, or parallel.gpus to 1",
        )
    return size, why


def ranks_per_machine(facts: Facts, device: Device, world_size: int) -> int:
    """Processes that share this machine: as launched, else one a visible GPU; on CPU all are taken to be on one
    machine.
    """
    if facts.local_world_size is not None:
        return min(world_size, facts.local_world_size)
    return min(world_size, len(facts.host.gpus)) if device == "cuda" else world_size


def choose_shard_ranks(config: RunConfig, facts: Facts, device: Device, world_size: int) -> int:
    """Ranks that hold one copy together where the strategy is hybrid: as asked, else those of one machine.

    UserError, with the nearest numbers that work, where they do not divide the processes.
    """
    asked = config.parallel.shard_degree
    size = ranks_per_machine(facts, device, world_size) if asked == "auto" else asked
    if config.parallel.strategy != "hsdp" or world_size % size == 0:
        return size
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    below, above = max(n for n in divisors if n < size), min((n for n in divisors if n > size), default=None)
    near = f"{below} or {above}" if above else str(below)
    raise UserError(
        f"parallel.shard_degree: {size} does not divide {world_size} processes",
        where="parallel.shard_degree",
        why="every copy is held by as many ranks" + (", auto takes those of one machine" if asked == "auto" else ""),
        fix=f"set parallel.shard_degree to {near}, or start another number of processes",
    )


def choose_compute_dtype(config: RunConfig, gpus: tuple[GpuFacts, ...]) -> tuple[ComputeDtype, str]:
    """``gpus`` is empty on CPU."""
    asked = config.model.dtype
    without = next((gpu for gpu in gpus if not gpu.has_bfloat16), None)
    if asked == "bfloat16" and without is not None:
        raise UserError(
            f"model.dtype is bfloat16, which {without.name} does not have",
            where="model.dtype",
            fix="set model.dtype to float32 or auto",
        )
    if asked != "auto":
        return asked, f"compute: {asked}, as asked"
    if not gpus:
        return "float32", "compute: float32, as on every CPU"
    if without is not None:
        return "float32", f"compute: float32, as {without.name} has no bfloat16"
    masters = "" if config.model.master_dtype == "bfloat16" else "float32 masters, "
    return "bfloat16", f"compute: bfloat16, {masters}reduced as float32 sums"


def choose_master_dtype(config: RunConfig, compute: ComputeDtype) -> tuple[ComputeDtype, tuple[str, ...]]:
    """Of trained weights and their optimizer states. UserError where bfloat16 was asked for and something else needs
    more.
    """
    if config.model.master_dtype == "float32":
        return ("float64" if compute == "float64" else "float32"), ()
    obstacles = {
        f"method.name is {config.method.name}, which keeps what it trains in float32": config.method.name != "full",
        f"model.dtype is {config.model.dtype}: the model computes in {compute}": compute != "bfloat16",
        f"optimizer.name is {config.optimizer.name}, which does not round stochastically": config.optimizer.name
        != "adamw",
        f"parallel.offload is {config.parallel.offload}, whose update is torch's own": config.parallel.offload
        != "none",
    }
    found = [text for text, stands in obstacles.items() if stands]
    if found:
        raise UserError(
            "model.master_dtype: bfloat16 does not go with other keys",
            where="model.master_dtype",
            why="; ".join(found),
            fix="remove model.master_dtype, or train in full with model.dtype=bfloat16, optimizer.name=adamw and parallel.offload=none",
        )
    return "bfloat16", (
        "masters: bfloat16, as asked: weights rounded stochastically, states in bfloat16; sums of gradients in float32",
    )


def describe_frozen(compute: ComputeDtype) -> str:
    """How qlora keeps the weights that are not trained."""
    return f"frozen: linear layers of the blocks in NF4, 4.13 bits a weight, dequantised to {compute} for each product; the rest {compute}"


def choose_packing(config: RunConfig, model: ModelFacts) -> tuple[bool, str]:
    """Rows side by side where the model allows it. UserError where that was asked for and the model does not."""
    asked = config.data.packing
    if asked is False:
        return False, "packing: no, as asked"
    if model.packs:
        known = f": {model.packing_reason}" if model.packing_reason else ""
        return True, "packing: rows side by side" + (", as asked" if asked is True else "") + known
    batch = config.batch
    needing = [
        f"batch.{name}" for name in ("loss_tokens", "micro_tokens") if getattr(batch, name) not in (None, "auto")
    ]
    if asked is True or needing:
        key = "data.packing" if asked is True else needing[0]
        raise UserError(
            f"{key} asks for packed rows, but {model.model_type} cannot be packed",
            where=key,
            why=model.packing_reason,
            fix="set data.packing=false (one document a row)" + "".join(f", and remove {name}" for name in needing),
        )
    return False, f"packing: no, one document a row: {model.packing_reason}"


def choose_attention(
    config: RunConfig, model: ModelFacts, gpus: tuple[GpuFacts, ...], compute: ComputeDtype
) -> tuple[Attention, str]:
    """varlen where rows are packed and its kernel, FlashAttention 2, can: half precision, head_dim, Ampere or newer.

    Soft-capped scores are computed blockwise, packed or not: varlen cannot cap them, and sdpa leaves the cap out.
    """
    if model.attention_softcap is not None:
        return (
            "blockwise",
            f"attention: blockwise in plain torch, as scores are soft-capped at {model.attention_softcap:g}",
        )
    old = next((gpu for gpu in gpus if gpu.compute_capability and gpu.compute_capability < MIN_FLASH_CAPABILITY), None)
    obstacles = {
        "rows are not packed": not config.data.packing,
        "there is no GPU": not gpus,
        f"{compute} is no half precision": compute != "bfloat16",
        f"a head has {model.head_dim} dimensions": model.head_dim > MAX_FLASH_HEAD_DIM or model.head_dim % 8 != 0,
        f"{old.name if old else ''} is too old": old is not None,
    }
    obstacle = next((text for text, stands in obstacles.items() if stands), None)
    if obstacle is None:
        return "varlen", "attention: varlen, each packed row by itself and no mask"
    return "sdpa", f"attention: sdpa, as {obstacle}"


def fuses_optimizer(config: RunConfig, device: Device) -> bool:
    """Whether AdamW in one pass is tried."""
    return config.optimizer.name == "adamw" and config.kernels.optimizer == "auto" and device == "cuda"


def choose_linear(config: RunConfig, device: Device, gpus: tuple[GpuFacts, ...]) -> tuple[str, ...]:
    """What is said of products in fp8. UserError where the GPUs have none; a CPU emulates them if it was asked for by
    name.
    """
    if config.kernels.linear == "compute_dtype":
        return ()
    old = next((gpu for gpu in gpus if gpu.compute_capability and gpu.compute_capability < MIN_FP8_CAPABILITY), None)
    if old is not None or (device == "cpu" and config.parallel.device != "cpu"):
        raise UserError(
            "kernels.linear: fp8 needs GPUs that multiply in fp8",
            where="kernels.linear",
            why=f"{old.name} has compute capability {'.'.join(map(str, old.compute_capability or ()))}, and 8.9 is the first with fp8"
            if old is not None
            else "there is no GPU, and a CPU would only emulate it, slowly",
            fix="set kernels.linear: compute_dtype"
            + ("" if old is not None else ", or parallel.device: cpu to emulate it"),
        )
    emulated = ", emulated in float32, as asked by parallel.device: cpu" if device == "cpu" else ""
    return (
        f"linear: products of the blocks in fp8 while training{emulated}; plain where the model is evaluated or saved",
    )


def choose_compile(config: RunConfig, device: Device, data: DataFacts) -> tuple[bool, str]:
    asked = config.parallel.compile
    if asked != "auto":
        return asked, f"compile: {'each block' if asked else 'no'}, as asked"
    if device == "cpu":
        return False, "compile: no, as on CPU it costs more than it gains"
    if has_one_length(data):
        shapes = f"one shape, as all rows have {data.max_length:,} tokens"
    else:
        shapes = (
            "packs of any fill run one graph" if config.data.packing else "dynamic shapes, as rows differ in length"
        )
    return True, f"compile: each block, {shapes}"


def check_optimizer(config: RunConfig, device: Device, compute: ComputeDtype) -> None:
    """UserError for an optimizer of bitsandbytes where it has no kernels."""
    name = config.optimizer.name
    if name in ("adamw_8bit", "paged_adamw", "paged_adamw_8bit") and (device == "cpu" or compute == "float64"):
        raise UserError(
            f"optimizer.name: {name} does not run on {'the CPU' if device == 'cpu' else 'weights of 64 bits'}",
            where="optimizer.name",
            why="bitsandbytes has its kernels for 8-bit and paged optimizers on GPUs only, for weights of at most 32 bits",
            fix="use optimizer.name=adamw, adafactor or muon",
        )


def choose_learning_rate(config: RunConfig) -> tuple[float, str]:
    asked = config.optimizer.learning_rate
    if asked != "auto":
        return asked, f"learning rate: {asked:g}, as asked"
    rate = AUTO_LEARNING_RATE[config.method.name]
    return rate, f"learning rate: {rate:g}, the usual one for {config.method.name}"


def choose_output_dtype(config: RunConfig, model: ModelFacts, compute: ComputeDtype) -> tuple[Dtype, str]:
    asked = config.output.dtype
    if asked != "auto":
        return asked, f"saved weights: {asked}, as asked"
    if config.model.master_dtype == "bfloat16":
        return "bfloat16", "saved weights: bfloat16, as trained"
    if config.method.trains_adapters:
        return "float32", "saved adapter: float32, as trained"
    narrowed = config.method.name == "patterns" and DTYPE_BYTES[compute] < DTYPE_BYTES[model.stored_dtype]
    rounded = f"; frozen ones rounded to {compute}, in which they are kept" if narrowed else ""
    return model.stored_dtype, f"saved weights: {model.stored_dtype}, as the source's{rounded}"


def choose_environment(device: Device, num_cores: int, local_world_size: int) -> dict[str, str]:
    """Variables that every worker gets; ``launch/environment.py`` sets them. The cores are one machine's, for the processes on
    it.
    """
    # Without the first a second attempt of torch's agent reads the first one's addresses.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if device == "cuda":
        return environment | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return environment | {"OMP_NUM_THREADS": str(max(1, num_cores // local_world_size))}


def count_adapter_parameters(config: RunConfig, model: ModelFacts, new_tokens: NewTokens | None = None) -> int:
    """``r (in + out)`` for each adapted layer of each block, with DoRA ``out`` more; 0 where everything is trained.

    And what is trained whole (``modules_to_save``): linear layers of blocks, embeddings and head, of which a tied pair
    counts once. Norms are not counted. Else, for new tokens, ``k H`` in embeddings and head. Patterns are matched as
    convert/lora.py does.
    """
    method = config.method
    if not method.trains_adapters:
        return 0
    patterns = ("*",) if method.target_modules == "all-linear" else method.target_modules
    adapted = whole = 0
    for index in range(model.num_layers):
        for name, (out, into) in model.block_linear_shapes.items():
            full_name = f"{model.decoder}.layers.{index}.{name}"
            if _is_saved(full_name, method.modules_to_save):
                whole += out * into
            elif any(matches(full_name, pattern) for pattern in patterns):
                adapted += method.rank * (out + into) + out * method.dora
    if not adapted:
        raise UserError(
            f"no layer matches method.target_modules: {', '.join(patterns)}",
            where="method.target_modules",
            fix="name linear layers of the blocks, or use all-linear",
            details=list(model.block_linear_shapes),
        )
    saved = [_is_saved(name, method.modules_to_save) for name in (f"{model.decoder}.embed_tokens", "lm_head")]
    matrices = [any(saved)] if model.tied_embeddings else saved
    num_tokens = 0 if new_tokens is None else len(new_tokens.ids)
    rows = sum(model.vocab_size if is_whole else num_tokens for is_whole in matrices)
    return adapted + whole + rows * model.hidden_size


def _is_saved(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether the module, or one that it is a part of, is named by ``patterns``."""
    parts = name.split(".")
    return any(matches(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1) for pattern in patterns)
