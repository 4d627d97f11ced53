"""Blocks launched as CUDA graphs: gradients of a step's micro-batches, and losses as without them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from manyhands import families
from manyhands.config.schema import MethodSection
from manyhands.convert.experts import stack_experts
from manyhands.convert.fused_modules import fuse_modules
from manyhands.convert.lora import apply_lora
from manyhands.core.world import World
from manyhands.engine.apply import compile_blocks, keep_compute_copy
from manyhands.engine.native import NativeEngine
from manyhands.kernels.experts import select
from manyhands.model.loss import LossModel
from manyhands.model.structure import find_blocks
from tests.support.layouts import pack
from tests.support.tiny import tiny_model

METHODS = ("lora", "experts", "full")
DOCUMENTS = [[([1, 2, 3, 4, 5], [1] * 5)], [([9, 8, 7], [1] * 3)], [([5, 5, 6, 7], [1] * 4)]]


def make_engine(device: torch.device, *, cuda_graphs: bool, method: str = "lora") -> NativeEngine:
    """Adapters in float32, on experts too, or everything trained: float32 masters that compute in bfloat16."""
    torch.manual_seed(0)
    model = tiny_model("qwen3_moe" if method == "experts" else "llama")
    if method == "experts":
        stack_experts(model)
        if cuda := device.type == "cuda":
            model.to(torch.bfloat16)
        select.use(select.choose_backend(device))
        assert (select._kernels is not None) == cuda
    if method != "full":
        apply_lora(model, MethodSection(name="lora", rank=4), 0)
        fuse_modules(model, families.known_modules())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    loss_model = LossModel(model.to(device)).train()
    copy = keep_compute_copy(loss_model) if method == "full" else None
    return NativeEngine(loss_model, World(0, 0, 1, device), copy=copy, cuda_graphs=cuda_graphs)


def overwrite_gradients(engine: NativeEngine) -> None:
    """Each forward pass overwrites the memory that the last backward pass gave its gradients in, as graphs do."""
    given: list[torch.Tensor] = []
    begun: set[nn.Parameter] = set()  # parameters whose gradient is added to what is there

    def note(parameter: nn.Parameter, _: torch.Tensor) -> None:
        (begun.discard if parameter.grad is None else begun.add)(parameter)

    def keep(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        given.extend([] if parameter in begun else [parameter.grad])

    def overwrite(*_: object) -> None:
        for gradient in given:
            gradient.fill_(math.nan)
        given.clear()

    copy = engine._copy
    for parameter in engine.model.parameters() if copy is None else copy._copies:
        if parameter.requires_grad:
            parameter.register_hook(partial(note, parameter))
            hooks = [] if copy is None else [*parameter._post_accumulate_grad_hooks.values()]
            if hooks:
                parameter._post_accumulate_grad_hooks.clear()  # a master takes the gradient away
            for hook in (keep, *hooks):
                parameter.register_post_accumulate_grad_hook(hook)
    first = next(iter(find_blocks(engine.model).values()))
    first.register_forward_pre_hook(overwrite)


def gradients_of(engine: NativeEngine, batches: list[dict[str, object]]) -> list[torch.Tensor]:
    for index, batch in enumerate(batches):
        engine.backward(engine.forward(batch)["lm"][0], last=index == len(batches) - 1)
    return [p.grad.cpu() for p in engine.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_gradients_survive_the_next_micro_batch(num_micro_batches: int, method: str) -> None:
    device = torch.device("cpu")
    batches = [pack(documents) for documents in DOCUMENTS[:num_micro_batches]]
    expected = gradients_of(make_engine(device, cuda_graphs=False, method=method), batches)
    engine = make_engine(device, cuda_graphs=True, method=method)
    overwrite_gradients(engine)
    for _ in range(2):  # the second step begins without gradients again
        engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.0)
        found = gradients_of(engine, batches)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        engine.drop_gradients()


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_graphs_give_the_same_gradients(method: str) -> None:
    device = torch.device("cuda")
    rows = [[1, 2, 3, 4] * 16, [7, 8] * 32, [5] * 64]
    batches = [
        {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for batch in (pack([(row, [1] * len(row))]) for row in rows)
    ]
    plain, graphs = (make_engine(device, cuda_graphs=asked, method=method) for asked in (False, True))
    compile_blocks(plain.model, dynamic=None)
    compile_blocks(graphs.model, dynamic=None, options={"triton.cudagraphs": True})
    for engine in (plain, graphs):
        engine.optimizer = torch.optim.SGD((p for p in engine.model.parameters() if p.requires_grad), lr=0.1)
    for _ in range(4):  # the first passes warm up and record
        expected, found = (gradients_of(engine, batches) for engine in (plain, graphs))
        near = {"rtol": 1e-4, "atol": 1e-6} if method == "lora" else {"rtol": 2e-2, "atol": 1e-4}
        torch.testing.assert_close(found, expected, **near)
        for engine in (plain, graphs):
            engine.step(0.1, max_norm=0.0)
