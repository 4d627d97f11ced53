"""The routers' balance loss and the load of experts, against a few lines that take each document alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from manyhands.config.schema import MethodSection
from manyhands.convert.experts import stack_experts
from manyhands.convert.lora import apply_lora
from manyhands.convert.routing import declare_routing
from manyhands.core.errors import UserError
from manyhands.core.terms import LossTerm
from manyhands.data.batch.batches import collate
from manyhands.data.batch.collate import BatchShape
from manyhands.data.store.streams import MASK, TOKENS, make_sample
from manyhands.engine.activations import checkpoint_blocks
from manyhands.engine.apply import compile_blocks
from manyhands.model.attention import IMPLEMENTATIONS, register_attention
from manyhands.model.loss import LossModel
from manyhands.model.structure import find_experts
from manyhands.training.loop import evaluate
from manyhands.training.types import TrainState
from tests.convert.test_experts import PLAIN, SINKS, TYPES
from tests.support.experts import expert_model
from tests.support.toy_engine import ToyEngine

LENGTHS = (17, 1, 30)


class Rows:
    streams = (TOKENS, MASK)
    has_weights = False
    lengths = np.array(LENGTHS)

    def sample(self, index: int) -> Any:
        ids = np.random.default_rng(index).integers(0, 256, LENGTHS[index]).astype(np.int32)
        return make_sample(ids, np.ones(len(ids), dtype=bool))


def batch_of(numbers: tuple[int, ...], *, packed: bool, tokens: int | None = None) -> dict[str, Any]:
    shape = BatchShape(packed, tokens=tokens, tells_documents=True)
    return dict(collate(Rows(), np.array(numbers), shape))  # type: ignore[arg-type]


def make(model_type: str, dtype: torch.dtype = torch.float64, coefficient: float = 1.0) -> LossModel:
    model = expert_model(model_type).to(dtype)
    stack_experts(model)
    register_attention()
    loss_model = LossModel(model)
    declare_routing(loss_model, coefficient)
    return loss_model.train()


def compute_reference(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Its sum over all documents, each alone, and how many tokens each expert of each layer got."""
    seen: list[tuple[Any, torch.Tensor]] = []
    routed: list[torch.Tensor] = []
    for name, experts in find_experts(model).items():
        parent = model.get_submodule(name.rpartition(".")[0])
        own = {n: p for n, p in parent.named_parameters() if "experts." not in n}
        ((name, weight),) = ((n, p) for n, p in own.items() if p.dim() == 2 and len(p) == 8)
        router = partial(F.linear, weight=weight, bias=own.get(name.replace("weight", "bias")))
        owner = parent.get_submodule(name.rpartition(".")[0])
        owner.register_forward_pre_hook(lambda _, args: routed.append(args[0].flatten(0, -2)))
        experts.register_forward_pre_hook(lambda _, args, router=router: seen.append((router, args[1])))
    total, loads = torch.zeros((), dtype=torch.float64), 0
    for number, length in enumerate(LENGTHS):
        seen.clear(), routed.clear()
        model(input_ids=torch.from_numpy(Rows().sample(number)["tokens"]).long()[None], use_cache=False)
        for (router, index), hidden in zip(seen, routed, strict=True):
            p, chosen = router(hidden).softmax(-1).sum(0), F.one_hot(index, 8).sum((0, 1))
            total = total + length * 8 / index.shape[1] * (chosen / length * p / length).sum() / len(seen)
        loads = loads + torch.stack([F.one_hot(index, 8).sum((0, 1)) for _, index in seen])
    return total, loads


@pytest.mark.parametrize("model_type", TYPES)
def test_balance_is_that_of_each_document_alone(model_type: str) -> None:
    """In value and gradient, with and without padding; and the load is what the experts get of it."""
    reference = make(model_type, coefficient=0).model
    expected, loads = compute_reference(reference)
    expected.backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    for packed in (False, True)[: 1 + (model_type in PLAIN)]:
        batch = batch_of((0, 1, 2), packed=packed, tokens=64 if packed else None)
        loss_model = make(model_type)
        if packed and model_type in SINKS:
            loss_model.model.set_attn_implementation(IMPLEMENTATIONS["blockwise"])
        total, num_tokens = loss_model(batch)["balance"]
        assert num_tokens == sum(LENGTHS) and total.item() == pytest.approx(expected.item(), rel=1e-5)
        total.backward()
        for name, gradient in wanted.items():
            found = loss_model.model.get_parameter(name).grad
            assert (found - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name
        idle, largest = loss_model.figures[0].read(lambda tensor: tensor)
        assert float(idle) == float((loads == 0).double().mean())
        assert float(largest) == pytest.approx(float((loads.amax(1) / loads.double().mean(1)).max()))


def test_figures_of_an_evaluation_add_up_to_its_loss() -> None:
    loss_model = make("mixtral", coefficient=0.5)
    engine = ToyEngine(loss_model, loss_model, torch.optim.SGD)
    counts: Any = {"num_samples": 2, "num_tokens": 47, "num_loss_tokens": {"": 45}, "device": torch.device("cpu")}
    batch = batch_of((0, 2), packed=True)
    found = evaluate(engine, loss_model, [batch], TrainState(), **counts, terms=loss_model.terms)
    expected = math.log(found.figures["perplexity"]) + 0.5 * found.figures["balance_loss"]
    assert found.loss == pytest.approx(expected, rel=1e-9)


def test_balance_of_even_and_of_lopsided_routers() -> None:
    for bias, value in ((0.0, 1.0), (40.0, 8 / 2)):  # two of eight experts take all
        loss_model = make("qwen3_moe")
        for layer in loss_model.model.model.layers:
            layer.mlp.gate.weight.data.zero_()
            layer.post_attention_layernorm.weight.data.copy_(F.one_hot(torch.tensor(0), 64) * 1.0)
            layer.mlp.gate.register_forward_pre_hook(lambda _, args: (args[0].abs(),))
            layer.mlp.gate.weight.data[:2, 0] = bias * 1e3
        batch = batch_of((2,), packed=False)
        total, num_tokens = loss_model(batch)["balance"]
        assert (total / num_tokens).item() == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize(
    ("mode", "compiled"),
    [
        *((mode, False) for mode in ("none", "full", "selective", "except_attention")),
        *(pytest.param(mode, True, marks=pytest.mark.ci) for mode in ("full", "except_attention")),
        *(pytest.param(mode, True, marks=[pytest.mark.ci, pytest.mark.slow]) for mode in ("none", "selective")),
    ],
)
def test_recomputed_blocks_count_once(mode: Any, compiled: bool) -> None:
    """Gradients to the bit, compiled to rounding: one graph for all loads."""
    plain, loss_model = (make("qwen3_moe", torch.float32) for _ in range(2))
    checkpoint_blocks(loss_model.model, [mode] * 2, compiled=compiled)
    if compiled:
        torch._dynamo.reset()
        compile_blocks(loss_model.model, dynamic=True, backend="aot_eager", fullgraph=True)
    for numbers, tokens in (((0, 1), 24), ((2,), 40), ((0, 2), 56)):
        batch, grown = batch_of(numbers, packed=True, tokens=tokens), tokens == 56
        values = []
        with torch._dynamo.config.patch(error_on_recompile=compiled and grown):
            for each in (plain, loss_model):
                each.zero_grad()
                terms = each(batch)
                (terms["lm"][0] + 3 * terms["balance"][0]).backward()
                values.append(terms["balance"][0].item())
        assert values[0] == pytest.approx(values[1], rel=0 if not compiled else 1e-6)
        for (name, one), other in zip(plain.named_parameters(), loss_model.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=2e-5 if compiled else 0, msg=name)
        figures = [[float(figure) for figure in each.figures[0].read(lambda x: x)] for each in (plain, loss_model)]
        assert figures[0] == figures[1]
        kept = loss_model.figures[0].choices
        assert all(choice.logits is None and choice.index is None for choice in kept)  # nor is anything held


def test_balance_reaches_what_comes_before_a_frozen_router_or_is_refused() -> None:
    for targets, reached in ((("q_proj",), True), (("layers.1.mlp.experts.down_proj",), False)):
        loss_model = make("qwen3_moe", torch.float32)
        apply_lora(loss_model.model, MethodSection(name="lora", rank=4, target_modules=targets), seed=0)
        if reached:
            loss_model(batch_of((0,), packed=True))["balance"][0].backward()
            layer = loss_model.model.model.layers[1]
            assert layer.self_attn.q_proj.lora_B.weight.grad.norm() > 0 and not layer.mlp.gate.weight.requires_grad
        else:
            with pytest.raises(UserError, match="would train nothing"):
                loss_model(batch_of((0,), packed=True))


def test_the_pass_of_a_reference_is_not_what_is_balanced_or_counted() -> None:
    batch = batch_of((0, 2), packed=False)
    plain = make("qwen3_moe")
    expected, _ = plain(batch)["balance"]
    loss_model = make("qwen3_moe")
    routers = [layer.mlp.gate.weight for layer in loss_model.model.model.layers]

    @contextmanager
    def other_model() -> Iterator[None]:
        kept = [weight.detach().clone() for weight in routers]
        with torch.no_grad():
            for weight in routers:
                weight.copy_(weight.flip(0) * 3)
        yield
        with torch.no_grad():
            for weight, old in zip(routers, kept, strict=True):
                weight.copy_(old)

    def compare(model: LossModel, batch: Any, hidden: torch.Tensor, metrics: bool) -> Any:
        return {"compared": (hidden.sum() * 0 + batch["reference"].sum() * 0, torch.tensor(1))}

    loss_model.without_adapters = other_model
    loss_model.terms = (LossTerm("compared", compute=compare, needs_reference=True), *loss_model.terms[1:])
    found, _ = loss_model({**batch, "documents": torch.tensor([LENGTHS[0], LENGTHS[2]])})["balance"]
    assert found.item() == pytest.approx(expected.item(), rel=1e-9) and found.requires_grad
    loads = [list(model.figures[0].read(lambda tensor: tensor)) for model in (plain, loss_model)]
    assert loads[0] == loads[1]


def test_a_decoder_that_is_called_by_itself_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a batch has images."""

    def call_decoder(self: LossModel, batch: dict[str, Any]) -> torch.Tensor:
        model: Any = self.model
        embeds = model.get_input_embeddings()(batch["input_ids"])
        hidden: torch.Tensor = model.get_decoder()(inputs_embeds=embeds, use_cache=False)[0]
        return hidden.flatten(0, 1)

    found = []
    for _ in range(2):
        loss_model = make("qwen3_moe")
        total, _ = loss_model(batch_of((0, 1, 2), packed=False))["balance"]
        found.append((total.item(), [figure.item() for figure in loss_model.figures[0].read(lambda tensor: tensor)]))
        monkeypatch.setattr(LossModel, "_hidden_states", call_decoder)
    assert found[0] == found[1]
