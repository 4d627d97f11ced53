"""Shards in host memory on one rank: the next block's weights come while one computes, gradients are measured before
they leave, and no number changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manyhands.core.limits import UPDATE_HELD_BYTES
from tests.engine.test_layouts import documents
from tests.support.ranks import Ranks, ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

MEASURE = "tests.engine.host_shards_ranks:measure"
OFFLOADED = {"strategy": "single", "offload": "all", "reshard_after_forward": True}
ONE = [documents(1, [5, 20, 3], 0.7)]
SEVERAL = [*ONE, documents(2, [30], 1.0), documents(3, [9, 9], 0.5)]
NARROW = {"compute_dtype": "bfloat16", "master_dtype": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "recomputed": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "cast": {"compute_dtype": "bfloat16"},
    "kept": {"reshard_after_forward": False},
    "activations too": {"activation_checkpointing": "full", "offload_activations": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models"), "llama", with_tokenizer=False))


def assert_same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["losses"] == plain["losses"] and found["evaluated"] == plain["evaluated"]
    for ours, theirs in zip(found["gradients"], plain["gradients"], strict=True):
        assert ours.keys() == theirs.keys() and len(theirs) > 0
        assert all(np.array_equal(ours[name], gradient) for name, gradient in theirs.items())
    assert found["norms"] == pytest.approx(plain["norms"], rel=1e-12)
    for name, weight in plain["weights"].items():  # clipped by norms that differ in float64's last digits
        np.testing.assert_allclose(found["weights"][name], weight, rtol=1e-6, atol=1e-8, err_msg=name)


def both(
    world: Ranks, folder: str, method: str, keys: dict[str, Any], micro_batches: list[Any], *frozen: int
) -> dict[str, Any]:
    plan, config = tiny_plan(folder, **{**OFFLOADED, **keys}), tiny_run(folder, method)
    found, plain = (
        world.run(MEASURE, plan, config, micro_batches, overlap, frozen, world_size=1)[0] for overlap in (True, False)
    )
    assert_same(found, plain)
    return found


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("micro_batches", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_but_the_order_of_copies_changes(
    world: Ranks, folder: str, case: str, method: str, micro_batches: list[Any]
) -> None:
    found = both(world, folder, method, CASES[case], micro_batches)
    assert found["taken"] == [len(micro_batches) == 1] * 2
    if case != "kept":
        assert max(len(gathered) for _, _, gathered in found["events"]) == 2


@pytest.mark.distributed
@pytest.mark.parametrize("activation_checkpointing", ["none", "full", "selective"])
def test_each_block_is_fetched_once_a_pass_while_the_one_before_computes(
    world: Ranks, folder: str, activation_checkpointing: str
) -> None:
    found = both(world, folder, "full", {"activation_checkpointing": activation_checkpointing}, ONE)
    fetched = [index for what, index, _ in found["events"] if what == "fetch"]
    assert fetched == 2 * [0, 1, 2, 2, 1, 0, *(0, 1, 2)]  # the last three in an evaluation
    forward = [("fetch", 0, (0,)), ("fetch", 1, (0, 1)), ("forward", 0, (0, 1))]
    forward += [("fetch", 2, (1, 2)), ("forward", 1, (1, 2)), ("forward", 2, (2,))]
    assert found["events"][:6] == forward
    backward = [event for event in found["events"][6:] if event[0] != "forward"][:6]  # without what is computed again
    assert backward == [
        *[("fetch", 2, (2,)), ("fetch", 1, (1, 2)), ("backward", 2, (1, 2))],
        *[("fetch", 0, (0, 1)), ("backward", 1, (0, 1)), ("backward", 0, (0,))],
    ]


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize(
    "activation_checkpointing",
    [pytest.param("none", marks=pytest.mark.slow), pytest.param("full", marks=pytest.mark.slow), "selective"],
)
def test_compiled_blocks_are_prefetched_too(world: Ranks, folder: str, activation_checkpointing: str) -> None:
    keys = {"activation_checkpointing": activation_checkpointing, "compile": True}
    found = both(world, folder, "full", keys, SEVERAL)
    fetched = [index for what, index, _ in found["events"] if what == "fetch"]
    assert fetched == 2 * ([0, 1, 2, 2, 1, 0] * len(SEVERAL) + [0, 1, 2])


@pytest.mark.distributed
def test_blocks_without_a_backward_pass_are_not_fetched_for_one(world: Ranks, folder: str) -> None:
    found = both(world, folder, "full", {}, ONE, 0, 1)
    fetched = [index for what, index, _ in found["events"] if what == "fetch"]
    assert fetched == 2 * [0, 1, 2, 2, 0, 1, 2]


@pytest.mark.distributed
def test_tied_weights_have_one_norm(world: Ranks, tmp_path: Any) -> None:
    tied = str(write_tiny_model(tmp_path, "gemma3", with_tokenizer=False))
    assert both(world, tied, "full", {}, ONE)["taken"] == [True, True]


@pytest.mark.distributed
def test_what_was_fetched_and_not_used_does_not_outlive_an_update(world: Ranks, folder: str) -> None:
    arguments = tiny_plan(folder, **OFFLOADED), tiny_run(folder), ONE[0]
    plain, stale = world.run("tests.engine.host_shards_ranks:drop_and_refetch", *arguments, world_size=1)[0]
    assert stale == plain


@pytest.mark.distributed
def test_steps_with_masters_in_bfloat16_learn_the_same_bits(world: Ranks, folder: str) -> None:
    found = both(world, folder, "full", NARROW, ONE)
    assert found["taken"] == [True, True]


@pytest.mark.distributed
@pytest.mark.parametrize("activation_checkpointing", ["none", "full"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])  # the second's embeddings are its head too
def test_weights_updated_in_the_backward_pass_have_the_same_bits(
    world: Ranks, tmp_path: Any, model: str, activation_checkpointing: str
) -> None:
    """Two steps of one micro-batch, one of three, one more: only the third's gradients leave the device."""
    folder = str(write_tiny_model(tmp_path, model, with_tokenizer=False))
    keys = {**OFFLOADED, **NARROW, "activation_checkpointing": activation_checkpointing}
    plan, config = tiny_plan(folder, **keys), tiny_run(folder)
    steps = [ONE, ONE, SEVERAL, ONE]
    found, plain = (
        world.run("tests.engine.host_shards_ranks:update", plan, config, steps, in_backward, world_size=1)[0]
        for in_backward in (True, False)
    )
    everything = plain["num_trained"]
    assert found["left"] == [0, 0, everything, 0] and plain["left"] == [everything] * 4
    assert found["losses"] == plain["losses"] and found["norms"] == plain["norms"]
    assert found["copies"] == plain["copies"], "who copies the weights has them before they change"
    assert found["tensors"].keys() == plain["tensors"].keys()
    for name, tensor in plain["tensors"].items():
        np.testing.assert_array_equal(found["tensors"][name], tensor, err_msg=name)


def assert_same_blocks(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["losses"] == plain["losses"] and found["losses"][-1] < found["losses"][0]
    assert all(np.array_equal(*weights) for weights in zip(found["weights"], plain["weights"], strict=True))
    np.testing.assert_allclose(found["norms"], plain["norms"], rtol=1e-6)


@pytest.mark.distributed
def test_blocks_of_any_model_take_the_same_steps(world: Ranks) -> None:
    function = "tests.engine.host_shards_ranks:profile_blocks"
    assert_same_blocks(*(world.run(function, "cpu", 64, 32, overlap, world_size=1)[0] for overlap in (True, False)))


@pytest.mark.gpu
def test_on_a_gpu_copies_pass_while_blocks_compute_and_two_are_there_at_once() -> None:
    width, num_rows = 4096, 65536
    with ranks(1, device="cuda") as world:
        found, plain = (
            world.run("tests.engine.host_shards_ranks:profile_blocks", "cuda", width, num_rows, overlap, world_size=1)[
                0
            ]
            for overlap in (True, False)
        )
    assert_same_blocks(found, plain)
    assert plain["hidden"] < 0.1 and found["hidden"] > 0.7  # the first block of a forward pass waits: 1 of 12
    block = 2 * width * width * 2  # and its weights in float32, one after the other, before they are cast
    assert found["peak"] <= plain["peak"] + 3 * block


UPDATE_BLOCKS = "tests.engine.host_shards_ranks:update_blocks"


@pytest.mark.distributed
def test_blocks_of_any_model_are_updated_in_the_backward_pass(world: Ranks) -> None:
    assert_updated_alike(*(world.run(UPDATE_BLOCKS, "cpu", 64, 32, early, world_size=1)[0] for early in (True, False)))


def assert_updated_alike(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["losses"] == plain["losses"] and len(set(plain["losses"])) == 4
    assert all(np.array_equal(*tensors) for tensors in zip(found["tensors"], plain["tensors"], strict=True))


@pytest.mark.gpu
def test_on_a_gpu_updates_pass_beside_the_backward_pass_and_none_is_lost() -> None:
    """The bits of an update afterwards, in less time, and with no more than some gradients beside it."""
    width, num_rows = 4096, 65536
    with ranks(1, device="cuda") as world:
        found, plain = (
            world.run(UPDATE_BLOCKS, "cuda", width, num_rows, early, world_size=1)[0] for early in (True, False)
        )
    assert_updated_alike(found, plain)
    print({name: (run["seconds"], run["peak"]) for name, run in (("early", found), ("late", plain))})
    assert min(found["seconds"][2:]) < min(plain["seconds"][2:])
    assert found["peak"] <= plain["peak"] + UPDATE_HELD_BYTES
