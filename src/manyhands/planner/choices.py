"""Decisions that need no search: dtypes, attention, compilation, workers, rates; ``hardware.py`` has the first. Pure.

Each function returns its value and the reason for it. ``resolve_auto`` decides what follows from model and adapter,
``decide`` the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from manyhands import families
from manyhands.config.patterns import matches
from manyhands.config.schema import MethodSection, RunConfig
from manyhands.config.tasks import TASKS
from manyhands.core.errors import UserError
from manyhands.core.units import describe_ranks
from manyhands.facts.types import DataFacts, Facts, GpuFacts, ModelFacts
from manyhands.optim.registry import OPTIMIZERS, name_those
from manyhands.planner.batch import has_one_length
from manyhands.planner.context import check_context, exchanges_heads
from manyhands.planner.experts import check_expert_degree, check_experts, name_stacks
from manyhands.planner.hardware import (
    choose_device,
    choose_shard_ranks,
    choose_world_size,
    count_nodes,
    explain_hardware,
    explain_nodes,
    ranks_per_machine,
)
from manyhands.planner.layout import DTYPE_BYTES, ComputeDtype, Device, Dtype
from manyhands.planner.parts import choose_parts
from manyhands.planner.types import PartState, Reason, reason

Attention = Literal["varlen", "sdpa", "blockwise"]

MAX_FLASH_HEAD_DIM = 256
# The fastest rank measured, a model of 135 million parameters on an H200, trains some 0.3 million tokens/s.
ENOUGH_TOKENS_PER_S = 4_000_000  # so many leave the collating thread idle nine tenths of the time
# Of one thread, the slowest kind: weighted chats of 475 tokens on average at 28 million tokens/s, and blocks of 2,048
# at 106 million for what a token adds (`python -m benchmarks.collate`).
COLLATE_SAMPLE_S, COLLATE_TOKEN_S = 15e-6, 4e-9
IMAGE_S = 0.04  # of one process, to decode and prepare a megapixel (measured: 0.038 s, JPEG to patches of 16 x 16)
MAX_AUTO_WORKERS = 8
PROCESSES_PER_CORE, MIN_PROCESSES = 4, 16  # that a key may ask of a machine
AUTO_LEARNING_RATE = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5, "patterns": 2e-5}


@dataclass(frozen=True)
class Decisions:
    """What stands before the search. ``gpus`` is empty on CPU; the ``why_`` tuples are read before and after the
    search's.
    """

    device: Device
    world_size: int
    shard_degree: int  # hsdp: ranks that hold one copy together
    gpus: tuple[GpuFacts, ...]
    compute: ComputeDtype
    master: ComputeDtype
    attention: Attention
    compile: bool
    exchanges_heads: bool
    data_workers: int
    learning_rate: float
    output: Dtype
    parts: dict[str, PartState]  # of a model of text and images; {} for a text model
    why_ranks: tuple[Reason, ...]
    why_numerics: tuple[Reason, ...]
    why_rate: tuple[Reason, ...]

    @property
    def ranks(self) -> str:
        return describe_ranks(self.device, self.world_size)


def resolve_auto(config: RunConfig, facts: Facts) -> tuple[RunConfig, tuple[Reason, ...]]:
    """The config with what model and adapter decide: packing, the method of the adapter that the run continues, target
    modules by name, double quantization as weights are stored.
    """
    packing, why_packing = choose_packing(config, facts.model)
    method = config.method if facts.adapter is None else facts.adapter.method
    method, why_targets = name_targets(follow_stored(config, method, facts.model), facts.model)
    method, why_stacks = name_stacks(method, facts.model)
    data = config.data.model_copy(update={"packing": packing})
    return config.model_copy(update={"data": data, "method": method}), (why_packing, *why_targets, *why_stacks)


def choose_packing(config: RunConfig, model: ModelFacts) -> tuple[bool, Reason]:
    """Rows side by side where the model allows it. UserError where that was asked for and the model does not."""
    asked = config.data.packing
    if asked is False:
        return False, reason("packing", packed=False, asked=True, known="")
    if not model.packs and TASKS[config.task].num_documents > 1:
        raise UserError(
            f"task {config.task} requires packed samples, but {model.model_type} cannot be packed",
            where="task",
            why=f"{model.packing_reason}, and a sample of several documents is planned in packs alone",
            fix="use a model of another family",
        )
    if model.packs:
        return True, reason("packing", packed=True, asked=asked is True, known=model.packing_reason)
    batch = config.batch
    needing = [
        f"batch.{name}" for name in ("loss_tokens", "micro_tokens") if getattr(batch, name) not in (None, "auto")
    ]
    if asked is True or needing:
        key = "data.packing" if asked is True else needing[0]
        raise UserError(
            f"{key} requires packed samples, but {model.model_type} cannot be packed",
            where=key,
            why=model.packing_reason,
            fix="set data.packing=false (one sample per batch row)"
            + "".join(f", and remove {name}" for name in needing),
        )
    return False, reason("packing", packed=False, asked=False, known=model.packing_reason)


def follow_stored(config: RunConfig, method: MethodSection, model: ModelFacts) -> MethodSection:
    """``method`` with double quantization as the base's weights have it, if these are stored in NF4. UserError for what
    needs other weights.
    """
    _check_mxfp4(config, method, model)
    stored = model.stored_nf4
    if stored is None:
        return method
    wrong = {
        f"method.name: {method.name}": (method.name != "qlora", "set method.name: qlora"),
        "method.init: loftq": (
            method.init == "loftq",
            "remove it: the files do not have the weights before quantization",
        ),
        "output.merge: true": (config.output.merge, "remove it; PEFT merges the adapter into the model in 16 bits"),
        "method.double_quant: false": (stored.double_quant > method.double_quant, "remove it: the files decide"),
    }
    for key, (is_set, fix) in wrong.items():
        if is_set:
            raise UserError(
                f"{key} cannot be combined with a model whose weights are stored in NF4",
                where=key.partition(":")[0],
                why=f"{model.folder} holds 4-bit weights of bitsandbytes, which are used unchanged",
                fix=f"{fix}, or use the model's version that is not quantized",
            )
    return method.model_copy(update={"double_quant": stored.double_quant})


def _check_mxfp4(config: RunConfig, method: MethodSection, model: ModelFacts) -> None:
    """UserError for what cannot go with experts that stay in MXFP4."""
    wrong = {
        f"method.name: {method.name}": method.name == "qlora",
        "model.frozen_dtype: fp8": config.model.frozen_dtype == "fp8",
        "kernels.linear: fp8": config.kernels.linear == "fp8" and method.name == "lora",
    }
    for key, is_set in wrong.items():
        if model.stored_mxfp4 and is_set:
            name = key.partition(":")[0]
            raise UserError(
                f"{key} cannot be combined with a model whose experts are stored in MXFP4",
                where=name,
                why=f"{model.folder} holds 4-bit experts, which lora keeps as they are and full dequantizes",
                fix=("set method.name: lora or full" if name == "method.name" else "remove it")
                + ", or use the model's version in 16 bits (its config.json has no quantization_config)",
            )


def dequantize_experts(config: RunConfig, facts: Facts) -> Facts:
    """Facts of a model whose experts in MXFP4 are dequantized as they are read, where lora does not keep them."""
    if config.method.name == "lora" or not facts.model.stored_mxfp4:
        return facts
    return facts.model_copy(update={"model": facts.model.model_copy(update={"stored_mxfp4": ()})})


def name_targets(method: MethodSection, model: ModelFacts) -> tuple[MethodSection, tuple[Reason, ...]]:
    """``method`` with PEFT's default target modules by name. UserError where PEFT has none for models of this type."""
    if method.target_modules != "peft-default":
        return method, ()
    names = families.find(model.model_type).peft_targets
    if not names:
        raise UserError(
            f"method.target_modules: peft-default has no layers for {model.model_type}",
            where="method.target_modules",
            why="PEFT has no default for models of this type, or it is not in manyhands' table",
            fix="name layers, such as [q_proj, v_proj], or use all-linear",
            details=list(model.block_linear_shapes),
        )
    return method.model_copy(update={"target_modules": names}), (reason("targets", names=names, kind=model.model_type),)


def check_targets(method: MethodSection, model: ModelFacts) -> None:
    """UserError for an adapter on layers that PEFT refuses in models of this type."""
    refused = families.find(model.model_type).peft_refuses
    if not refused or not method.trains_adapters:
        return
    patterns = ("*",) if method.target_modules == "all-linear" else method.target_modules
    names = {
        f"{model.decoder}.layers.{index}.{name}"
        for index in range(model.num_layers)
        for name in model.linears_of(index)
    }
    hit = {name.rpartition(".")[2] for name in names if any(matches(name, pattern) for pattern in patterns)}
    if hit & set(refused):
        rest = sorted({name.rpartition(".")[2] for name in names} - set(refused))
        raise UserError(
            f"adapters on {', '.join(refused)} of {model.model_type} cannot be opened",
            where="method.target_modules",
            why="PEFT 0.21 refuses this layer in models of this type",
            fix=f"set method.target_modules: [{', '.join(rest)}] (all other linear layers), or fewer of them",
        )


def decide(config: RunConfig, facts: Facts) -> Decisions:
    """All decisions of this module. UserError where keys contradict the facts."""
    device, why_device = choose_device(config, facts)
    world_size, why_world = choose_world_size(config, facts, device)
    gpus = facts.host.gpus[:world_size] if device == "cuda" else ()
    compute, why_compute = choose_compute_dtype(config, gpus)
    num_local = ranks_per_machine(facts, device, world_size)
    exchanges = exchanges_heads(facts.model, config.parallel.context_ranks, DTYPE_BYTES[compute], num_local)
    attention, why_attention = choose_attention(config, facts, gpus, compute, exchanges=exchanges)
    compiled, why_compile = choose_compile(config, device, facts.data)
    why_frozen: tuple[Reason, ...] = ()
    if config.method.name == "qlora":
        in_files = facts.model.stored_nf4 is not None
        why_frozen = (reason("frozen", compute=compute, double=config.method.double_quant, stored=in_files),)
    if facts.model.stored_mxfp4:
        kept = config.method.name == "lora"
        why_frozen += (reason("frozen_experts", compute=compute, kept=kept),)
    why_frozen += choose_linear(config, device, gpus)
    parts, why_parts = choose_parts(config, facts)
    why_frozen += why_parts
    rate, why_rate = choose_learning_rate(config)
    check_optimizer(config, device, compute)
    check_targets(config.method, facts.model)
    check_experts(config, facts.model)
    master, why_master = choose_master_dtype(config, compute, parts)
    check_expert_degree(config, facts.model, world_size)
    output, why_output = choose_output_dtype(config, facts.model, compute)
    data_workers, why_workers = choose_data_workers(config, facts, device)
    check_processes(config, facts, device, world_size)
    shard_degree = choose_shard_ranks(config, facts, device, world_size)
    why_context = check_context(config, facts, world_size, shard_degree, exchanges=exchanges)
    return Decisions(
        device=device,
        world_size=world_size,
        shard_degree=shard_degree,
        gpus=gpus,
        compute=compute,
        master=master,
        attention=attention,
        compile=compiled,
        exchanges_heads=exchanges,
        data_workers=data_workers,
        learning_rate=rate,
        output=output,
        parts=parts,
        why_ranks=(*explain_hardware(device, facts.host), why_device, why_world, *explain_nodes(facts), *why_context),
        why_numerics=(why_compute, *why_master, *why_frozen, why_attention, why_compile, why_workers),
        why_rate=(why_rate, why_output),
    )


def choose_compute_dtype(config: RunConfig, gpus: tuple[GpuFacts, ...]) -> tuple[ComputeDtype, Reason]:
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
        return asked, reason("compute", dtype=asked, source="asked")
    if not gpus:
        return "float32", reason("compute", dtype="float32", source="cpu")
    if without is not None:
        return "float32", reason("compute", dtype="float32", source="gpu", gpu=without.name)
    narrow = config.model.master_dtype == "bfloat16"
    return "bfloat16", reason("compute", dtype="bfloat16", source="auto", narrow_masters=narrow)


def choose_master_dtype(
    config: RunConfig, compute: ComputeDtype, parts: Mapping[str, str]
) -> tuple[ComputeDtype, tuple[Reason, ...]]:
    """Of trained weights and their optimizer states. UserError where bfloat16 was asked for and something else needs
    more.
    """
    if config.model.master_dtype == "float32":
        return ("float64" if compute == "float64" else "float32"), ()
    name = config.optimizer.name
    obstacles = {
        "a part of the model is frozen, and what is trained beside it is kept in float32": "frozen" in parts.values(),
        f"method.name is {config.method.name}, which keeps what it trains in float32": config.method.name != "full",
        f"model.dtype is {config.model.dtype}: the model computes in {compute}": compute != "bfloat16",
        f"optimizer.name is {name}, which does not round stochastically": not OPTIMIZERS[name].is_fused,
    }
    found = [text for text, stands in obstacles.items() if stands]
    if found:
        raise UserError(
            "model.master_dtype: bfloat16 cannot be combined with other keys",
            where="model.master_dtype",
            why="; ".join(found),
            fix="remove model.master_dtype, or train in full with model.dtype=bfloat16 and "
            f"optimizer.name={name_those(lambda spec: spec.is_fused)}",
        )
    return "bfloat16", (reason("masters"),)


def choose_attention(
    config: RunConfig, facts: Facts, gpus: tuple[GpuFacts, ...], compute: ComputeDtype, *, exchanges: bool = False
) -> tuple[Attention, Reason]:
    """varlen where its kernel, FlashAttention 2, can (half precision, head_dim, Ampere or newer), and rows are packed
    or images are read in both directions, for which others need a mask.

    Soft-capped scores are computed blockwise, packed or not: varlen cannot cap them, and sdpa leaves the cap out. So
    are sinks and images read in both directions where varlen cannot, and packs that several ranks divide: sdpa sees a
    rank's own keys. ``exchanges``: they exchange heads.
    """
    model, tower, divides = facts.model, facts.model.tower, config.parallel.context_ranks > 1
    both = facts.data.num_images > 0 and tower is not None and tower.bidirectional
    if model.attention_softcap is not None:
        return "blockwise", reason("attention", kind="blockwise", softcap=model.attention_softcap)
    without = next((gpu for gpu in gpus if not gpu.architecture.has_varlen_attention), None)
    obstacles = {
        "not_packed": not config.data.packing and not both and not model.attention_sinks,
        "no_gpu": not gpus,
        "dtype": compute != "bfloat16",
        "head_dim": model.head_dim > MAX_FLASH_HEAD_DIM or model.head_dim % 8 != 0,
        "amd": without is not None and without.vendor == "amd",
        "old_gpu": without is not None,
        "sinks": model.attention_sinks and divides and not exchanges,
    }
    obstacle = next((name for name, stands in obstacles.items() if stands), None)
    if obstacle is None:
        return "varlen", reason("attention", kind="varlen", packed=bool(config.data.packing))
    gpu = without.name if without else None
    values = {"obstacle": obstacle, "dtype": compute, "head_dim": model.head_dim, "gpu": gpu}
    if model.attention_sinks:
        return "blockwise", reason("attention", kind="sinks", **values)
    if divides or both:
        return "blockwise", reason("attention", kind="divided" if divides else "images", **values)
    return "sdpa", reason("attention", kind="sdpa", **values)


def fuses_optimizer(config: RunConfig, device: Device) -> bool:
    """Whether the optimizer's kernel that does everything in one pass is tried."""
    native = not config.parallel.strategy.startswith("zero")
    fused = OPTIMIZERS[config.optimizer.name].is_fused
    return fused and config.kernels.optimizer == "auto" and device == "cuda" and native


def choose_linear(config: RunConfig, device: Device, gpus: tuple[GpuFacts, ...]) -> tuple[Reason, ...]:
    """What is said of fp8 matmuls. UserError where the GPUs have none; a CPU emulates them if it was asked for."""
    _check_frozen_dtype(config)
    if config.kernels.linear == "compute_dtype":
        return ()
    without = next((gpu for gpu in gpus if not gpu.architecture.multiplies_fp8), None)
    if without is not None or (device == "cpu" and config.parallel.device != "cpu"):
        why, fix = "there is no GPU, and a CPU would only emulate it, slowly", "set kernels.linear: compute_dtype"
        if without is None:
            fix += ", or parallel.device: cpu to emulate it"
        elif without.vendor == "amd":
            why = f"{without.name} is AMD's, whose fp8 formats differ (e4m3fnuz on gfx94x): no kernel was tried on it"
        else:
            why = f"{without.name} has {without.architecture}, and 8.9 is the first with fp8"
        raise UserError("kernels.linear: fp8 needs GPUs that multiply in fp8", where="kernels.linear", why=why, fix=fix)
    return (reason("linear", emulated=device == "cpu", weights=config.model.frozen_dtype == "fp8"),)


def _check_frozen_dtype(config: RunConfig) -> None:
    """UserError where ``model.frozen_dtype: fp8`` contradicts other keys."""
    if config.model.frozen_dtype == "auto":
        return
    key = "model.frozen_dtype"
    against = {
        "method.name": (config.method.name != "lora", "only frozen weights are rounded once and for all", "lora"),
        "kernels.linear": (config.kernels.linear != "fp8", "the kernels that read fp8 values multiply in fp8", "fp8"),
        "parallel.offload": (config.parallel.offload == "all", "fp8 values do not travel from host memory", "none"),
        "parallel.strategy": (
            config.parallel.strategy not in ("auto", "single", "ddp"),
            "fp8 values are not sharded: each GPU keeps a copy",
            "ddp",
        ),
        "parallel.reshard_after_forward": (
            config.parallel.reshard_after_forward is True,
            "fp8 values are not sharded: each GPU keeps a copy",
            "auto",
        ),
        "output.merge": (
            config.output.merge,
            "the weights to merge into are in the source's files; `manyhands export RUN --merge` reads them",
            "false",
        ),
    }
    for other, (contradicts, why, value) in against.items():
        if contradicts:
            raise UserError(
                f"{key}: fp8 and this {other} exclude each other",
                where=key,
                why=why,
                fix=f"set {other}={value}, or {key}=auto",
            )


def choose_compile(config: RunConfig, device: Device, data: DataFacts) -> tuple[bool, Reason]:
    asked = config.parallel.compile
    if asked != "auto":
        return asked, reason("compile", compile=asked, source="asked")
    if config.parallel.strategy == "zero3":
        return False, reason("compile", compile=False, source="zero3")
    if device == "cpu":
        return False, reason("compile", compile=False, source="cpu")
    if has_one_length(data):
        return True, reason("compile", compile=True, source="one_length", tokens=data.max_length)
    return True, reason("compile", compile=True, source="packs" if config.data.packing else "lengths")


def check_processes(config: RunConfig, facts: Facts, device: Device, world_size: int) -> None:
    """UserError where a key asks one machine for more processes than its cores can be for."""
    ranks = math.ceil(world_size / max(1, count_nodes(facts) or 1))
    workers = config.data.workers if config.data.workers != "auto" else 0
    most = max(MIN_PROCESSES, PROCESSES_PER_CORE * facts.host.num_cores)
    on_cpu = device == "cpu" and config.parallel.gpus != "auto"
    for key, num, largest in (
        ("parallel.gpus", ranks if on_cpu else 0, most * max(1, count_nodes(facts) or 1)),
        ("data.workers", ranks * workers, most // ranks),
    ):
        if num > most:
            raise UserError(
                f"{key} would start {num:,} processes on one machine, which has {facts.host.num_cores} cores",
                where=key,
                why=f"at most {PROCESSES_PER_CORE} for each core are started, or {MIN_PROCESSES}",
                fix=f"set {key} to at most {largest:,}, or to auto",
            )


def choose_data_workers(config: RunConfig, facts: Facts, device: Device) -> tuple[int, Reason]:
    """Processes a rank that collate its batches, 0 where one thread is fast enough.

    On a CPU, where processes would take cores from training, auto is always the thread. On GPUs one thread collates
    ``n / (SAMPLE_S + n TOKEN_S)`` tokens/s of samples of n tokens; auto takes as many processes as make up for what is
    missing of ``ENOUGH_TOKENS_PER_S``, at most the GPU's share of the cores less the rank's own two threads. Images
    take a thousand times as long: auto takes as many as there may be, one at least.
    """
    asked, mean = config.data.workers, max(1.0, facts.data.mean_length)
    if asked != "auto":
        return asked, reason("data_workers", workers=asked, asked=True)
    if device == "cpu":
        return 0, reason("data_workers", workers=0, asked=False, source="cpu")
    if facts.data.num_images:
        seconds = facts.data.num_images / facts.data.num_samples * IMAGE_S + COLLATE_SAMPLE_S + mean * COLLATE_TOKEN_S
        wanted = MAX_AUTO_WORKERS
        workers = min(wanted, max(1, facts.host.num_cores // max(1, len(facts.host.gpus)) - 2))
        values = {"samples_per_s": float(f"{workers / seconds:.2g}"), "wanted": wanted, "cores": facts.host.num_cores}
        return workers, reason("data_workers", workers=workers, asked=False, source="images", **values)
    tokens_per_s = collate_rate(facts.data)
    spare = max(0, facts.host.num_cores // max(1, len(facts.host.gpus)) - 2)
    needed = 0 if tokens_per_s >= ENOUGH_TOKENS_PER_S else math.ceil(ENOUGH_TOKENS_PER_S / tokens_per_s)
    wanted = min(MAX_AUTO_WORKERS, needed)
    workers = min(wanted, spare)
    # Two digits: what is shown is an estimate.
    about = int(float(f"{tokens_per_s:.2g}"))
    values = {"tokens_per_s": about, "wanted": wanted, "cores": facts.host.num_cores}
    return workers, reason("data_workers", workers=workers, asked=False, source="gpu", **values)


def collate_rate(data: DataFacts) -> float:
    """Tokens/s that one thread collates."""
    mean = max(1.0, data.mean_length)
    return mean / (COLLATE_SAMPLE_S + mean * COLLATE_TOKEN_S)


def check_optimizer(config: RunConfig, device: Device, compute: ComputeDtype) -> None:
    """UserError for an optimizer whose library has no kernels for this device or dtype."""
    name, library = config.optimizer.name, OPTIMIZERS[config.optimizer.name].library
    if library and (device == "cpu" or compute == "float64"):
        raise UserError(
            f"optimizer.name: {name} does not run on {'the CPU' if device == 'cpu' else 'weights of 64 bits'}",
            where="optimizer.name",
            why=f"{library} has its kernels for GPUs only, and for weights of at most 32 bits",
            fix=f"use optimizer.name={name_those(lambda spec: not spec.library)}",
        )


def choose_learning_rate(config: RunConfig) -> tuple[float, Reason]:
    asked = config.optimizer.learning_rate
    if asked != "auto":
        return asked, reason("learning_rate", rate=asked, method=None)
    rate = AUTO_LEARNING_RATE[config.method.name]
    return rate, reason("learning_rate", rate=rate, method=config.method.name)


def choose_output_dtype(config: RunConfig, model: ModelFacts, compute: ComputeDtype) -> tuple[Dtype, Reason]:
    asked = config.output.dtype
    if asked != "auto":
        return asked, reason("output_dtype", dtype=asked, source="asked")
    if config.model.master_dtype == "bfloat16":
        return "bfloat16", reason("output_dtype", dtype="bfloat16", source="masters")
    if config.method.trains_adapters:
        return "float32", reason("output_dtype", dtype="float32", source="adapter")
    narrowed = config.method.name == "patterns" and DTYPE_BYTES[compute] < DTYPE_BYTES[model.stored_dtype]
    rounded = compute if narrowed else None
    return model.stored_dtype, reason("output_dtype", dtype=model.stored_dtype, source="model", rounded=rounded)
