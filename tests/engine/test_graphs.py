"""How many graphs compiled blocks need: one for each kind of block, whatever the packs hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental import _config as shapes
from torch.nn.attention import varlen

from manyhands.config.schema import MethodSection
from manyhands.convert.lora import apply_lora
from manyhands.data.batch.batches import collate
from manyhands.data.batch.collate import BatchShape
from manyhands.engine.activations import checkpoint_blocks
from manyhands.engine.apply import compile_blocks
from manyhands.model.attention import VARLEN, register_attention
from manyhands.model.loss import LossModel
from manyhands.model.structure import find_blocks
from tests.data.fake_samples import FakeSamples
from tests.support.tiny import tiny_model

SHAPE = BatchShape(packed=True, tile=16, longest=64)
PACKS = [[0, 1], [2], [3, 4, 5, 6], list(range(12)), [7, 8], [9, 10, 11], list(range(5, 25)), [12, 13], []]
KINDS = {"llama": 1, "gemma3": 2}  # gemma3 has blocks with a window and blocks without
# Each value of the three beside each value of the others in `make test`, all eight in `make test-all`.
PAIRED = {("llama", "full", False), ("llama", "lora", True), ("gemma3", "full", True), ("gemma3", "lora", False)}
COMBINATIONS = [
    pytest.param(*combination, marks=[] if combination in PAIRED else [pytest.mark.slow])
    for combination in itertools.product(KINDS, ("full", "lora"), (False, True))
]


def make_rows(lengths: list[int] | None = None) -> FakeSamples:
    draw = np.random.default_rng(0)
    each = lengths or draw.integers(5, 60, 40).tolist()
    return FakeSamples(tuple((draw.integers(0, 256, n).tolist(), [1] * n) for n in each))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    # As a process begins; compile_blocks changes them.
    with shapes.patch(use_duck_shape=True), torch._dynamo.config.patch(specialize_float=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents one by one in place of the GPU kernel, behind an operator that dynamo does not look into, as there."""
    monkeypatch.setattr("manyhands.model.attention.varlen_attn", attend_by_document)


@torch.library.custom_op("manyhands_tests::attend_by_document", mutates_args=())
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, window: int
) -> torch.Tensor:
    assert int(bounds.diff().max()) <= longest
    return _by_document(query, key, value, bounds, window)


def _by_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, window: int
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outs = []
    for begin, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)[None]
        mask = (distance >= 0) & ((distance <= window) if window >= 0 else True)
        outs.append(
            torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0].transpose(
                0, 1
            )
        )
    return torch.cat(outs)


@_attend.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, window: int
) -> torch.Tensor:
    return torch.empty_like(query)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, _, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    *tensors, bounds = ctx.saved_tensors
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        out = _by_document(*inputs, bounds, ctx.window)
    return *torch.autograd.grad(out, inputs, grad), None, None, None


_attend.register_autograd(_backward, setup_context=_keep)


def attend_by_document(
    query: Any, key: Any, value: Any, bounds: Any, _: Any, longest: int, __: int, *, window_size: Any, **more: Any
) -> Any:
    assert set(more) <= {"scale", "enable_gqa"}
    return _attend(query, key, value, bounds, longest, window_size[0])


class Counted:
    """A tiny model whose compiled graphs are counted."""

    def __init__(
        self,
        family: str,
        *,
        method: str = "full",
        activation_checkpointing: bool = False,
        attention: str = "sdpa",
        dynamic: bool | None = True,
    ):
        self.num_graphs = 0
        self.inputs: list[Any] = []
        model = tiny_model(family).train()
        if attention == VARLEN:
            register_attention()
            model.set_attn_implementation(VARLEN)
        if method == "lora":
            apply_lora(model, MethodSection(rank=4, alpha=8.0, dropout=0.1), seed=0)
        if activation_checkpointing:
            checkpoint_blocks(model, ("full",) * len(find_blocks(model)), compiled=False)
        compile_blocks(model, dynamic=dynamic, backend=self._count, fullgraph=True)
        self.model = LossModel(model)

    def _count(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1
        self.inputs += inputs
        return graph.forward

    def train(self, rows: list[int], sample_set: FakeSamples, shape: BatchShape = SHAPE) -> float:
        self.model.train()
        loss = self.model(collate(sample_set, np.array(rows, dtype=np.int64), shape))["lm"][0]
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, rows: list[int], sample_set: FakeSamples, shape: BatchShape = SHAPE) -> float:
        self.model.eval()
        return self.model(collate(sample_set, np.array(rows, dtype=np.int64), shape))["lm"][0].item()


@pytest.mark.ci
@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize(("family", "method", "activation_checkpointing"), COMBINATIONS)
def test_packs_of_any_fill_run_one_graph_a_kind_of_block(
    family: str, method: str, activation_checkpointing: bool
) -> None:
    counted, rows = (
        Counted(family, method=method, activation_checkpointing=activation_checkpointing, attention=VARLEN),
        make_rows(),
    )
    kinds = KINDS[family] + (method == "lora")  # the input of the first block needs no gradient then
    for pack in PACKS:
        counted.train(pack, rows)
        assert counted.num_graphs == kinds
    for pack in PACKS[:3]:  # and one more for each kind in evaluation, however often the two alternate
        counted.evaluate(pack, rows)
        counted.train(pack, rows)
    assert counted.num_graphs == kinds + KINDS[family]


@pytest.mark.ci
@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_no_number_enters_a_graph_as_a_tensor(method: str) -> None:
    """On a GPU its arithmetic would be a kernel of the CPU, for which a C++ compiler is called for over a minute."""
    counted = Counted("llama", method=method, attention=VARLEN)
    counted.train([0, 1], make_rows())
    assert counted.inputs and [x for x in counted.inputs if isinstance(x, torch.Tensor) and x.ndim == 0] == []


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_with_masks_too_where_packs_hold_several_documents(activation_checkpointing: bool) -> None:
    counted, rows = Counted("llama", activation_checkpointing=activation_checkpointing), make_rows()
    for pack in PACKS[:1] + PACKS[2:]:
        counted.train(pack, rows)
    assert counted.num_graphs == 1


@pytest.mark.ci
@pytest.mark.usefixtures("varlen_on_cpu")
def test_the_numbers_are_those_without_compilation() -> None:
    counted, rows = Counted("gemma3", attention=VARLEN), make_rows()
    plain = LossModel(tiny_model("gemma3").train())
    plain.model.set_attn_implementation(VARLEN)
    for pack in PACKS[:4]:
        expected = plain(collate(rows, np.array(pack), SHAPE))["lm"][0]
        expected.backward()
        assert counted.train(pack, rows) == pytest.approx(expected.item(), rel=1e-5)
    for (name, mine), theirs in zip(counted.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.usefixtures("varlen_on_cpu")
def test_rows_of_one_length_keep_one_static_shape() -> None:
    rows, shape = make_rows([32] * 20), BatchShape(packed=True, tokens=128, longest=32, documents=4)
    counted = Counted("llama", attention=VARLEN, dynamic=None)
    sizes: set[Any] = set()

    def count(graph: Any, inputs: Any) -> Any:
        sizes.update(type(size) for tensor in inputs if isinstance(tensor, torch.Tensor) for size in tensor.shape)
        return counted._count(graph, inputs)

    compile_blocks(counted.model.model, dynamic=None, backend=count, fullgraph=True)
    for pack in ([0, 1, 2, 3], [4], [5, 6], [], [7, 8, 9, 10]):
        counted.train(pack, rows, shape)
    assert counted.num_graphs == 1 and sizes == {int}


def test_the_operator_of_varlen_takes_sizes_as_symbols() -> None:
    """What the tests above put in place of the kernel must not be kinder than torch's own operator."""
    op: Any = varlen._varlen_attn
    schema = str(op._opoverload._schema)
    assert "SymInt max_q" in schema and "SymInt max_k" in schema
