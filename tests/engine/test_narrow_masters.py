"""Masters, gradients and states in bfloat16: one process and any layout learn the same, resume bit for bit, sum in
float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.narrow_ranks import train
from tests.engine.test_layouts import RAGGED, documents, merged
from tests.support.layouts import build, pack
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

TRAIN = "tests.engine.narrow_ranks:train"
NARROW = {"compute_dtype": "bfloat16", "master_dtype": "bfloat16", "strategy": "single", "reshard_after_forward": False}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "world_size": 2},
    "fsdp": {"strategy": "fsdp", "world_size": 2, "reshard_after_forward": True},
    "fsdp, reduced once": {"strategy": "fsdp", "world_size": 2, "reduce_every": False},
    "fsdp, offloaded": {"strategy": "fsdp", "world_size": 2, "reshard_after_forward": True, "offload": "all"},
    "hsdp": {"strategy": "hsdp", "world_size": 4, "shard_degree": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models"), "gemma3", with_tokenizer=False))  # tied embeddings


def test_one_process_holds_nothing_wider(folder: str) -> None:
    single = train(tiny_plan(folder, **NARROW), tiny_run(folder), merged(RAGGED)[:1], 6)
    assert single["dtypes"] == {"torch.bfloat16"} and single["gradients"] == {"torch.bfloat16"}
    assert single["losses"][-1] < 0.9 * single["losses"][0]


def test_micro_batches_are_summed_in_float32(folder: str) -> None:
    engine = build(tiny_plan(folder, **NARROW), tiny_run(folder))
    parts: list[dict[str, torch.Tensor]] = []
    for number in range(4):
        engine.backward(engine.forward(pack(documents(number, [12, 5 + number], 0.7)))["lm"][0], last=True)
        parts.append({name: p.grad for name, p in engine.model.named_parameters()})
        engine.model.zero_grad()
    for number in range(4):
        engine.backward(engine.forward(pack(documents(number, [12, 5 + number], 0.7)))["lm"][0], last=number == 3)
    for name, p in engine.model.named_parameters():
        assert parts[0][name].dtype == torch.bfloat16 and p.grad.dtype == torch.float32
        assert torch.equal(p.grad, sum(part[name].float() for part in parts)), name


@pytest.mark.distributed
@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_what_is_in_host_memory_learns_the_same_bits(world: Ranks, folder: str, offload: str) -> None:
    """One micro-batch a step, and several whose gradients are summed in float32 there."""
    config, plan = tiny_run(folder), tiny_plan(folder, **NARROW, offload=offload)
    assert plan.layout.wrapper == ("fully_shard" if offload == "all" else "none")
    for layout in (merged(RAGGED)[:1], merged(RAGGED)):
        plain = train(tiny_plan(folder, **NARROW), config, layout, 4)
        (moved,) = world.run(TRAIN, plan, config, layout, 4, world_size=1)
        assert moved["losses"] == plain["losses"] and moved["dtypes"] == {"torch.bfloat16"}
        assert all(np.array_equal(moved["weights"][name], weight) for name, weight in plain["weights"].items())


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("keys", [*WAYS.values(), {"offload": "all"}], ids=[*WAYS, "single, offloaded"])
def test_micro_batches_are_summed_in_float32_on_every_layout(world: Ranks, folder: str, keys: dict[str, Any]) -> None:
    """Thirty times one gradient of 8 significant bits is exact in float32; summed in bfloat16 it is not."""
    plan = tiny_plan(folder, **{**NARROW, **keys})
    arguments = (plan, tiny_run(folder), documents(1, [9, 14], 0.8), 30)
    found = world.run("tests.engine.narrow_ranks:sum_alike", *arguments, world_size=plan.layout.world_size)[0]
    for name, (one, many) in found.items():
        assert np.abs(one).max() > 0
        np.testing.assert_allclose(many, 30 * one, rtol=2**-8, err_msg=name)  # rounded once


def test_float32_masters_learn_the_same_within_rounding(folder: str) -> None:
    config = tiny_run(folder)
    narrow, wide = (
        train(tiny_plan(folder, **{**NARROW, "master_dtype": dtype}), config, merged(RAGGED), 10)
        for dtype in ("bfloat16", "float32")
    )
    assert wide["dtypes"] == {"torch.float32"}
    np.testing.assert_allclose(narrow["losses"], wide["losses"], rtol=0.02)


@pytest.mark.ci
@pytest.mark.distributed
def test_every_layout_learns_the_same(world: Ranks, folder: str) -> None:
    config = tiny_run(folder)
    one = train(tiny_plan(folder, **NARROW), config, merged(RAGGED), 5, learning_rate=1e-3)
    for name, keys in WAYS.items():
        plan = tiny_plan(folder, **{**NARROW, **keys})
        results = world.run(TRAIN, plan, config, RAGGED, 5, None, None, 1e-3, world_size=plan.layout.world_size)
        for result in results:
            assert result["dtypes"] == {"torch.bfloat16"}, name
            np.testing.assert_allclose(result["losses"], one["losses"], rtol=2e-3, err_msg=name)
            np.testing.assert_allclose(result["norms"], one["norms"], rtol=2e-2, err_msg=name)
            assert all(
                np.array_equal(results[0]["weights"][key], weight) for key, weight in result["weights"].items()
            ), name
        assert (max(results[0]["shares"]) < 1) == (plan.layout.strategy != "ddp"), name


@pytest.mark.distributed
def test_shards_are_rounded_as_the_whole_is(world: Ranks, folder: str) -> None:
    """One rank has all documents and the other none, so gradients are those of one process, and with them every bit."""
    config, layout = tiny_run(folder), [[documents(1, [9, 14], 0.8), []]]
    one = train(tiny_plan(folder, **NARROW), config, layout, 3)
    plan = tiny_plan(folder, **{**NARROW, **WAYS["fsdp"]})
    for result in world.run(TRAIN, plan, config, layout, 3, world_size=2):
        assert result["losses"] == one["losses"]
        assert all(np.array_equal(one["weights"][name], weight) for name, weight in result["weights"].items())


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("way", ["fsdp", "fsdp, offloaded"])
def test_a_resumed_run_has_the_same_bits_on_another_layout_too(
    world: Ranks, folder: str, tmp_path: Path, way: str
) -> None:
    config, layout = tiny_run(folder), [[documents(1, [9, 14], 0.8), []]]
    plan = tiny_plan(folder, **{**NARROW, **WAYS[way]})
    whole = train(tiny_plan(folder, **NARROW), config, layout, 4)
    world.run(TRAIN, plan, config, layout, 2, None, tmp_path / "step-2", world_size=2)
    resumed = train(tiny_plan(folder, **NARROW), config, layout, 2, tmp_path / "step-2")
    assert resumed["losses"] == whole["losses"][2:]
    assert all(np.array_equal(whole["weights"][name], weight) for name, weight in resumed["weights"].items())
    back = world.run(TRAIN, plan, config, layout, 2, tmp_path / "step-2", world_size=2)[0]
    assert back["losses"] == whole["losses"][2:]


@pytest.mark.ci
def test_steps_too_small_for_bfloat16_are_taken_on_average(folder: str) -> None:
    """At 1e-5 a step, weights near their own size of 0.02 have neighbours 6e-5 apart or more: 30 steps still lower the
    loss.
    """
    found = train(
        tiny_plan(folder, **NARROW), tiny_run(folder), [[documents(1, [30, 40], 1.0)]], 30, learning_rate=1e-5
    )
    wide = train(
        tiny_plan(folder, **{**NARROW, "master_dtype": "float32"}),
        tiny_run(folder),
        [[documents(1, [30, 40], 1.0)]],
        30,
        learning_rate=1e-5,
    )
    gained, wanted = (result["losses"][0] - result["losses"][-1] for result in (found, wide))
    assert wanted > 0 and 0.7 * wanted < gained < 1.3 * wanted
