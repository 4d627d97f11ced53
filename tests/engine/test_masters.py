"""Full bfloat16 training in one process without FSDP2: the same bits, the masters in place, one graph a kind of
block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.checkpoint.load import load_checkpoint
from manyhands.checkpoint.save import save_checkpoint
from manyhands.engine import apply as surgery
from manyhands.engine.apply import compile_blocks
from manyhands.engine.native import NativeEngine
from manyhands.infer.decode import complete
from manyhands.infer.settings import GenerationSettings
from manyhands.kernels.adamw import FusedAdamW
from manyhands.model.structure import find_blocks
from manyhands.training.optimizer import make_optimizer
from manyhands.training.step import StepSums, StepWork, TermWeight, compute_gradients
from tests.engine.masters_ranks import build, weights_of
from tests.support.images import make_document
from tests.support.images import pack as pack_images
from tests.support.layouts import pack
from tests.support.multimodal import write_tiny_multimodal
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_models

TRAIN = "tests.engine.masters_ranks:train"
BFLOAT16 = {"compute_dtype": "bfloat16", "strategy": "single", "reshard_after_forward": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_tiny_models(tmp_path_factory.mktemp("models"), "llama", "gemma3", "olmo2")


def documents(seed: int, *lengths: int, weighted: bool = False) -> list[tuple[list[int], list[Any]]]:
    draw = np.random.default_rng(seed)
    trained = [draw.random(n).tolist() if weighted else (draw.random(n) < 0.7).tolist() for n in lengths]
    return [(draw.integers(0, 256, n).tolist(), wanted) for n, wanted in zip(lengths, trained, strict=True)]


def steps(accumulation: int, weighted: bool = False) -> list[list[Any]]:
    return [[documents(micro, 9 + micro, 14, weighted=weighted) for micro in range(accumulation)]] * 4


def start(folder: str, **changes: Any) -> NativeEngine:
    """The model as one process builds it, in this process and without a group."""
    return build(tiny_plan(folder, **{**BFLOAT16, **changes}), tiny_run(folder))


def backward(engine: NativeEngine, seed: int = 0, *, last: bool = True) -> None:
    engine.backward(engine.forward(pack(documents(seed, 12, 7)))["lm"][0] / 19, last=last)


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "accumulation", "max_grad_norm", "changes"),
    [
        ("llama", 1, 0.0, {}),
        ("llama", 3, 1e-2, {"activation_checkpointing": "full", "converters": ("fused_loss",)}),
        ("llama", 3, 1.0, {"activation_checkpointing": "selective"}),
        ("gemma3", 3, 1e-2, {}),  # tied embeddings
        ("olmo2", 1, 0.0, {}),  # blocks are given rotary angles in float32
        ("gemma3", 1, 1e-2, {"activation_checkpointing": "full", "converters": ("fused_loss",)}),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_bits_are_those_of_fully_shard(
    world: Ranks,
    folders: dict[str, str],
    family: str,
    accumulation: int,
    max_grad_norm: float,
    changes: dict[str, Any],
    weighted: bool,
) -> None:
    plan, config = tiny_plan(folders[family], **{**BFLOAT16, **changes}), tiny_run(folders[family])
    runs = [
        world.run(TRAIN, plan, config, steps(accumulation, weighted), max_grad_norm, way, world_size=1)[0]
        for way in (False, True)
    ]
    copied, sharded = runs
    for key in ("losses", "norms", "evaluations"):
        assert copied[key] == sharded[key], key
    assert copied["losses"][-1] < copied["losses"][0] and copied["evaluations"][-1] < copied["evaluations"][0]
    assert copied["weights"].keys() == sharded["weights"].keys()
    for name, weight in sharded["weights"].items():
        assert np.array_equal(copied["weights"][name], weight), name
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(copied["logits"], sharded["logits"], strict=True))


def test_masters_stand_in_the_model_whenever_nothing_is_computed(folders: dict[str, str]) -> None:
    engine = start(folders["gemma3"])
    masters = dict(engine.model.named_parameters())
    assert {p.dtype for p in masters.values()} == {torch.float32}

    def same() -> bool:
        now = dict(engine.model.named_parameters())
        return now.keys() == masters.keys() and all(now[name] is masters[name] for name in masters)

    loss = engine.forward(pack(documents(0, 12)))["lm"][0]
    assert same()  # before the backward pass too
    loss.backward()
    assert same() and all(p.grad is not None and p.grad.dtype == torch.float32 for p in masters.values())
    assert engine.logits(pack(documents(0, 12))).dtype == torch.bfloat16 and same()
    buffers = {name: b.dtype for name, b in engine.model.named_buffers()}
    assert all(dtype == torch.float32 for name, dtype in buffers.items() if "inv_freq" in name) and buffers


def test_gradients_of_micro_batches_add_up_in_float32(folders: dict[str, str]) -> None:
    engine = start(folders["llama"])
    parts = []
    for seed in range(3):
        backward(engine, seed)
        parts.append({name: p.grad.clone() for name, p in engine.model.named_parameters()})
        engine.model.zero_grad()
    for seed in range(3):
        backward(engine, seed)
    for name, p in engine.model.named_parameters():
        assert torch.equal(p.grad, parts[0][name] + parts[1][name] + parts[2][name]), name


@pytest.mark.parametrize("bumps_versions", [True, False])
def test_the_copy_follows_every_change_of_the_masters(folders: dict[str, str], bumps_versions: bool) -> None:
    """Fused and 8-bit optimizers write weights without raising their versions."""
    engine, batch = start(folders["llama"]), pack(documents(0, 12))
    before = engine.logits(batch)
    backward(engine)
    for parameter in engine.model.parameters():
        target = parameter.detach() if bumps_versions else parameter.data
        target.mul_(0.5)
    after = engine.logits(batch)
    assert not torch.equal(before, after)
    for parameter in engine.model.parameters():
        parameter.detach().mul_(2)
    assert torch.equal(engine.logits(batch), before)


def test_the_copy_is_not_made_again_between_micro_batches(folders: dict[str, str]) -> None:
    engine = start(folders["llama"])
    backward(engine, last=False)
    versions = [p._version for p in engine._copy._copies]
    backward(engine, last=False)
    backward(engine)
    assert [p._version for p in engine._copy._copies] == versions
    backward(engine)
    assert all(p._version > version for p, version in zip(engine._copy._copies, versions, strict=True))


def test_a_checkpoint_of_the_masters_comes_back(folders: dict[str, str], tmp_path: Path) -> None:
    engine, batch = start(folders["gemma3"]), pack(documents(0, 12))
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-2, fused=True)
    backward(engine)
    optimizer.step()
    optimizer.zero_grad()
    save_checkpoint(tmp_path / "step-1", engine.model, optimizer, {"step": 1}, rank=0, world_size=1)
    wanted, weights = engine.logits(batch), {name: weight.copy() for name, weight in weights_of(engine).items()}
    backward(engine)
    optimizer.step()
    assert not torch.equal(engine.logits(batch), wanted)
    load_checkpoint(tmp_path / "step-1", engine.model, optimizer)
    assert torch.equal(engine.logits(batch), wanted)
    assert all(np.array_equal(weight, weights[name]) for name, weight in weights_of(engine).items())


def test_a_failed_backward_pass_is_forgotten_by_the_next(folders: dict[str, str]) -> None:
    engine = start(folders["llama"], activation_checkpointing="full")
    masters = [id(p) for p in engine.model.parameters()]
    batch, block = pack(documents(0, 12)), next(iter(find_blocks(engine.model).values()))
    loss = engine.forward(batch)["lm"][0]

    def fail(*_: Any) -> None:
        raise RuntimeError("of no use")

    handle = block.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="of no use"):
        loss.backward()
    handle.remove()
    backward(engine)
    assert [id(p) for p in engine.model.parameters()] == masters


def test_generation_computes_with_the_copy(folders: dict[str, str]) -> None:
    engine, config = start(folders["llama"]), tiny_run(folders["llama"])
    assert engine.is_local
    plain = build(tiny_plan(folders["llama"]), config).model
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()

    class Spelled:
        def decode(self, ids: list[int], **_: Any) -> str:
            return " ".join(map(str, ids))

    dtypes = set()
    engine.model.lm_head.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    settings = GenerationSettings(max_new_tokens=8)
    answers = [complete(model, Spelled(), [[5, 9, 200, 31]], settings, [0])[0].text for model in (engine.model, plain)]
    assert answers[0] == answers[1] and dtypes == {torch.bfloat16}
    assert {p.dtype for p in engine.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_logits_of_images_are_computed_with_the_copy(tmp_path: Path, family: str) -> None:
    """They are no forward pass of the whole: tower, decoder and head are called one by one."""
    folder = str(write_tiny_multimodal(tmp_path / "model", family=family))
    parts = dict.fromkeys(("vision", "projector", "language"), "trained")
    engine, plain = start(folder, parts=parts), build(tiny_plan(folder, parts=parts), tiny_run(folder))
    for parameter in plain.model.parameters():
        parameter.data = parameter.data.bfloat16()
    batch = pack_images(family, [make_document(family, num, num, touching=True) for num in (1, 2, 0)])
    found, expected = engine.logits(batch), plain.logits(batch)
    assert found.dtype == expected.dtype == torch.bfloat16 and torch.equal(found, expected)
    assert {p.dtype for p in engine.model.parameters()} == {torch.float32}


class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self) -> Iterator[None]:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.ci
    @pytest.mark.parametrize(("family", "activation_checkpointing"), [("llama", "none"), ("gemma3", "full")])
    def test_blocks_of_a_kind_share_one_graph(
        self, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, family: str, activation_checkpointing: str
    ) -> None:
        graphs = []

        def count(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        monkeypatch.setattr(
            surgery,
            "compile_blocks",
            lambda model, **_: compile_blocks(model, dynamic=True, backend=count, fullgraph=True),
        )
        engine = start(folders[family], compile=True, activation_checkpointing=activation_checkpointing)
        optimizer = torch.optim.AdamW(engine.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
        for seed in range(4):
            backward(engine, seed)
            optimizer.step()
            assert len(graphs) == 1  # with masks, blocks with a window are of no other kind
        with torch.no_grad():
            engine.forward(pack(documents(1, 12, 7)))
        backward(engine, 5)
        assert len(graphs) == 2  # one more in evaluation
        assert all(torch.isfinite(p.grad).all() for p in engine.model.parameters())


class TestFusedAdamW:
    """Fused AdamW writes weights and their copy, and takes gradients as autograd left them."""

    @staticmethod
    def fuse(engine: NativeEngine, config: Any) -> FusedAdamW:
        copy = engine._copy
        assert copy is not None
        make = functools.partial(FusedAdamW, backend="eager", copies=copy.share_copies(), written=copy.mark_written)
        optimizer = make_optimizer(engine.model, config.optimizer, 1e-2, make_adamw=make)
        assert isinstance(optimizer, FusedAdamW)
        return optimizer

    @staticmethod
    def step(
        engine: NativeEngine, optimizer: torch.optim.Optimizer, number: int, accumulation: int, max_norm: float = 0.5
    ) -> StepSums:
        micros = [pack(documents(10 * number + micro, 9 + micro, 14)) for micro in range(accumulation)]
        engine.optimizer = optimizer
        work = StepWork(number, 0.0, 0, 0, 19, accumulation, {"lm": TermWeight(19, 19)}, micros)
        sums = compute_gradients(engine, work, seed=0, rank=0)
        engine.step(1e-2, max_norm=max_norm)
        return sums

    @pytest.mark.parametrize("accumulation", [1, 4])
    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_steps_are_those_of_torchs_adamw(self, folders: dict[str, str], family: str, accumulation: int) -> None:
        config = tiny_run(folders[family])
        ours, theirs = start(folders[family]), start(folders[family])
        optimizers = [self.fuse(ours, config), make_optimizer(theirs.model, config.optimizer, 1e-2)]
        before = {name: weight.copy() for name, weight in weights_of(ours).items()}
        for number in range(4):
            mine, other = (
                self.step(p, o, number, accumulation) for p, o in zip((ours, theirs), optimizers, strict=True)
            )
            if number == 0:  # widened or not, the same gradients: norm and loss differ in nothing
                assert torch.equal(mine.grad_norm, other.grad_norm) and torch.equal(mine.terms["lm"], other.terms["lm"])
            assert mine.terms["lm"].item() == pytest.approx(other.terms["lm"].item(), rel=1e-3)
        for (name, mine), other in zip(weights_of(ours).items(), weights_of(theirs).values(), strict=True):
            # last digits of weights flip roundings of the copy, and a gradient near zero moves its weight by a whole
            # step
            assert np.linalg.norm(mine - other) < 0.02 * np.linalg.norm(other - before[name]), name

    def test_one_step_differs_in_last_digits_only(self, folders: dict[str, str]) -> None:
        config = tiny_run(folders["llama"])
        ours, theirs = start(folders["llama"]), start(folders["llama"])
        optimizer, published = self.fuse(ours, config), make_optimizer(theirs.model, config.optimizer, 1e-2)
        self.step(ours, optimizer, 0, 1)
        self.step(theirs, published, 0, 1)
        for (name, mine), other in zip(weights_of(ours).items(), weights_of(theirs).values(), strict=True):
            np.testing.assert_allclose(mine, other, rtol=3e-7, atol=1e-8, err_msg=name)

    def test_a_single_gradient_is_not_widened_and_a_sum_is(self, folders: dict[str, str]) -> None:
        engine = start(folders["gemma3"])
        self.fuse(engine, tiny_run(folders["gemma3"]))
        backward(engine, 0)
        single = {name: p.grad for name, p in engine.model.named_parameters()}
        assert {grad.dtype for grad in single.values()} == {torch.bfloat16}
        wide = torch.stack([grad.double().square().sum() for grad in single.values()]).sum().sqrt()
        assert engine.gradient_norm().item() == pytest.approx(wide.item(), rel=1e-12)
        backward(engine, 1)  # nobody said that more would follow: still summed in float32
        summed = {name: p.grad for name, p in engine.model.named_parameters()}
        assert {grad.dtype for grad in summed.values()} == {torch.float32}
        engine.model.zero_grad()
        backward(engine, 1)
        assert all(
            torch.equal(summed[name], single[name].float() + p.grad) for name, p in engine.model.named_parameters()
        )

    def test_the_copy_is_the_optimizers_and_follows_what_is_loaded(
        self, folders: dict[str, str], tmp_path: Path
    ) -> None:
        engine = start(folders["gemma3"])
        optimizer, copy = self.fuse(engine, tiny_run(folders["gemma3"])), engine._copy
        assert copy is not None
        self.step(engine, optimizer, 0, 1)
        versions = [c._version for c in copy._copies]
        assert all(torch.equal(c, m.bfloat16()) for c, m in zip(copy._copies, copy._masters, strict=True))
        wanted = engine.logits(pack(documents(0, 12)))
        assert [c._version for c in copy._copies] == versions  # no cast
        save_checkpoint(tmp_path / "step-1", engine.model, optimizer, {"step": 1}, rank=0, world_size=1)
        self.step(engine, optimizer, 1, 1)
        assert not torch.equal(engine.logits(pack(documents(0, 12))), wanted)
        load_checkpoint(tmp_path / "step-1", engine.model, optimizer)
        assert torch.equal(engine.logits(pack(documents(0, 12))), wanted)

    def test_a_resumed_run_has_the_same_bits(self, folders: dict[str, str], tmp_path: Path) -> None:
        config = tiny_run(folders["llama"])
        whole, cut, resumed = (start(folders["llama"]) for _ in range(3))
        optimizers = [self.fuse(engine, config) for engine in (whole, cut, resumed)]
        for number in range(4):
            self.step(whole, optimizers[0], number, 1 + number % 2)
        for number in range(2):
            self.step(cut, optimizers[1], number, 1 + number % 2)
        save_checkpoint(tmp_path / "step-2", cut.model, optimizers[1], {"step": 2}, rank=0, world_size=1)
        load_checkpoint(tmp_path / "step-2", resumed.model, optimizers[2])
        for number in range(2, 4):
            self.step(resumed, optimizers[2], number, 1 + number % 2)
        assert all(
            np.array_equal(mine, other)
            for mine, other in zip(weights_of(whole).values(), weights_of(resumed).values(), strict=True)
        )

    def test_a_norm_that_is_no_number_is_seen(self, folders: dict[str, str]) -> None:
        engine = start(folders["llama"])
        optimizer = self.fuse(engine, tiny_run(folders["llama"]))
        next(iter(engine.model.parameters())).data.fill_(float("inf"))
        sums = self.step(engine, optimizer, 0, 1)
        assert not torch.isfinite(sums.grad_norm) or not torch.isfinite(sums.terms["lm"])
