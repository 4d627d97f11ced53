"""The doors of loss terms and tasks, entered by terms and samples of several documents that live in tests alone."""

from __future__ import annotations

import pytest

from manyhands.data.batch.order import SampleOrder
from tests.training.door_ranks import BATCH, NUM_PAIRS, compute_reference


@pytest.mark.distributed
@pytest.mark.parametrize("names", [("lm", "spread", "reach"), ("prefer", "reach")])
def test_declared_terms_train_and_are_evaluated_alike_on_one_and_two_ranks(world, names: tuple[str, ...]) -> None:
    """Each term over its own global weight, in training and evaluation; also in a run without a language-model term,
    of samples that are pairs.
    """
    (alone,), both = (world.run("tests.training.door_ranks:train_pairs", names, world_size=size) for size in (1, 2))
    first = SampleOrder(NUM_PAIRS, 0, BATCH).samples(0, 0).tolist()
    assert alone["steps"][0]["loss"] == pytest.approx(compute_reference(names, first), rel=1e-6)
    assert alone["evaluations"][0]["loss"] == pytest.approx(compute_reference(names, range(NUM_PAIRS)), rel=1e-6)
    assert set(names) < alone["steps"][0].keys() and set(names) < alone["evaluations"][0].keys()
    assert ("perplexity" in alone["evaluations"][0]) == ("lm" in names)
    assert ("preferred" in alone["evaluations"][0]) == ("prefer" in names)
    for rank in both:
        for kind in ("steps", "evaluations"):
            for one, other in zip(alone[kind], rank[kind], strict=True):
                assert other == pytest.approx(one, rel=1e-6)
    losses = [row["loss"] for row in alone["evaluations"]]
    assert losses == sorted(losses, reverse=True) and alone["best"] == (2, losses[-1])
    for ranks in ([alone], both):  # a pair is in one micro-batch, its documents side by side
        batches = [batch for rank in ranks for batch in rank["seen"]]
        pairs = [tuple(batch[at : at + 2]) for batch in batches for at in range(0, len(batch), 2)]
        assert sorted(pairs) == [(2 * number, 2 * number + 1) for number in range(NUM_PAIRS)]
    assert len(both[0]["seen"]) == len(both[1]["seen"])
