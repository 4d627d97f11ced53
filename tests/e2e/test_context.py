"""A run whose packs two processes divide: the course of one process, and resumed by one."""

from __future__ import annotations

import pytest

from tests.e2e.runs import NUM_STEPS, Place, Spec

PLAIN = ("method.dropout=0",)  # dropout is keyed by rank
DIVIDED = (*PLAIN, "parallel.context_degree=2", "parallel.strategy=fsdp")


@pytest.mark.ci
def test_two_processes_divide_packs_and_one_goes_on(place: Place) -> None:
    output = place.many(
        Spec(1, "context-one", PLAIN),
        Spec(2, "context-two", DIVIDED),
        Spec(2, "context-broken", DIVIDED, {"step": 7}),
        Spec(1, "context-broken", PLAIN),
    )
    assert "deprecated" not in output
    one = place.run("context-one")
    for name in ("context-two", "context-broken"):
        run = place.run(name)
        assert run.seen() == one.seen() and len(run.seen()) == NUM_STEPS
        assert run.losses() == pytest.approx(one.losses(), rel=1e-5)
        norms = [[row["grad_norm"] for row in each.rows()] for each in (run, one)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        figures = [
            [(row["step"], row["loss"], row["accuracy"], row["num_loss_tokens"]) for row in each.rows("evaluation")]
            for each in (run, one)
        ]
        assert [row for each in figures[0] for row in each] == pytest.approx(
            [row for each in figures[1] for row in each], rel=1e-5
        )
    both = [row["rank_losses"] for row in place.run("context-two").rows()]
    means = [sum(losses) / 2 for losses in both]
    assert means == pytest.approx(one.losses(), rel=1e-5), "each rank's part of the loss, by half of its weight"
