"""Ranks that divide the experts train as one process does: loss, gradients, norm, and what is saved."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from manyhands.config.schema import OptimizerSection, RunConfig
from manyhands.planner.types import Plan
from tests.engine import strategy_ranks
from tests.engine.test_layouts import LAYOUTS, RAGGED, assert_equal_step, documents, merged
from tests.support.experts import expert_model
from tests.support.layouts import Documents, measure
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run
from tests.training.optimizer_ranks import cpu_kernels

# micro-batches x 4 ranks: in the second one a rank has no documents
STEP = [[*RAGGED[0], *RAGGED[1]], [*RAGGED[2], documents(6, [11, 4], 0.8), documents(7, [6], 1.0)]]
WAYS: dict[str, dict[str, Any]] = {
    "ddp, 2 of 2": {"strategy": "ddp", "world_size": 2, "expert_degree": 2},
    "ddp, 2 of 4": {"strategy": "ddp", "world_size": 4, "expert_degree": 2},
    "fsdp, 4 of 4": {"strategy": "fsdp", "world_size": 4, "expert_degree": 4, "activation_checkpointing": "full"},
    "fsdp, 2 of 4": {"strategy": "fsdp", "world_size": 4, "expert_degree": 2, "activation_checkpointing": "selective"},
    "hsdp, 2 of 4": {"strategy": "hsdp", "world_size": 4, "shard_degree": 2, "expert_degree": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("mixtures")
    for family in ("qwen3_moe", "gpt_oss"):
        expert_model(family).save_pretrained(root / family)
    expert_model("qwen3_moe", moe_intermediate_size=64).save_pretrained(root / "whole rows")
    return {path.name: str(path) for path in root.iterdir()}


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "full": ("qwen3_moe", "full", {}),
    "lora": ("qwen3_moe", "lora", {}),
    "dropout, not fused": ("qwen3_moe", "lora", {"target_modules": ["q_proj", "experts.down_proj"]}),
    "experts alone": ("qwen3_moe", "lora", {"target_modules": ["experts.gate_up_proj", "experts.down_proj"]}),
    "biases, full": ("gpt_oss", "full", {}),
    "biases, lora": ("gpt_oss", "lora", {}),
    "qlora": ("whole rows", "qlora", {}),
    "qlora, not fused": ("whole rows", "qlora", {"target_modules": ["q_proj", "experts.down_proj"]}),
}


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_the_step_of_one_process(world: Ranks, folders: dict[str, str], case: str) -> None:
    family, method, keys = CASES[case]
    config = tiny_run(folders[family], method, **keys)
    given: dict[str, Any] = {"folder": folders[family], "attention": "blockwise" if family == "gpt_oss" else "sdpa"}
    one = measure(tiny_plan(**given), config, merged(STEP))
    for way in WAYS.values() if case in ("full", "lora") else (WAYS["ddp, 2 of 2"], WAYS["fsdp, 2 of 4"]):
        size = way["world_size"]
        for found in world.run(LAYOUTS, tiny_plan(**given, **way), config, STEP, world_size=size):
            assert_equal_step(found, one, 3e-6)
            assert found["weights"].keys() == one["weights"].keys()
            assert all(value.tobytes() == found["weights"][name].tobytes() for name, value in one["weights"].items())


DIVIDED = {"world_size": 2, "expert_degree": 2, "compile": True}


def measure_compiled(*arguments: Any) -> tuple[dict[str, Any], int, list[str]]:
    """``measure`` on one rank, how many graphs it compiled, and at what their tracing ended. Nothing generates
    code: that would take most of the time.
    """
    compile_block = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(torch.nn.Module, "compile", compile_block):
        found = measure(*arguments)
    counters = torch._dynamo.utils.counters
    return found, counters["stats"]["unique_graphs"], list(counters["graph_break"])


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("method", "way"),
    [
        ("lora", {"strategy": "ddp"}),
        pytest.param("full", {"strategy": "fsdp", "activation_checkpointing": "full"}, marks=pytest.mark.slow),
    ],
    ids=["ddp", "fsdp"],
)
def test_the_step_of_compiled_blocks(world: Ranks, folders: dict[str, str], method: str, way: dict[str, Any]) -> None:
    """Blocks are compiled but for the exchange of tokens and what is computed on those that arrive."""
    config, folder = tiny_run(folders["qwen3_moe"], method), folders["qwen3_moe"]
    one = measure(tiny_plan(folder), config, merged(STEP))
    place, plan = f"{measure_compiled.__module__}:measure_compiled", tiny_plan(folder, **way, **DIVIDED)
    for found, num_graphs, breaks in world.run(place, plan, config, STEP, world_size=plan.layout.world_size):
        assert_equal_step(found, one, 3e-6)
        assert num_graphs >= 2 and len(breaks) == 1 and "_compute_divided" in breaks[0], (num_graphs, breaks)


def measure_faulty(plan: Plan, config: RunConfig, layout: list[list[Documents]], fault: str) -> dict[str, Any]:
    """``measure`` on one rank with a planted mistake."""
    from manyhands.convert import experts as dispatch
    from manyhands.core.holding import local
    from manyhands.engine.experts import DividedExperts
    from manyhands.engine.native import NativeEngine

    exchange, reduce, degree = dispatch._exchange, DividedExperts.reduce_gradients, plan.layout.expert_degree

    def scale(divided: DividedExperts) -> None:
        reduce(divided)
        factor = degree if fault == "times the ranks" else degree / plan.layout.world_size
        for parameter in divided.parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)

    patches: dict[str, Any] = {
        "order": mock.patch.object(dispatch, "_exchange", lambda rows, *others: exchange(rows.roll(1, 0), *others)),
        "times the ranks": mock.patch.object(DividedExperts, "reduce_gradients", scale),
        "mean over groups": mock.patch.object(DividedExperts, "reduce_gradients", scale),
        "groups left out": mock.patch.object(DividedExperts, "reduce_gradients", lambda _: None),
        "norm of one rank": mock.patch.object(
            NativeEngine, "_sum_squares", lambda engine, norms, group: sum(norm.square() for norm in norms)
        ),
    }
    with patches[fault]:
        return measure(plan, config, layout)


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize(
    "fault", ["order", "times the ranks", "mean over groups", "groups left out", "norm of one rank"]
)
def test_a_planted_mistake_is_seen(world: Ranks, folders: dict[str, str], fault: str) -> None:
    folder, config, way = folders["qwen3_moe"], tiny_run(folders["qwen3_moe"]), WAYS["ddp, 2 of 4"]
    one = measure(tiny_plan(folder), config, merged(STEP))
    place = f"{measure_faulty.__module__}:measure_faulty"
    for found in world.run(place, tiny_plan(folder, **way), config, STEP, fault, world_size=4):
        with pytest.raises(AssertionError):
            assert_equal_step(found, one, 3e-6)


def run_steps(*arguments: Any) -> list[tuple[float, float]]:
    with cpu_kernels():
        return strategy_ranks.run_steps(*arguments)


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("method", "optimizer", "near"), [("full", "adamw", 2e-4), ("lora", "adamw", 2e-4), ("full", "adamw_8bit", 2e-4)]
)
def test_a_run_goes_on_and_is_saved_alike(
    world: Ranks, folders: dict[str, str], tmp_path: Path, method: str, optimizer: str, near: float
) -> None:
    """Steps of AdamW, a checkpoint, and the same files from it whichever ranks hold the experts."""
    folder, config = folders["qwen3_moe"], tiny_run(folders["qwen3_moe"], method)
    config = config.model_copy(update={"optimizer": OptimizerSection(name=optimizer)})
    ways = {"single": {"world_size": 1}, "fsdp": {"strategy": "fsdp", "world_size": 2}, "ep": WAYS["fsdp, 4 of 4"]}
    ways["ep, copies"] = WAYS["ddp, 2 of 2"]

    def steps(way: str, num_steps: int, *folders: Path | None) -> list[tuple[float, float]]:
        plan, size = tiny_plan(folder, **ways[way]), ways[way]["world_size"]
        step = merged(STEP) if size == 1 else STEP
        return world.run(f"{run_steps.__module__}:run_steps", plan, config, step, num_steps, *folders, world_size=size)[
            0
        ]

    whole = steps("single", 4)
    for way, others in (("single", ["ep", "ep, copies"]), ("ep", ["single", "fsdp"]), ("ep, copies", ["ep"])):
        saved = tmp_path / way / "step-000002"
        np.testing.assert_allclose(steps(way, 2, None, saved), whole[:2], rtol=1e-5)
        for other in others:
            np.testing.assert_allclose(steps(other, 2, saved), whole[2:], rtol=near, err_msg=f"{way}, then {other}")
    for way in ("single", "ep"):
        steps(way, 0, tmp_path / "ep" / "step-000002", None, tmp_path / f"model of {way}")
    files = [sorted((tmp_path / f"model of {way}").glob("*.safetensors")) for way in ("single", "ep")]
    assert files[0] and [x.read_bytes() for x in files[0]] == [x.read_bytes() for x in files[1]]
