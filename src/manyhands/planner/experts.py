"""What is asked of a mixture's experts, against the model: refused where it would have no effect, or the wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable

from manyhands.config.patterns import matches
from manyhands.config.schema import MethodSection, RunConfig
from manyhands.core.errors import UserError
from manyhands.core.units import count_of
from manyhands.facts.experts import PROJECTIONS
from manyhands.facts.types import Facts, LinearShape, ModelFacts
from manyhands.optim.registry import OPTIMIZERS
from manyhands.planner.context import MIN_GAIN, explain_degree, plan_degrees
from manyhands.planner.hardware import choose_device, choose_world_size, ranks_per_machine
from manyhands.planner.layout import WHOLE_BLOCKS
from manyhands.planner.memory.input import NF4_ROW_VALUES, is_saved
from manyhands.planner.types import Cause, Plan, Reason, reason

FUSED = "experts.gate_up_proj"
KEY = "parallel.expert_degree"
STATE_BYTES = 12  # of a trained value: its master and AdamW's moments
SAVED_BY_DIVIDING = ("communication", "copies", "recomputation", "optimizer", "offload", "host")  # terms of a step


def fuses_experts(config: RunConfig, model: ModelFacts) -> bool:
    """Whether all stacks of gated experts have plain adapters, as convert/fused_experts.py asks."""
    method = config.method
    stacks = [name for name, shape in model.block_linear_shapes.items() if shape.groups > 1]
    if not method.trains_adapters or method.dropout or not any(name.endswith(FUSED) for name in stacks):
        return False
    patterns = ("*",) if method.target_modules == "all-linear" else method.target_modules
    names = [f"{model.decoder}.layers.{model.num_layers - 1}.{name}" for name in stacks]
    return all(any(matches(name, pattern) for pattern in patterns) for name in names)


def name_stacks(method: MethodSection, model: ModelFacts) -> tuple[MethodSection, tuple[Reason, ...]]:
    """``method`` with the stacks of experts for names of a single expert's projections (``gate_proj`` and ``up_proj``,
    ``w1`` to ``w3``) that no layer has, as PEFT and Unsloth read them. One half of a stack is left as it is.
    """
    targets = method.target_modules
    if not model.has_groups or not method.trains_adapters or isinstance(targets, str):
        return method, ()
    layers = list(_layers_of(model))
    reached = [pattern for pattern in targets if any(matches(name, pattern) for name in layers)]
    halves = [name for name in targets if name in PROJECTIONS and name not in reached]
    stacks = [name for name in layers if name.rpartition(".")[2] in PROJECTIONS.values() and ".experts." in name]
    dropped: list[str] = []
    added: list[str] = []
    for stack in sorted({PROJECTIONS[name] for name in halves}):
        is_named = any(matches(name, pattern) for name in stacks if name.endswith(f".{stack}") for pattern in reached)
        parts = [name for name in halves if PROJECTIONS[name] == stack]
        if is_named or len(parts) == (1 if stack == "down_proj" else 2):
            dropped += parts
            added += [] if is_named else [f"experts.{stack}"]
    if not dropped:
        return method, ()
    names = (*(name for name in targets if name not in dropped), *added)
    return method.model_copy(update={"target_modules": names}), (reason("stacks", names=names),)


def _layers_of(model: ModelFacts) -> dict[str, LinearShape]:
    return {
        f"{model.decoder}.layers.{index}.{name}": shape
        for index in range(model.num_layers)
        for name, shape in model.adaptable_of(index).items()
    }


def check_experts(config: RunConfig, model: ModelFacts) -> None:
    """UserError where keys of experts meet a model without any, or adapters do not fit its experts."""
    if not model.has_groups:
        if config.moe.balance:
            raise UserError(
                f"{model.model_type} has no experts to balance",
                where="moe.balance",
                why="its blocks have one MLP each, and no router",
                fix="remove moe.balance, or use a mixture of experts",
            )
    elif config.method.trains_adapters:
        _check_adapters(config, model)


def check_expert_degree(config: RunConfig, model: ModelFacts, world_size: int) -> None:
    """UserError where ranks cannot divide the experts: by their numbers, or beside what this was not tried with."""
    degree = config.parallel.expert_ranks
    if degree == 1:
        return
    if not model.has_groups:
        raise UserError(
            f"{model.model_type} has no experts to divide",
            where=KEY,
            why="its blocks have one MLP each",
            fix=f"remove {KEY}, or use a mixture of experts",
        )
    num_experts = _count_experts(model)
    fitting = [number for number in range(1, world_size + 1) if world_size % number == num_experts % number == 0]
    ranks = count_of(world_size, "rank of the run", "ranks of the run")
    for count, what in ((world_size, ranks), (num_experts, f"{num_experts} experts of a block")):
        if count % degree:
            *others, last = map(str, fitting)
            allowed = f"{', '.join(others)} or {last}" if others else last
            raise UserError(
                f"{KEY}: {degree} does not divide the {what}",
                where=KEY,
                why=f"each group of {degree} neighboring ranks divides the experts of a block evenly",
                fix=f"set {KEY} to {allowed}, or start another number of processes",
            )
    for name in _obstacles(config, model):
        raise UserError(
            f"{KEY} cannot be combined with {name}",
            where=KEY,
            why="divided experts are not part of FSDP2 or DDP, and this combination has not been tested",
            fix=f"remove {KEY}, or change {name.partition(':')[0].partition(',')[0]}",
        )
    if _cuts_rows(config, model, degree):
        raise UserError(
            f"experts in NF4 cannot be divided by {KEY}: {degree}",
            where=KEY,
            why=f"they are held in rows of {NF4_ROW_VALUES:,} values, which would lie on two ranks",
            fix=f"set method.name: lora, or another {KEY}",
        )


def _stacks(model: ModelFacts) -> list[LinearShape]:
    return [shape for shape in model.block_linear_shapes.values() if shape.groups > 1]


def _count_experts(model: ModelFacts) -> int:
    return math.gcd(*(stack.groups for stack in _stacks(model)))


def _obstacles(config: RunConfig, model: ModelFacts) -> list[str]:
    """What divided experts were not tried with."""
    mode = config.parallel.activation_checkpointing
    untested = {
        f"parallel.strategy: {config.parallel.strategy}": config.parallel.strategy.startswith("zero"),
        f"parallel.offload: {config.parallel.offload}": config.parallel.offload != "none",
        f"method.name: {config.method.name}": config.method.name == "patterns",
        "model.frozen_dtype: fp8": config.model.frozen_dtype == "fp8",
        "kernels.linear: fp8": config.kernels.linear == "fp8",
        f"parallel.compile: true, with {mode} checkpointing": config.parallel.compile is True
        and mode not in ("auto", *WHOLE_BLOCKS),
        "model.master_dtype: bfloat16": config.model.master_dtype == "bfloat16",
        f"optimizer.name: {config.optimizer.name}": not OPTIMIZERS[config.optimizer.name].takes_divided_experts,
        f"parallel.context_degree: {config.parallel.context_degree}": config.parallel.context_ranks > 1,
        "model.name, with images": model.is_multimodal,
    }
    return [name for name, is_set in untested.items() if is_set]


def _cuts_rows(config: RunConfig, model: ModelFacts, degree: int) -> bool:
    is_nf4 = config.method.name == "qlora"
    return is_nf4 and any(stack.size // degree % NF4_ROW_VALUES for stack in _stacks(model))


def list_expert_degrees(config: RunConfig, facts: Facts) -> tuple[int, ...]:
    """The degrees that a plan may have, the smallest first: the key's, or for auto 1 and, on GPUs, the divisors of one
    machine's ranks by which the experts can be divided and their masters and moments fit. ``config`` is resolved.
    """
    asked, model = config.parallel.expert_degree, facts.model
    if asked != "auto":
        return (asked,)
    device, _ = choose_device(config, facts)
    if device == "cpu" or not model.has_groups or _obstacles(config, model):
        return (1,)
    world_size, _ = choose_world_size(config, facts, device)
    num_local = math.gcd(*facts.node_ranks) or ranks_per_machine(facts, device, world_size)
    common = math.gcd(world_size, num_local, _count_experts(model))
    held = STATE_BYTES * model.sum_linears(lambda shape: shape.size if shape.groups > 1 else 0)
    least = held / min(gpu.memory_bytes for gpu in facts.host.gpus) if config.method.name == "full" else 1
    degrees = (degree for degree in range(2, common + 1) if common % degree == 0 and degree > least)
    return (1, *(degree for degree in degrees if not _cuts_rows(config, model, degree)))


def choose_expert_degree(config: RunConfig, facts: Facts, cause: Cause, make_plan: Callable[[int], Plan]) -> Plan:
    """The plan of ``plan_degrees`` over ``list_expert_degrees``. Undivided experts are enough where nothing that
    dividing them may shorten takes ``MIN_GAIN`` of a step, or its seconds are not known.
    """
    degrees = list_expert_degrees(config, facts)

    def is_enough(plan: Plan) -> bool:
        return cause == "out_of_memory" or (plan.layout.expert_degree == 1 and not _may_gain(plan))

    chosen, why = plan_degrees(degrees, make_plan, is_enough, refusal=0)
    return explain_degree(chosen, "expert_degree", asked=config.parallel.expert_degree != "auto", **why)


def _may_gain(plan: Plan) -> bool:
    """Whether dividing experts could shorten a step enough: it saves gathers, copies, recomputation and updates;
    products and attention take as long or longer.
    """
    terms = plan.time.terms if plan.time is not None else {}
    saved = sum(terms.get(name, 0.0) for name in SAVED_BY_DIVIDING)
    return plan.step_s is not None and saved > MIN_GAIN * plan.step_s


def _check_adapters(config: RunConfig, model: ModelFacts) -> None:
    method = config.method
    patterns = ("*",) if method.target_modules == "all-linear" else method.target_modules
    layers = _layers_of(model)
    adapted: dict[str, LinearShape] = {}
    for pattern in patterns:
        found = {name: shape for name, shape in layers.items() if matches(name, pattern)}
        if not found:
            _refuse_target(pattern, model)
        adapted |= {name: shape for name, shape in found.items() if shape.groups > 1}
    stacks = (name for name, shape in layers.items() if shape.groups > 1)
    if saved := next((name for name in stacks if is_saved(name, method.modules_to_save)), None):
        raise UserError(
            "method.modules_to_save includes experts",
            where="method.modules_to_save",
            why=f"{saved} has no name in an adapter that PEFT opens",
            fix="leave experts out, so that adapters train them, or set method.name: patterns, with method.train",
        )
    if not adapted:
        return
    if method.dora:
        raise UserError(
            "DoRA cannot adapt experts",
            where="method.dora",
            why="no adapter format has magnitudes for the weights of experts, so nothing could open it",
            fix="set method.dora=false, or name other layers in method.target_modules, such as q_proj",
        )
    held = sum(shape.size for shape in adapted.values())
    by_rank = sum(shape.adapter_size for shape in adapted.values())
    if method.rank * by_rank > held:
        raise UserError(
            f"adapters of rank {method.rank} on the experts would be larger than the experts",
            where="method.rank",
            why=f"each expert has its own: {method.rank * by_rank:,} values beside {held:,}",
            fix=f"set method.rank to {held // by_rank} or less, name other layers in method.target_modules, "
            "such as q_proj, or set method.name: full",
        )


def _refuse_target(pattern: str, model: ModelFacts) -> None:
    in_files = PROJECTIONS.get(pattern.rpartition(".")[2])
    is_fused = f"experts.{in_files}" == FUSED and any(name.endswith(FUSED) for name in model.block_linear_shapes)
    raise UserError(
        f"{pattern} of method.target_modules matches no layer of {model.model_type}",
        where="method.target_modules",
        why=f"gate and up of each expert are one matrix, {FUSED}, with one adapter" if is_fused else "",
        fix=f"name {FUSED} in its place" if is_fused else "name linear layers of the blocks, or use all-linear",
        details=list(model.adaptable_of(model.num_layers - 1)),
    )
