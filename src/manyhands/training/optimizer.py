"""The optimizer's groups: every trained parameter in exactly one, weight decay only on matrices, rates by pattern.

Must not know how a model is built or sharded. The optimizers are in ``optim/``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from manyhands.config.patterns import reaches
from manyhands.config.schema import OptimizerSection
from manyhands.core.errors import UserError
from manyhands.core.holding import full_shape, mesh_of
from manyhands.optim.options import TORCHS_ADAMW, Group, MakeAdamW, Options
from manyhands.optim.registry import OPTIMIZERS, load_factory

Parts = Mapping[str, Sequence[str]]  # patterns that reach the weights of a part of the model, first match first
NO_PARTS: Parts = {}


def make_optimizer(
    model: nn.Module,
    section: OptimizerSection,
    learning_rate: float,
    blocks: Collection[str] = (),
    make_adamw: MakeAdamW = TORCHS_ADAMW,
    compute_dtype: torch.dtype = torch.float32,
    parts: Parts = NO_PARTS,
) -> torch.optim.Optimizer:
    """The optimizer of ``section`` over the trained parameters of ``model``, in their own (master) dtype.

    ``learning_rate`` is the peak; ``blocks``, ``make_adamw`` and ``compute_dtype`` are those of ``Options``. Every
    group has ``peak_ratio``, its peak as a share of ``learning_rate``, and ``pattern``, the one of ``learning_rates``,
    or the part, that chose it or none. UserError for patterns that choose nothing and for a library that is missing.
    """
    groups = group_parameters(model, section, learning_rate, parts)
    if not groups:
        raise ValueError("no parameter of the model is trained")
    spec = OPTIMIZERS[section.name]
    options = Options(learning_rate, (section.beta1, section.beta2), section.eps, blocks, compute_dtype, make_adamw)
    optimizer: torch.optim.Optimizer = load_factory(spec)(groups, options, **spec.arguments)
    return optimizer


def group_parameters(
    model: nn.Module, section: OptimizerSection, learning_rate: float, parts: Parts = NO_PARTS
) -> list[Group]:
    """Groups of (name, parameter) pairs by pattern, and within it matrices, which decay, and the rest; those apart
    that other ranks hold together, as torch steps none of these side by side.

    Norm weights, biases (one dimension) and embeddings (also where the head is tied to them) do not decay: pulling
    them to zero changes scales that nothing else restores. Embeddings do if ``decay_embeddings`` asks for it.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    rates: dict[str, float] = {part: section.part_learning_rates.get(part, learning_rate) for part in parts}  # type: ignore[call-overload]
    rates |= section.learning_rates
    unrated = parts.keys() - section.part_learning_rates.keys()  # named to keep other parts' patterns off them
    chosen = choose_patterns(model, {pattern: (pattern,) for pattern in section.learning_rates} | dict(parts), unrated)
    groups: dict[tuple[object, ...], Group] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            pattern, is_embedding = chosen.get(id(parameter)), id(parameter) in embeddings
            is_matrix = len(full_shape(parameter)) >= 2 and not is_embedding
            decays = is_matrix or (is_embedding and section.decay_embeddings)
            peak = learning_rate if pattern is None else rates[pattern]
            empty = {"params": [], "weight_decay": section.weight_decay if decays else 0.0, "is_matrix": is_matrix}
            group = groups.setdefault(
                (pattern, is_matrix, decays, mesh_of(parameter)),
                {**empty, "peak_ratio": peak / learning_rate, "pattern": pattern, "lr": peak},
            )
            group["params"].append((name, parameter))
    return sorted(groups.values(), key=lambda group: not group["is_matrix"])


def choose_patterns(model: nn.Module, patterns: Parts, may_be_empty: Collection[str] = ()) -> dict[int, str]:
    """The first of ``patterns``, by name with what each stands for, that reaches a trained parameter, by its id; a tied
    one is reached by each of its names.

    UserError for a pattern that reaches no trained parameter, or none that an earlier one has left; unless it
    ``may_be_empty``.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    chosen: dict[int, str] = {}
    for pattern in patterns:
        hits = [
            key for key, own in names.items() if any(reaches(name, each) for name in own for each in patterns[pattern])
        ]
        free = [key for key in hits if key not in chosen]
        if not free and pattern not in may_be_empty:
            is_part = patterns[pattern] != (pattern,)
            section = f"optimizer.{'part_' * is_part}learning_rates"
            fix = "narrow those patterns, or remove its rate" if is_part else "put it before the wider pattern"
            raise UserError(
                f"{pattern!r} of {section} chooses no trained weight",
                where=section,
                why=f"patterns {'of optimizer.learning_rates' if is_part else 'before it'} take all that it matches"
                if hits
                else "no weight that is trained has such a name",
                fix=fix if hits else "name trained weights, for example one of these, or remove it",
                details=[] if hits else [own[0] for own in names.values()][:20],
            )
        chosen |= dict.fromkeys(free, pattern)
    return chosen


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Every group gets its share of the schedule's rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("peak_ratio", 1.0)


def rates_by_pattern(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The present learning rate of each of ``optimizer.learning_rates``."""
    return {group["pattern"]: group["lr"] for group in optimizer.param_groups if group.get("pattern") is not None}
