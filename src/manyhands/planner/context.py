"""Context parallelism, ``parallel.context_degree``: which degrees a plan may have, which of their plans is taken, and
what ranks exchange. What a divided sample cannot be yet is refused by name. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from manyhands.config.checks import check_context as check_keys
from manyhands.config.schema import RunConfig
from manyhands.core.errors import OUT_OF_MEMORY, UserError
from manyhands.facts.types import Facts, ModelFacts
from manyhands.planner.advice import DOES_NOT_FIT
from manyhands.planner.batch import USEFUL_TOKENS
from manyhands.planner.hardware import choose_device, choose_shard_ranks, choose_world_size
from manyhands.planner.types import Cause, Code, Plan, Reason, reason

KEY = "parallel.context_degree"
# Share of a step that must be gained, by the estimate, where the run fits undivided: what ranks exchange is not
# measured.
MIN_GAIN = 0.1


def with_degree(config: RunConfig, degree: int, name: str = "context_degree") -> RunConfig:
    parallel = config.parallel.model_copy(update={name: degree})
    return config.model_copy(update={"parallel": parallel})


def list_degrees(config: RunConfig, facts: Facts) -> tuple[int, ...]:
    """The degrees that a plan may have, the smallest first: the key's, or for auto 1 and, where packs can be divided,
    the divisors of the ranks that may divide them.
    """
    asked = config.parallel.context_degree
    if asked != "auto":
        return (asked,)
    if config.parallel.expert_ranks > 1 or _obstacles(config, facts.model):
        return (1,)
    device, _ = choose_device(config, facts)
    world_size, _ = choose_world_size(config, facts, device)
    number = _count_ranks(config, world_size, choose_shard_ranks(config, facts, device, world_size))
    divisors = (degree for degree in range(2, number + 1) if number % degree == 0)
    return (1, *(degree for degree in divisors if not any(check_keys(with_degree(config, degree)))))


def plan_degrees(
    degrees: Sequence[int], make_plan: Callable[[int], Plan], is_enough: Callable[[Plan], bool], refusal: int = -1
) -> tuple[Plan, dict[str, Any]]:
    """The plan of the first of ``degrees`` that fits with its margin, or else at all; or that of a later one if its
    steps are estimated to be shorter by ``MIN_GAIN``; and what a reason says of this. None are tried after a plan with
    its margin that ``is_enough``. Where none fits, the ``refusal`` of the last one, or of another.
    """
    plans: dict[int, Plan] = {}
    refusals: dict[int, UserError] = {}
    for degree in degrees:
        try:
            plans[degree] = made = make_plan(degree)
        except UserError as error:
            if error.kind not in (DOES_NOT_FIT, OUT_OF_MEMORY):
                raise
            refusals[degree] = error
        else:
            if made.memory.is_safe and is_enough(made):
                break
    if not plans:
        raise refusals[degrees[refusal]]
    safe = {degree: plan for degree, plan in plans.items() if plan.memory.is_safe}
    first = chosen = next(iter(safe or plans))
    for degree, plan in safe.items():
        chosen = degree if _seconds(plan) < (1 - MIN_GAIN) * _seconds(plans[chosen]) else chosen
    why = {"undivided": refusals[1].what if 1 in refusals else "", "tight": False}
    why["tight"] = not why["undivided"] and first != next(iter(plans))
    if chosen != first:
        why |= {"fewer": first, "slower": _seconds(plans[first]) / _seconds(plans[chosen]) - 1}
    return plans[chosen], why


def explain_degree(plan: Plan, code: Code, **why: Any) -> Plan:
    """The plan with more values in its reason of this code."""
    reasons = (reason(code, **each.values, **why) if each.code == code else each for each in plan.why)
    return plan.model_copy(update={"why": tuple(reasons)})


def choose_degree(
    config: RunConfig, facts: Facts, cause: Cause, before: Plan | None, make_plan: Callable[[int], Plan]
) -> Plan:
    """The plan of ``plan_degrees``, where samples are long or fewer than the ranks. After a launch that ran out of
    memory degrees below its own are not tried.
    """
    first = before.layout.mesh.context if before is not None and cause == "out_of_memory" else 1
    degrees = list_degrees(config, facts)
    degrees = tuple(degree for degree in degrees if degree >= first) or degrees[-1:]
    again = cause == "out_of_memory"
    chosen, why = plan_degrees(degrees, make_plan, lambda plan: again or not _may_gain(plan, facts))
    return explain_degree(chosen, "context", asked=config.parallel.context_degree != "auto", **why)


def _may_gain(plan: Plan, facts: Facts) -> bool:
    """Whether larger degrees are worth a look: not where short samples keep all ranks at work."""
    few = plan.batch_samples is not None and plan.batch_samples < plan.layout.data_parallel_degree
    return plan.step_s is not None and (few or facts.data.max_length > USEFUL_TOKENS[plan.layout.device])


def _seconds(plan: Plan) -> float:
    return plan.step_s or 0.0


def sent_bytes(model: ModelFacts, degree: int, c: int, *, heads: bool, passes: int = 1) -> float:
    """Bytes of one of its tokens that a rank sends in a layer, ``passes`` times forward and once backward.

    Of q values of all queries and k of all keys: exchanging heads ``c (2 q + 2 k) (W - 1) / W``, backward as forward;
    gathering keys ``2 c k (W - 1)``, backward in float32.
    """
    q, k = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if heads:
        return (passes + 1) * c * 2 * (q + k) * (degree - 1) / degree
    return 2 * k * (degree - 1) * (passes * c + max(c, 4))


def exchanges_heads(model: ModelFacts, degree: int, c: int, num_local: int) -> bool:
    """Whether ranks that divide packs exchange heads, where these divide: a rank then holds no keys but its own heads',
    all have equal work whatever the pack, and kernels compute whole documents. Between machines only where it sends
    less.
    """
    if degree == 1 or model.num_heads % degree or model.num_kv_heads % degree:
        return False
    return degree <= num_local or sent_bytes(model, degree, c, heads=True) <= sent_bytes(model, degree, c, heads=False)


def check_context(
    config: RunConfig, facts: Facts, world_size: int, shard_degree: int, *, exchanges: bool = False
) -> tuple[Reason, ...]:
    """The reason that a plan shows, if packs are divided. ``config`` is resolved. UserError where they cannot be."""
    degree = config.parallel.context_ranks
    if degree == 1:
        return ()
    number = _count_ranks(config, world_size, shard_degree)
    what = "of the run" if number == world_size else "that hold a copy"
    obstacles = ["ranks"] * (number % degree > 0) + _obstacles(config, facts.model)
    kind = facts.model.model_type
    texts = {
        "ranks": f"it does not divide the ranks {what}, {number}",
        "packs": f"only packs are divided, and {kind} does not pack ({facts.model.packing_reason})",
        "state": f"{kind} has layers that carry a state along the sample, which ranks would hand on to each other: "
        "that is not built",
        "images": f"{kind} reads images, and a rank's part of a sample may begin in one: that is not built",
    }
    for obstacle in obstacles:
        fix = f"set {KEY} to a divisor of {number}" if obstacle == "ranks" and number > 1 else f"remove {KEY}"
        raise UserError(f"{KEY}: {degree} cannot be carried out", where=KEY, why=texts[obstacle], fix=fix)
    return (reason("context", degree=degree, groups=world_size // degree, heads=exchanges),)


def _count_ranks(config: RunConfig, world_size: int, shard_degree: int) -> int:
    """Ranks that a degree has to divide."""
    return shard_degree if config.parallel.strategy == "hsdp" else world_size


def _obstacles(config: RunConfig, model: ModelFacts) -> list[str]:
    """What stands against divided packs of the model."""
    stands = {
        "packs": not config.data.packing or not model.packs,
        "state": model.num_mixer_layers > 0 and model.mixer_state > 0,  # not in short convolutions
        "images": model.is_multimodal,
    }
    return [name for name, applies in stands.items() if applies]
