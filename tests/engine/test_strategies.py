"""Hybrid sharding, selective recomputation and offloading: the same step, fewer bytes, and checkpoints that fit any
layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from manyhands.facts.model import read_model_facts
from manyhands.planner.memory.terms import gathered
from tests.engine.strategy_ranks import run_steps
from tests.engine.test_layouts import RAGGED, assert_equal_step, documents, merged
from tests.support.layouts import measure
from tests.support.plans import make_input
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

pytestmark = pytest.mark.distributed
NUM_BLOCKS = 2
EMBEDDINGS = "model.embed_tokens.weight"
MEASURE = "tests.support.layouts:measure"
RANKS = "tests.engine.strategy_ranks"
HYBRID = {"strategy": "hsdp", "world_size": 4, "shard_degree": 2}
WAYS: dict[str, dict[str, Any]] = {
    "hsdp": HYBRID,
    "hsdp, reduced once": HYBRID | {"reduce_every": False},
    "hsdp, offloaded": HYBRID | {"offload": "all", "reshard_after_forward": True},
    "fsdp, reduced once": {"strategy": "fsdp", "world_size": 2, "reduce_every": False},
    "fsdp, offloaded": {"strategy": "fsdp", "world_size": 2, "offload": "all"},
    "fsdp, selective": {"strategy": "fsdp", "world_size": 2, "activation_checkpointing": "selective"},
    "fsdp, full, one layer selective": {
        "strategy": "fsdp",
        "world_size": 2,
        "activation_checkpointing": "full",
        "lighter_layers": 1,
    },
    "ddp, selective, one kept": {
        "strategy": "ddp",
        "world_size": 2,
        "activation_checkpointing": "selective",
        "lighter_layers": 1,
    },
    "fsdp, full, activations offloaded": {
        "strategy": "fsdp",
        "world_size": 2,
        "activation_checkpointing": "full",
        "offload_activations": True,
    },
    "ddp, selective, activations offloaded": {
        "strategy": "ddp",
        "world_size": 2,
        "activation_checkpointing": "selective",
        "offload_activations": True,
    },
}
APART = {"strategy": "fsdp", "world_size": 2, "embeddings_apart": True}
METHODS = ["full", "lora", "qlora"]
# QLoRA is LoRA on weights in NF4; a cell of tests/matrix has LoRA in hybrid shards, saved, resumed and exported.
SHARDED_METHODS = ["full", pytest.param("lora", marks=pytest.mark.slow), "qlora"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = tmp_path_factory.mktemp("models")
    return str(write_tiny_model(model, "llama", with_tokenizer=False, num_hidden_layers=NUM_BLOCKS))


def run(folder: str, method: str, **keys: Any) -> Any:
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    return tiny_run(folder, method, **keys)


@pytest.mark.ci
@pytest.mark.parametrize("method", SHARDED_METHODS)
def test_every_way_gives_the_step_of_one_process(world: Ranks, folder: str, method: str) -> None:
    config = run(folder, method)
    one = measure(tiny_plan(folder), config, merged(RAGGED))
    for name, keys in WAYS.items():
        plan = tiny_plan(folder, **keys)
        for result in world.run(MEASURE, plan, config, RAGGED, world_size=plan.layout.world_size):
            assert_equal_step(result, one, 3e-6)
            assert np.array_equal(result["logits"], result["logits_after"]), name


@pytest.mark.parametrize("method", METHODS)
def test_what_is_recomputed_or_offloaded_changes_no_bit(world: Ranks, folder: str, method: str) -> None:
    config = run(folder, method)
    layout = merged(RAGGED)

    def gradients(**keys: Any) -> dict[str, np.ndarray]:
        return world.run(MEASURE, tiny_plan(folder, **keys), config, layout, world_size=1)[0]["gradients"]

    plain = gradients()
    for keys in (
        {"activation_checkpointing": "selective"},
        {"offload_activations": True},
        {"offload_activations": True, "activation_checkpointing": "full", "layers_on_device": 1},
        {"offload_activations": True, "activation_checkpointing": "full", "layers_on_device": 1, "lighter_layers": 1},
        {"offload": "all"},
    ):
        found = gradients(**keys)
        assert all(np.array_equal(found[name], plain[name]) for name in plain), keys


@pytest.mark.ci
def test_bfloat16_is_the_same_hybrid_offloaded_and_sharded(world: Ranks, folder: str) -> None:
    micro = [[documents(seed, [5, 11], 0.7) for seed in range(4)]]
    keys = {"world_size": 4, "compute_dtype": "bfloat16", "frozen_dtype": "bfloat16"}
    ways = [
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "offload": "all"},
        HYBRID,
        HYBRID | {"activation_checkpointing": "selective"},
    ]
    results = [
        world.run(MEASURE, tiny_plan(folder, **(keys | way)), tiny_run(folder), micro, world_size=4)[0] for way in ways
    ]
    for result in results[1:]:
        assert result["loss"] == results[0]["loss"]
        assert result["norm"] == pytest.approx(results[0]["norm"], rel=1e-7)


@pytest.mark.ci
@pytest.mark.parametrize("method", SHARDED_METHODS)
def test_hybrid_saves_resumes_elsewhere_and_exports(world: Ranks, folder: str, method: str, tmp_path: Path) -> None:
    config = run(folder, method)
    whole = run_steps(tiny_plan(folder), config, merged(RAGGED), 4)
    saved, exported = tmp_path / "step-000002", tmp_path / "model"
    first = world.run(
        f"{RANKS}:run_steps", tiny_plan(folder, **HYBRID), config, RAGGED, 2, None, saved, exported, world_size=4
    )[3]
    np.testing.assert_allclose(first, whole[:2], rtol=1e-5)
    others = [
        {"strategy": "fsdp", "world_size": 2},
        HYBRID,
        {"strategy": "single", "offload": "optimizer", "world_size": 1},
    ]
    for keys in others:
        plan = tiny_plan(folder, **keys)
        rest = world.run(f"{RANKS}:run_steps", plan, config, RAGGED, 2, saved, world_size=plan.layout.world_size)[0]
        np.testing.assert_allclose(rest, whole[2:], rtol=2e-4)
    run_steps(tiny_plan(folder), config, merged(RAGGED), 2, export=tmp_path / "single")
    ours, theirs = (load_file(path / "model.safetensors") for path in (exported, tmp_path / "single"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-3)


@pytest.mark.ci
@pytest.mark.parametrize(
    "way", [{"strategy": "fsdp", "world_size": 2}, {"strategy": "single", "world_size": 1}, HYBRID]
)
def test_offloaded_states_take_the_same_steps_and_are_saved(
    world: Ranks, folder: str, way: dict[str, Any], tmp_path: Path
) -> None:
    def steps(offload: str, num_steps: int, *folders: Path | None) -> list[tuple[float, float]]:
        plan = tiny_plan(folder, **way, offload=offload)
        return world.run(
            f"{RANKS}:run_steps", plan, tiny_run(folder), RAGGED, num_steps, *folders, world_size=plan.layout.world_size
        )[0]

    plain = steps("none", 4)
    for offload in ("optimizer", "all"):
        saved = tmp_path / offload / "step-000002"
        assert steps(offload, 2, None, saved) == plain[:2]
        assert steps(offload, 2, saved) == plain[2:]
        assert steps("none", 2, saved) == plain[2:]


def test_frozen_units_cost_no_gradient_no_state_and_no_reduction(world: Ranks, folder: str) -> None:
    """Adapters in the first block alone: of all blocks and the root one unit is reduced, once a micro-batch or once a
    step.
    """
    config = tiny_run(folder, "lora", target_modules=["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"])
    for keys, expected in (({}, len(RAGGED)), ({"reduce_every": False}, 1)):
        plan = tiny_plan(folder, strategy="fsdp", world_size=2, **keys)
        for found in world.run(f"{RANKS}:count_reductions", plan, config, RAGGED, world_size=2):
            assert found["count"] == expected
            assert found["gradients"] == found["trained"] and len(found["trained"]) == found["states"] == 4
    ddp = world.run(
        f"{RANKS}:count_reductions", tiny_plan(folder, strategy="ddp", world_size=2), config, RAGGED, world_size=2
    )[0]
    assert ddp["gradients"] == ddp["trained"]


def test_shards_are_reduced_once_a_step_where_the_plan_says_so(world: Ranks, folder: str) -> None:
    counts = []
    for reduce_every in (True, False):
        plan = tiny_plan(folder, strategy="fsdp", world_size=2, reduce_every=reduce_every)
        counts.append(world.run(f"{RANKS}:count_reductions", plan, tiny_run(folder), RAGGED, world_size=2)[0]["count"])
    num_units = NUM_BLOCKS + 1  # and the root
    assert counts == [num_units * len(RAGGED), num_units]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    changes = {"num_hidden_layers": NUM_BLOCKS, "tie_word_embeddings": False}
    return str(write_tiny_model(tmp_path_factory.mktemp("untied"), "llama", with_tokenizer=False, **changes))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_embeddings_apart_give_the_step_of_one_process(world: Ranks, untied: str, method: str) -> None:
    config = tiny_run(untied, method)
    one = measure(tiny_plan(untied), config, merged(RAGGED))
    for keys in ({}, {"reduce_every": False}, {"offload": "all", "reshard_after_forward": True}):
        for result in world.run(MEASURE, tiny_plan(untied, **APART, **keys), config, RAGGED, world_size=2):
            assert_equal_step(result, one, 3e-6)
            assert np.array_equal(result["logits"], result["logits_after"])


def test_embeddings_apart_are_drawn_as_by_one_process(world: Ranks, untied: str) -> None:
    config = tiny_run(untied)
    config = config.model_copy(update={"model": config.model.model_copy(update={"init": "random"})})
    one = measure(tiny_plan(untied), config, merged(RAGGED))
    for result in world.run(MEASURE, tiny_plan(untied, **APART), config, RAGGED, world_size=2):
        assert_equal_step(result, one, 3e-6)


def test_embeddings_apart_are_whole_only_while_tokens_are_looked_up(world: Ranks, untied: str, folder: str) -> None:
    """The bytes of whole weights, after the last block's forward pass and before its backward pass, are the plan's."""
    for model, apart, are_held in (
        (untied, True, False),
        (untied, False, True),
        (folder, True, True),
    ):  # the last: tied
        plan = tiny_plan(model, **APART | {"embeddings_apart": apart}, reshard_after_forward=False)
        planned = gathered(make_input(read_model_facts(Path(model), "tiny", "random"), layout=plan.layout))
        for found in world.run(f"{RANKS}:whole_weights", plan, tiny_run(model), RAGGED[0], world_size=2):
            assert [sum(weights.values()) for weights in found] == [planned, planned]
            assert [EMBEDDINGS in weights for weights in found] == [are_held, are_held]


def test_embeddings_apart_are_saved_as_any_layout_loads_them(world: Ranks, untied: str, tmp_path: Path) -> None:
    config, saved = tiny_run(untied), tmp_path / "step-000002"
    whole = run_steps(tiny_plan(untied), config, merged(RAGGED), 4)
    first = world.run(f"{RANKS}:run_steps", tiny_plan(untied, **APART), config, RAGGED, 2, None, saved, world_size=2)
    np.testing.assert_allclose(first[0], whole[:2], rtol=1e-5)
    for keys in (APART, APART | {"embeddings_apart": False}, {"strategy": "single", "world_size": 1}):
        plan = tiny_plan(untied, **keys)
        rest = world.run(f"{RANKS}:run_steps", plan, config, RAGGED, 2, saved, world_size=plan.layout.world_size)[0]
        np.testing.assert_allclose(rest, whole[2:], rtol=2e-4)
