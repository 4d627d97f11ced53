"""Checkpointing and compilation change neither numbers nor names; norms and sums of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.convert.loss import LossModel
from manyhands.core.world import World
from manyhands.engine.activation_checkpointing import checkpoint_blocks
from manyhands.engine.compile import compile_blocks
from manyhands.engine.native import Parallel
from tests.support.tiny import FAMILIES, tiny_model

CPU = World(0, 0, 1, torch.device("cpu"))


def step(change: Any, family: str = "llama") -> tuple[float, dict[str, torch.Tensor]]:
    model = tiny_model(family).train()
    change(model)
    ids = torch.arange(50)[None]
    loss_sum, _ = LossModel(model)({"input_ids": ids, "labels": ids.roll(-1, 1)})["lm"]
    loss_sum.backward()
    return loss_sum.item(), {name: p.grad for name, p in model.named_parameters()}


def recompute_all(model: Any) -> None:
    checkpoint_blocks(model, "full", compiled=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_blocks_is_bit_equal(family: str) -> None:
    (loss, gradients), (other_loss, other) = step(lambda model: None, family), step(recompute_all, family)
    assert loss == other_loss and list(gradients) == list(other)
    assert all(torch.equal(gradients[name], other[name]) for name in gradients)


def test_recomputing_runs_each_block_twice() -> None:
    calls = []

    def count(model: Any) -> None:
        checkpoint_blocks(model, "full", compiled=False)
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))

    step(count)
    assert len(calls) == 2


def test_compiled_blocks_are_whole_graphs_under_the_same_names() -> None:
    def compile_recomputed(model: Any) -> None:
        checkpoint_blocks(model, "full", compiled=False)
        compile_blocks(model, backend="aot_eager", fullgraph=True)

    (loss, gradients), (other_loss, other) = step(lambda model: None), step(compile_recomputed)
    assert loss == pytest.approx(other_loss, rel=1e-6) and list(gradients) == list(other)
    for name in gradients:
        torch.testing.assert_close(gradients[name], other[name], rtol=1e-4, atol=1e-5)


def test_norm_is_the_root_of_the_sum_of_squares_in_float64() -> None:
    parallel = Parallel(LossModel(tiny_model("llama")), CPU)
    first, second, *_ = parallel.model.parameters()
    first.grad, second.grad = torch.zeros_like(first), torch.zeros_like(second)
    first.grad[0, 0], second.grad[0, 0] = 3.0, 4.0
    norm = parallel.gradient_norm()
    assert norm.dtype == torch.float64 and norm.item() == 5.0  # sqrt(3^2 + 4^2)
    first.grad[0, 0], second.grad[0, 0] = 1.0, 2.0**-20
    assert parallel.gradient_norm().item() ** 2 == pytest.approx(1 + 2.0**-40, rel=1e-15)  # lost in float32


def test_one_process_without_a_group_has_its_own_sums() -> None:
    parallel = Parallel(LossModel(tiny_model("llama")), CPU)
    parallel.set_gradient_sync(False)
    assert parallel.all_reduce_sum(torch.tensor(2.0)).item() == 2.0
    assert [t.item() for t in parallel.all_gather(torch.tensor(2.0))] == [2.0]
