"""Checkpointing and compilation change neither numbers nor names; norms and sums of one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.engine.activations import checkpoint_blocks
from manyhands.engine.apply import check_trained, compile_blocks
from manyhands.engine.native import NativeEngine, clip_gradients
from manyhands.model.loss import LossModel
from manyhands.model.structure import find_blocks
from tests.support.plans import make_layout
from tests.support.tiny import FAMILIES, tiny_model

ALONE = World(0, 0, 1, torch.device("cpu"))


def step(change: Any, family: str = "llama") -> tuple[float, dict[str, torch.Tensor]]:
    model = tiny_model(family).train()
    change(model)
    ids = torch.arange(50)[None]
    loss_sum, _ = LossModel(model)({"input_ids": ids, "labels": ids.roll(-1, 1)})["lm"]
    loss_sum.backward()
    return loss_sum.item(), {name: p.grad for name, p in model.named_parameters()}


def recompute_all(model: Any) -> None:
    checkpoint_blocks(model, ("full",) * len(find_blocks(model)), compiled=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_blocks_is_bit_equal(family: str) -> None:
    (loss, gradients), (other_loss, other) = step(lambda model: None, family), step(recompute_all, family)
    assert loss == other_loss and list(gradients) == list(other)
    assert all(torch.equal(gradients[name], other[name]) for name in gradients)


def test_recomputing_runs_each_block_twice() -> None:
    calls = []

    def count(model: Any) -> None:
        checkpoint_blocks(model, ("full",) * len(find_blocks(model)), compiled=False)
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))

    step(count)
    assert len(calls) == 2


@pytest.mark.ci
def test_compiled_blocks_are_whole_graphs_under_the_same_names() -> None:
    def compile_recomputed(model: Any) -> None:
        checkpoint_blocks(model, ("full",) * len(find_blocks(model)), compiled=False)
        compile_blocks(model, backend="aot_eager", fullgraph=True)

    (loss, gradients), (other_loss, other) = step(lambda model: None), step(compile_recomputed)
    assert loss == pytest.approx(other_loss, rel=1e-6) and list(gradients) == list(other)
    for name in gradients:
        torch.testing.assert_close(gradients[name], other[name], rtol=1e-4, atol=1e-5)


def test_norm_is_the_root_of_the_sum_of_squares_in_float64() -> None:
    engine = NativeEngine(LossModel(tiny_model("llama")), ALONE)
    first, second, *_ = engine.model.parameters()
    first.grad, second.grad = torch.zeros_like(first), torch.zeros_like(second)
    first.grad[0, 0], second.grad[0, 0] = 3.0, 4.0
    norm = engine.gradient_norm()
    assert norm.dtype == torch.float64 and norm.item() == 5.0  # sqrt(3^2 + 4^2)
    first.grad[0, 0], second.grad[0, 0] = 1.0, 2.0**-20
    assert engine.gradient_norm().item() ** 2 == pytest.approx(1 + 2.0**-40, rel=1e-15)  # lost in float32


def test_one_process_without_a_group_has_its_own_sums() -> None:
    engine = NativeEngine(LossModel(tiny_model("llama")), ALONE)
    assert engine.all_reduce_sum(torch.tensor(2.0)).item() == 2.0
    assert [t.item() for t in engine.all_gather(torch.tensor(2.0))] == [2.0]


class LastBlock:
    """Optional parts that a model without images has: its last block, idle in steps whose batches say so."""

    unused: set[str] = set()

    def are_idle(self, batch: Mapping[str, Any]) -> bool:
        return bool(batch.get("skips_last"))

    def trained(self, model: Any) -> list[nn.Parameter]:
        return list(model.model.layers[-1].parameters())

    def divide_for_sharding(self, model: Any) -> tuple[list[nn.Module], set[nn.Parameter]]:
        return [], set()


@pytest.mark.parametrize("idle", [True, False])
def test_parts_that_a_step_does_not_reach_have_no_gradients_after_its_last_micro_batch(idle: bool) -> None:
    class WithParts(LossModel):
        optional_parts = LastBlock()

    engine = NativeEngine(WithParts(tiny_model("llama")), ALONE)
    ids = torch.arange(50)[None]
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": ids, "cu_seq_lens": torch.tensor([0, 50])}
    for last in (False, True):
        engine.backward(engine.forward(batch | {"max_length": 50, "skips_last": idle})["lm"][0], last=last)
    without = {name for name, parameter in engine.model.named_parameters() if parameter.grad is None}
    named = {name for name, _ in engine.model.named_parameters() if name.startswith("model.layers.2.")}
    assert named and without == (named if idle else set())


def test_clip_factor_keeps_float64_models_exact() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    weight.grad = torch.full((3,), 2.0, dtype=torch.float64)
    norm = weight.grad.square().sum().sqrt()
    clip_gradients(torch.optim.SGD([weight], lr=1.0), norm, 1.0)
    assert weight.grad.norm().item() == pytest.approx(math.sqrt(12) / (math.sqrt(12) + 1e-6), rel=1e-15)


def test_an_optimizer_that_scales_by_itself_gets_the_factor_and_gradients_stay() -> None:
    class Scales(torch.optim.SGD):
        gradient_factor: torch.Tensor | None = None

    engine = NativeEngine(LossModel(tiny_model("llama")), ALONE)
    weight = next(iter(engine.model.parameters()))
    engine.optimizer = optimizer = Scales([weight], lr=1.0)
    weight.grad = torch.zeros_like(weight)
    weight.grad[0, 0] = 4.0
    seen: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append((optimizer.gradient_factor, weight.grad)))
    engine.step(1.0, max_norm=0.5)
    ((factor, gradient),) = seen
    assert factor is not None and factor.dtype == torch.float32 and factor.item() == pytest.approx(0.5 / 4, rel=1e-5)
    assert gradient is not None and gradient[0, 0].item() == 4.0


@pytest.mark.parametrize("planned", [True, False])
def test_a_plan_that_disagrees_about_what_is_trained_is_refused(planned: bool) -> None:
    """Its layout would cast, or give gradients to frozen weights."""
    loss_model = LossModel(tiny_model("llama"))
    if planned:
        next(loss_model.model.parameters()).requires_grad_(False)
    with pytest.raises(UserError, match="disagree about what is trained"):
        check_trained(loss_model, make_layout(trains_everything=planned))
    check_trained(loss_model, make_layout(trains_everything=not planned))
