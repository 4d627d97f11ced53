"""The longest sample that a run's GPUs hold, by bisection over plans. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.types import DataFacts, Facts
from manyhands.planner.batch import has_one_length
from manyhands.planner.context import with_degree
from manyhands.planner.types import Plan

LENGTH_STEP, LONGEST = 256, 4 * 2**20  # tokens


@dataclass(frozen=True)
class LongestSample:
    """``length`` tokens fit, with ``plan``; ``next_length`` do not, for the reason ``refusal``. None: nothing longer
    was tried.
    """

    length: int
    plan: Plan
    next_length: int | None
    refusal: UserError | None


def find_longest(
    config: RunConfig, facts: Facts, degrees: tuple[int, ...], make_plan: Callable[[RunConfig, Facts], Plan]
) -> LongestSample:
    """The longest of lengths that are multiples of ``LENGTH_STEP``, up to ``LONGEST``: one such sample for each GPU, or
    each group of them that divides a sample, and step, or ``batch.samples`` of them, with all else as the run's keys
    say and its facts are. The plan is that of the first of ``degrees`` that holds them.

    Raises the refusal of ``LENGTH_STEP`` tokens where not even these fit.
    """

    def try_length(length: int, degree: int = degrees[-1]) -> Plan | UserError:
        divided = _one_sample_each(config, facts, degree)
        longer = facts.model_copy(update={"data": _of_length(facts.data, divided, length)})
        data = divided.data.model_copy(update={"max_length": length})
        try:
            return make_plan(divided.model_copy(update={"data": data}), longer)
        except UserError as error:
            return error

    found = try_length(LENGTH_STEP)
    if isinstance(found, UserError):
        raise found
    fits, fails, refusal = 1, LONGEST // LENGTH_STEP + 1, None
    size = LONGEST // LENGTH_STEP  # tried first: then it is the answer
    while fits + 1 < fails:
        tried = try_length(size * LENGTH_STEP)
        if isinstance(tried, UserError):
            fails, refusal = size, tried
        else:
            fits, found = size, tried
        size = (fits + fails) // 2
    for degree in degrees[:-1]:
        if isinstance(smaller := try_length(fits * LENGTH_STEP, degree), Plan):
            found = smaller
            break
    return LongestSample(fits * LENGTH_STEP, found, fails * LENGTH_STEP if refusal else None, refusal)


def _one_sample_each(config: RunConfig, facts: Facts, degree: int) -> RunConfig:
    gpus = config.parallel.gpus if config.parallel.gpus != "auto" else facts.world_size
    ranks = gpus or max(1, len(facts.host.gpus) * facts.host.num_nodes)
    samples = max(1, ranks // degree) if config.batch.samples == "auto" else config.batch.samples
    counted = config.batch.model_copy(update={"samples": samples, "loss_tokens": None, "packs": None})
    return with_degree(config.model_copy(update={"batch": counted}), degree)


def _of_length(data: DataFacts, config: RunConfig, length: int) -> DataFacts:
    """As many samples, for one step at least, of this length; others than that between them where the run's have
    several lengths, which other kernels compute.
    """
    assert config.batch.samples != "auto"
    count = max(data.num_samples, config.batch.samples)
    mixed = 0 if has_one_length(data) else 1
    return data.model_copy(
        update={
            "shared": None,
            "num_samples": count,
            "samples_per_epoch": count,
            "sources": ((count, 1.0),),
            "num_tokens": count * length - mixed,
            "num_loss_tokens": count * length - mixed,
            "max_length": length,
            "mean_length": float(length),
            "num_validation_tokens": data.num_validation_samples * length,
            "first_lengths": (),
            "first_labels": (),
            "steps_of_epochs": (),
        }
    )
