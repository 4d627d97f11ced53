"""One step under every layout gives the loss and the gradients of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.layouts import measure
from tests.support.ranks import Ranks
from tests.support.tiny import FAMILIES, tiny_plan, tiny_run, write_tiny_models

LAYOUTS = "tests.support.layouts:measure"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_tiny_models(tmp_path_factory.mktemp("models"), *FAMILIES)


def documents(seed: int, lengths: list[int], trained: float) -> list[tuple[list[int], list[bool]]]:
    draw = np.random.default_rng(seed)
    return [(draw.integers(0, 256, n).tolist(), (draw.random(n) < trained).tolist()) for n in lengths]


# micro-batches x ranks: ragged, a rank without a trained token (documents, but no target), and one without documents
RAGGED = [
    [documents(1, [5, 20, 3], 0.7), documents(2, [30], 1.0)],
    [documents(3, [9, 9], 0.5), documents(4, [12], 0.0)],
    [documents(5, [17, 2], 1.0), []],
]


def assert_equal_step(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert found["norm"] == pytest.approx(expected["norm"], rel=tolerance)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(
            found["gradients"][name], gradient, rtol=0, atol=tolerance * max(scale, 1e-12), err_msg=name
        )


def merged(layout: list) -> list:
    """The same documents for one rank and one micro-batch."""
    return [[[document for micro in layout for part in micro for document in part]]]


WAYS = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp-keep-recompute": {"strategy": "fsdp", "reshard_after_forward": False, "activation_checkpointing": "full"},
    "ddp-tiles": {"strategy": "ddp", "activation_checkpointing": "full", "mlp_tile_tokens": 8},
    "fsdp-tiles": {
        "strategy": "fsdp",
        "reshard_after_forward": True,
        "activation_checkpointing": "full",
        "mlp_tile_tokens": 8,
        "offload_activations": True,
    },
}


@pytest.mark.distributed
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_world_give_the_step_of_one(world: Ranks, folders: dict[str, str], way: str, method: str) -> None:
    folder, config = folders["llama"], tiny_run(folders["llama"], method)
    one = measure(tiny_plan(folder), config, merged(RAGGED))
    plan = tiny_plan(folder, world_size=2, **WAYS[way])
    for result in world.run(LAYOUTS, plan, config, RAGGED, world_size=2):
        assert_equal_step(result, one, 2e-6)
        np.testing.assert_allclose(result["logits"], result["logits_after"], atol=0)


@pytest.mark.distributed
def test_sharded_weights_and_logits_are_those_of_one_process(world: Ranks, folders: dict[str, str]) -> None:
    for family in FAMILIES:
        config = tiny_run(folders[family])
        one = measure(tiny_plan(folders[family]), config, merged(RAGGED[:1]))
        two = world.run(
            LAYOUTS, tiny_plan(folders[family], world_size=2, strategy="fsdp"), config, RAGGED[:1], world_size=2
        )[1]
        assert_equal_step(two, one, 2e-6)
        assert one["weights"].keys() == two["weights"].keys()
        assert all(np.array_equal(one["weights"][name], two["weights"][name]) for name in one["weights"])


@pytest.mark.distributed
def test_random_weights_do_not_depend_on_the_sharding(world: Ranks, folders: dict[str, str]) -> None:
    config = tiny_run(folders["gemma3"]).model_copy(
        update={"model": tiny_run(folders["gemma3"]).model.model_copy(update={"init": "random"})}
    )
    one = measure(tiny_plan(folders["gemma3"]), config, merged(RAGGED[:1]))
    two = world.run(
        LAYOUTS, tiny_plan(folders["gemma3"], world_size=2, strategy="fsdp"), config, RAGGED[:1], world_size=2
    )[0]
    assert all(np.array_equal(one["weights"][name], two["weights"][name]) for name in one["weights"])
    assert np.abs(one["weights"]["model.embed_tokens.weight"]).max() > 0.1


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("method", ["full", "lora"])
def test_bfloat16_is_the_same_under_every_layout(world: Ranks, folders: dict[str, str], method: str) -> None:
    config = tiny_run(folders["llama"], method)
    dtypes = {"compute_dtype": "bfloat16", "frozen_dtype": "bfloat16"}

    def run(world_size: int, strategy: str) -> dict[str, Any]:
        plan = tiny_plan(folders["llama"], world_size=world_size, strategy=strategy, **dtypes)
        return world.run(LAYOUTS, plan, config, RAGGED, world_size=world_size)[0]

    one = run(1, "single")
    assert one["dtypes"] == {"torch.float32"}
    for strategy in ("ddp", "fsdp"):
        # one process runs both ranks' documents in one micro-batch: bfloat16 sums over positions differ by rounding
        assert_equal_step(run(2, strategy), one, 2e-2)
    ddp, fsdp = run(2, "ddp"), run(2, "fsdp")
    assert ddp["loss"] == fsdp["loss"]
    assert ddp["norm"] == pytest.approx(fsdp["norm"], rel=1e-7)


@pytest.mark.distributed
def test_freeing_the_bfloat16_copy_changes_nothing(world: Ranks, folders: dict[str, str]) -> None:
    config = tiny_run(folders["llama"], "full")
    kept, freed = (
        world.run(
            LAYOUTS,
            tiny_plan(folders["llama"], compute_dtype="bfloat16", reshard_after_forward=reshard),
            config,
            merged(RAGGED),
            world_size=1,
        )[0]
        for reshard in (False, True)
    )
    assert (kept["loss"], kept["norm"]) == (freed["loss"], freed["norm"])


@pytest.mark.distributed
def test_float64_agrees_to_its_last_digits(world: Ranks, folders: dict[str, str]) -> None:
    config = tiny_run(folders["qwen3"])
    dtypes = {"compute_dtype": "float64", "master_dtype": "float64", "frozen_dtype": "float64"}
    one = measure(tiny_plan(folders["qwen3"], **dtypes), config, merged(RAGGED))
    for strategy in ("ddp", "fsdp"):
        plan = tiny_plan(folders["qwen3"], world_size=2, strategy=strategy, **dtypes)
        assert_equal_step(world.run(LAYOUTS, plan, config, RAGGED, world_size=2)[0], one, 1e-12)
