"""Each term of the estimate against arithmetic by hand, on a Llama with hidden 8, inner 16, 2 blocks, 2 heads of 4,
vocabulary 32.
"""

from __future__ import annotations

import dataclasses
import math

import pytest

from manyhands.planner.layout import Mesh
from manyhands.planner.memory import terms as memory
from manyhands.planner.memory.activations import (
    block_at_work,
    block_bytes_per_token,
    head_parts,
    kept_bytes_per_token,
    moved_bytes,
)
from manyhands.planner.memory.input import EstimateInput
from tests.planner.examples import llama_8b, model_facts
from tests.support.plans import change_input, make_input

TINY = model_facts()
# a block: q 8x8, k and v 4x8, o 8x8, gate, up and down 16x8, two norms of 8
BLOCK = 64 + 32 + 32 + 64 + 3 * 128 + 16
ROOT = 32 * 8 + 8  # tied embeddings and the last norm
FULL = make_input(TINY)
LORA = change_input(FULL, num_adapter_parameters=1000)


def sharded(setup: EstimateInput, ranks: int, *, reshard_after_forward: bool) -> EstimateInput:
    return change_input(setup, strategy="fsdp", world_size=ranks, reshard_after_forward=reshard_after_forward)


def test_parameters_of_the_example():
    assert TINY.num_block_parameters == BLOCK == 592
    assert TINY.num_parameters == 2 * BLOCK + ROOT == 1448


def test_full_training_keeps_16_bytes_a_parameter_and_a_compute_copy():
    assert memory.weights(FULL) == 4 * 1448
    assert memory.gradients(FULL) == 4 * 1448
    assert memory.optimizer(FULL) == 8 * 1448
    assert memory.gathered(FULL) == 2 * 1448  # the copy beside the masters


def test_float32_training_in_one_process_has_no_copy():
    single = change_input(FULL, compute_dtype="float32")
    assert memory.gathered(single) == 0
    assert memory.weights(single) + memory.gradients(single) + memory.optimizer(single) == 16 * 1448


def test_fsdp_divides_states_by_ranks_and_holds_two_gathered_blocks_and_a_buffer():
    four = sharded(change_input(FULL, model=replace_layers(8)), 4, reshard_after_forward=True)
    parameters = 8 * BLOCK + ROOT
    assert memory.weights(four) == parameters
    assert memory.optimizer(four) == 2 * parameters
    assert memory.gathered(four) == 2 * (ROOT + 3 * BLOCK)
    assert memory.gathered(change_input(four, reshard_after_forward=False)) == 2 * (ROOT + 8 * BLOCK)


def test_embeddings_apart_are_one_unit_and_the_head_with_the_last_norm_another():
    """Neither gathered at a worst moment; gradients of one are reduced after the other's. Tied ones stay together."""
    untied = sharded(change_input(FULL, model=model_facts(layers=8, tied=False)), 2, reshard_after_forward=True)
    apart = change_input(untied, embeddings_apart=True)
    head, both = 32 * 8 + 8, 2 * 32 * 8 + 8
    assert [memory.gathered(s) for s in (untied, apart)] == [2 * (root + 3 * BLOCK) for root in (both, head)]
    assert [memory.root_reduction(s) for s in (untied, apart)] == [2 * both + 4 * root for root in (both, head)]
    frozen = change_input(apart, num_adapter_parameters=1000)
    assert memory.gathered(change_input(frozen, embeddings_apart=False)) - memory.gathered(frozen) == 2 * 32 * 8
    ddp = change_input(untied, strategy="ddp", world_size=2, compute_dtype="float32")
    for other in (sharded(FULL, 4, reshard_after_forward=True), ddp):
        assert memory.estimate_terms(change_input(other, embeddings_apart=True)) == memory.estimate_terms(other)


def replace_layers(layers: int):
    return model_facts(layers=layers)


def test_lora_keeps_frozen_weights_once_and_16_bytes_an_adapter_parameter():
    assert memory.weights(LORA) == 2 * 1448 + 4 * 1000
    assert memory.gradients(LORA) == 4 * 1000
    assert memory.optimizer(LORA) == 8 * 1000
    assert memory.gathered(LORA) == 0
    assert memory.reduction(LORA) == memory.root_reduction(LORA) == 0


def test_lora_on_two_ranks_shards_frozen_weights_only_with_fsdp():
    copy = change_input(LORA, strategy="ddp", world_size=2)
    assert memory.weights(copy) == memory.weights(LORA)
    assert memory.weights(sharded(LORA, 2, reshard_after_forward=True)) == memory.weights(LORA) // 2
    assert memory.gathered(sharded(LORA, 2, reshard_after_forward=False)) == 2 * 1448


def test_bytes_a_token_of_one_block():
    norms, linear_inputs = 2 * 2 * 8, 2 * 2 * 8
    attention = 2 * (8 + 4 + 4) + 2 * 8 + 4 * 2  # q, k, v; output; log-sum-exp of 2 heads
    mlp = 2 * 3 * 16
    assert block_bytes_per_token(FULL) == norms + linear_inputs + attention + mlp == 216
    # eager: norms in float32, their results again for the norms' own weights, and the activation's result
    assert block_bytes_per_token(change_input(FULL, compile=False)) == 216 + 2 * 2 * 8 + 2 * 2 * 8 + 2 * 16
    assert block_bytes_per_token(change_input(LORA, compile=False)) == 216 + 2 * 4 * 7 + 2 * 2 * 8 + 2 * 16
    # 7 layers' inner results of rank 4
    assert block_bytes_per_token(LORA) == 216 + 2 * 4 * 7
    dropped = 6 * 8 + 16  # inputs of six layers of width 8 and one of 16
    assert block_bytes_per_token(change_input(LORA, adapter_dropout=True)) == 216 + 2 * 4 * 7 + 3 * dropped
    # kernels for documents keep the queries once more
    assert block_bytes_per_token(change_input(FULL, mixed_lengths=True)) == 216 + 2 * 8
    scaled = 8 + 4 + 4 + 8 + 16 + 16 + 8  # results of the seven layers, which DoRA scales
    assert block_bytes_per_token(change_input(LORA, adapter_dora=True)) == 216 + 2 * 4 * 7 + 2 * scaled


GRADIENTS = 2 * 10 * 2 * 8 + 2 * 10 * 2 * 16  # of a block's result and the residual stream; of gate and up


def test_activations_kept_and_recomputed():
    recomputed = change_input(FULL, activation_checkpointing="full")
    assert memory.at_the_loss(FULL)["activations"] == 10 * 2 * 216 + 3 * 10 * 2 * 8
    assert memory.in_the_backward_pass(FULL)["activations"] == 10 * 2 * 216 + GRADIENTS
    assert memory.at_the_loss(recomputed)["activations"] == 2 * 10 * 2 * 8 + 3 * 10 * 2 * 8
    assert memory.in_the_backward_pass(recomputed)["activations"] == 10 * (2 * 8 + 216) + GRADIENTS, "the input once"
    assert memory.at_its_end(recomputed)["activations"] == 10 * 216 + GRADIENTS
    except_attention = change_input(recomputed, activation_checkpointing="except_attention")
    assert (
        memory.in_the_backward_pass(except_attention)["activations"]
        == 10 * (kept_bytes_per_token(except_attention, "except_attention") + 216) + GRADIENTS
    )


def test_mlps_by_tiles_need_a_tiles_room() -> None:
    """10 tokens, tiles of 8: 96 bytes a token of gate, up and product, and 64 of two gradients; 384 trained weights'
    sums in float32, beside one in bfloat16.
    """
    full, lora = (
        change_input(s, activation_checkpointing="full", mlp_tile_tokens=8, accumulates=False) for s in (FULL, LORA)
    )
    assert block_at_work(full, "full") == 10 * (216 - 16 + 32 - 96) + 8 * (96 + 64) + 6 * 384
    others = 10 * (216 + 56 - 16 + 32 - 96)
    assert block_at_work(lora, "full") == others + 8 * (96 + 64)
    # of tiles of 4 attention's gradients are more: of its result, and of q, k and v; on a GPU also dq in float32, and
    # keys' and values' of every query head, less the MLP's input
    gradients, kernel = 2 * (8 + 8 + 4 + 4), 4 * 8 + 2 * 2 * 8 - 2 * 8
    assert block_at_work(change_input(lora, mlp_tile_tokens=4), "full") == others + 10 * (gradients + kernel)
    whole = change_input(lora, mlp_tile_tokens=0)
    saved = block_at_work(whole, "full") - block_at_work(lora, "full")
    assert saved == 2 * (96 + 64)
    terms = [memory.in_the_backward_pass(s)["activations"] for s in (whole, lora)]
    assert terms[0] - terms[1] == saved and kept_bytes_per_token(lora, "full") == kept_bytes_per_token(whole, "full")


@pytest.mark.parametrize(
    ("length", "parts"), [(2**16, 1), (2**17, 1), (2**17 + 256, 2), (2**18, 2), (2**19, 4), (3 * 2**18, 8), (2**21, 8)]
)
def test_long_samples_need_the_workspace_of_a_part_of_the_heads(length: int, parts: int) -> None:
    """8B, 32 heads over 8 of 128 dimensions: 32 KiB a token, of which a part has its own, and its gradients of q, k
    and v twice.
    """
    long = make_input(llama_8b(), full_micro_tokens=length, pack_tokens=length, row_length=length, device="cuda")
    tiled = change_input(long, num_adapter_parameters=1000, mlp_tile_tokens=256, activation_checkpointing="full")
    together = change_input(tiled, row_length=None)
    assert (head_parts(tiled), head_parts(together)) == (parts, 1)
    spared = block_at_work(together, "full") - block_at_work(tiled, "full")
    twice = 2 * (4096 + 2 * 1024) if parts > 1 else 0
    twice += 2 * (3 * 4096 + 2 * 1024) if length * 4096 > 2**31 else 0  # a copy of a part's inputs
    assert spared == length * (2**15 - (2**15 + twice) // parts)


@pytest.mark.parametrize("change", [{"mixed_lengths": True}, {"builds_mask": True}, {"pack_tokens": None}])
def test_other_kernels_than_that_of_rows_take_all_heads_at_once(change: dict[str, bool | None]) -> None:
    long = make_input(llama_8b(), full_micro_tokens=2**20, pack_tokens=2**20, row_length=2**20)
    assert head_parts(long) == 8 and head_parts(change_input(long, **change)) == 1
    several = change_input(long, row_length=2**16)
    assert head_parts(several) == 1, "rows that are short each"


def test_gradients_are_there_while_activations_are_only_where_a_step_goes_on():
    """In one micro-batch gradients come as activations go; DDP's buckets are there all the time."""
    alone = change_input(LORA, accumulates=False)
    assert memory.at_the_loss(LORA)["gradients"] == 4000
    assert memory.at_the_loss(alone)["gradients"] == memory.in_the_backward_pass(alone)["gradients"] == 0
    assert memory.at_its_end(alone)["gradients"] == 4000
    assert memory.at_the_loss(change_input(alone, strategy="ddp", world_size=2))["gradients"] == 4000
    whole = change_input(sharded(LORA, 2, reshard_after_forward=False), reduce_every=False)
    assert memory.at_the_loss(whole)["unreduced"] == 4000
    assert memory.at_the_loss(change_input(whole, accumulates=False))["unreduced"] == 0


def test_the_worst_moment_is_estimated():
    long = change_input(FULL, full_micro_tokens=10**6)
    wide = change_input(
        FULL, full_micro_tokens=1, model=model_facts(vocab=10**7), reshard_after_forward=True, accumulates=False
    )
    assert memory.estimate_terms(long)["activations"] > 10**6 * 2 * 216
    assert memory.estimate_terms(wide)["reduction"] == (10**7 * 8 + 8) * 6  # the end, when the root is reduced
    for setup in (long, wide):
        moments = [memory.at_the_loss(setup), memory.in_the_backward_pass(setup), memory.at_its_end(setup)]
        standing = memory.weights(setup) + memory.optimizer(setup) + memory.gathered(setup)
        terms = memory.estimate_terms(setup)
        found = sum(terms.values()) - terms["overhead"] - terms["pools"]
        assert found == standing + max(sum(moment.values()) for moment in moments)


def test_attention_mask_is_square_and_only_where_built():
    assert memory.attention_mask(FULL) == 0
    assert memory.attention_mask(change_input(FULL, compute_dtype="float32", builds_mask=True)) == 100 * 5


def test_logits_are_held_a_chunk_at_a_time():
    assert memory.logits(LORA) == 10 * 32 * 10  # few tokens: all of them
    assert memory.logits(FULL) == 10 * 32 * 10 + 2 * 32 * 8 * 2  # and the head's gradient, summed over chunks
    wide = {"full_micro_tokens": 10**6, "model": model_facts(vocab=128256)}
    assert memory.logits(change_input(LORA, **wide)) == 2**27 // 128256 * 128256 * 10
    assert memory.logits(change_input(LORA, fuse_loss=True, **wide)) == 2**28 // 128256 * 128256 * 2
    head = 128256 * 8
    assert memory.logits(change_input(FULL, fuse_loss=True, **wide)) == 2**29 // 128256 * 128256 * 2 + 4 * head
    # one chunk needs no sum in float32; the gradient in compute dtype takes the place of few logits
    assert (
        memory.logits(change_input(FULL, fuse_loss=True, model=wide["model"], full_micro_tokens=4))
        == 2 * head + 2 * head
    )


def test_reduction_is_two_blocks_and_the_head_and_the_root_comes_last():
    freed = change_input(FULL, reshard_after_forward=True)
    assert memory.reduction(freed) == 2 * BLOCK * 6 + 32 * 8 * 2
    assert memory.root_reduction(freed) == (32 * 8 + 8) * 6


def test_gradients_of_a_kept_copy_are_one_block_and_the_head():
    assert memory.reduction(FULL) == BLOCK * 6 + 32 * 8 * 2  # tied: it waits for the embeddings
    untied = change_input(FULL, model=model_facts(tied=False))
    assert memory.reduction(untied) == BLOCK * 6 + 32 * 8 * 4
    assert memory.root_reduction(FULL) == 32 * 8 * 2
    assert memory.reduction(change_input(FULL, world_size=2, strategy="ddp")) == 2 * BLOCK * 6 + 32 * 8 * 2


def test_gradients_stay_in_the_copys_dtype_where_the_optimizer_takes_them():
    one_pass = change_input(FULL, accumulates=False, fuse_optimizer=True)
    assert memory.gradients(one_pass) == 2 * 1448
    assert memory.reduction(one_pass) == BLOCK * 2 + 32 * 8 * 2
    assert memory.gradients(change_input(one_pass, accumulates=True)) == 4 * 1448  # summed over micro-batches
    for without_copy in (
        change_input(one_pass, reshard_after_forward=True),
        change_input(one_pass, strategy="ddp", world_size=2),
        change_input(LORA, accumulates=False),
    ):
        assert memory.gradients(without_copy) == 4 * without_copy.num_trained


@pytest.mark.parametrize(
    ("activation_checkpointing", "compiled"),
    [
        ("selective", True),
        ("selective", False),
        ("none", True),
        ("none", False),
        ("full", True),
        ("except_attention", True),
        ("except_attention", False),
    ],
)
def test_what_moves_to_host_memory_is_what_blocks_keep(activation_checkpointing, compiled):
    """Eager and selective only the block's input, 8 values of 2 bytes: the rest is in the checkpoint's own cache."""
    setup = change_input(
        FULL, activation_checkpointing=activation_checkpointing, compile=compiled, offload_activations=True
    )
    kept = (
        2 * 8
        if activation_checkpointing in ("selective", "except_attention") and not compiled
        else kept_bytes_per_token(setup, activation_checkpointing)
    )
    assert moved_bytes(setup) == 10 * 2 * kept > 0
    assert (
        moved_bytes(change_input(setup, offload_activations=False))
        == moved_bytes(change_input(setup, device="cpu"))
        == 0
    )


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix():
    sides = 2 * ((8 + 8) + 2 * (4 + 8) + (8 + 8) + 3 * (16 + 8)) + (32 + 8)
    tied = change_input(FULL, optimizer_name="adafactor")
    assert memory.optimizer(tied) == 4 * sides  # vectors are not counted
    assert memory.optimizer(change_input(tied, model=model_facts(tied=False))) == 4 * (sides + 32 + 8)
    # adapters of rank 4: a side for each 4 elements, and 4 more for each of A and B, in 2 blocks of 7 layers
    assert memory.optimizer(change_input(LORA, optimizer_name="adafactor")) == 4 * (1000 // 4 + 2 * 4 * 2 * 7)


def test_overhead_counts_communication_only_between_ranks():
    alone = memory.overhead(FULL)
    assert alone == int(0.82 * 2**30) + 2**26
    assert memory.overhead(change_input(FULL, world_size=2, strategy="ddp")) == alone + int(0.76 * 2**30)


def test_each_stream_of_fully_shard_keeps_a_pool():
    """Gathering: the root's buffer. Reducing: gradients that are cast, which leave no room for the next steps'
    activations, and of replicas those of several micro-batches; others lie where activations have been. And of
    replicas the quotient of the largest unit's sums.
    """
    kept = sharded(FULL, 2, reshard_after_forward=False)
    two_blocks = 2 * 2 * BLOCK  # more than the root, with its shards in compute dtype
    assert memory.pools(kept, {"gradients": 0}) == two_blocks
    narrow = change_input(kept, master_dtype="bfloat16")
    shards = memory.gradients(narrow)
    assert memory.pools(narrow, {"gradients": 0}) == two_blocks + shards
    assert memory.pools(narrow, {"gradients": shards}) == two_blocks
    replicas = change_input(kept, mesh=Mesh(replicate=2), strategy="ddp", accumulates=False)
    assert replicas.layout.wrapper == "fully_shard" and memory.pools(replicas, {"gradients": 0}) == 4 * BLOCK
    several = change_input(replicas, accumulates=True)
    assert memory.pools(several, {"gradients": 0}) == memory.gradients(several) + 2 * 4 * BLOCK, "its earlier sum"
    wide = change_input(kept, model=model_facts(vocab=1000))
    assert memory.pools(wide, {"gradients": memory.gradients(wide)}) == 3 * (1000 * 8 + 8), (
        "the root, and its shards' cast"
    )
    three = change_input(kept, model=model_facts(layers=3), reshard_after_forward=True)
    freed = change_input(three, activation_checkpointing="full")
    gradients = {"gradients": memory.gradients(three)}
    assert memory.pools(freed, gradients) == two_blocks - 2 * BLOCK, "of two blocks one is counted as gathered"
    assert memory.pools(three, gradients) == two_blocks, "room between activations that stay"
    assert memory.pools(FULL, {"gradients": 0}) == 0
    together = change_input(kept, strategy="hsdp", world_size=4, shard_degree=2, reduce_every=False)
    assert memory.pools(together, {"gradients": 0}) == two_blocks, "reduced once, into the room of activations"


def test_of_gradients_in_host_memory_the_pool_that_reduces_keeps_the_largest_units_room():
    """Two blocks' of it are counted as on their way. A single rank reduces in the weights' own dtype."""
    wide = change_input(FULL, model=model_facts(vocab=1000), offload="all", device="cuda", reshard_after_forward=True)
    root, block = 1000 * 8 + 8, BLOCK
    assert memory.pools(wide, {"gradients": 0}) == 4 * root - 2 * 4 * block
    narrow = change_input(wide, master_dtype="bfloat16")
    assert narrow.layout.compute_copy == "none" and memory.pools(narrow, {"gradients": 0}) == 2 * (root - 2 * block)


def test_gradients_of_blocks_that_keep_less_than_one_leave_room_between_them():
    """Nothing up to half of a gradient; most at one; where blocks keep more, the loss is the worst moment."""
    sizes = [
        memory.gap_bytes(
            make_input(
                llama_8b(),
                strategy="fsdp",
                world_size=2,
                reshard_after_forward=True,
                full_micro_tokens=tokens,
                activation_checkpointing="selective",
                device="cuda",
                accumulates=False,
            )
        )
        for tokens in (1024, 2048, 4096, 8192, 16384)
    ]
    assert sizes == sorted(sizes) and sizes[0] == sizes[1] == 0 < sizes[2] <= sizes[3] == sizes[4]
    assert memory.gap_bytes(make_input(llama_8b(), full_micro_tokens=4096, device="cuda")) == 0


@pytest.mark.parametrize(
    ("setup", "worst"),
    [
        (FULL, "backward"),
        (LORA, "loss"),
        (sharded(FULL, 4, reshard_after_forward=True), "backward"),
        (sharded(LORA, 4, reshard_after_forward=False), "loss"),
        (change_input(FULL, full_micro_tokens=1, accumulates=False), "end"),
        (change_input(FULL, full_micro_tokens=1, accumulates=False, offload="all"), "backward"),  # gradients have left
    ],
)
def test_the_estimate_is_what_always_stands_and_the_worst_moment(setup, worst):
    terms = memory.estimate_terms(setup)
    moments = {
        name: sum(moment(setup).values()) - memory.gradients_on_host(setup, moment(setup))
        for name, moment in {
            "loss": memory.at_the_loss,
            "backward": memory.in_the_backward_pass,
            "end": memory.at_its_end,
        }.items()
    }
    assert max(moments, key=lambda name: moments[name]) == worst and all(size > 0 for size in moments.values())
    standing = memory.weights(setup) + memory.optimizer(setup) + memory.gathered(setup) + memory.fetched(setup)
    assert sum(terms.values()) - terms["overhead"] - terms["pools"] == standing + moments[worst]
    moving = sum(terms[name] for name in ("gathered", "dequantized", "activations", "logits", "reduction"))
    assert terms["overhead"] == memory.overhead(setup)
    share = 0.079 if setup.num_adapter_parameters else 0.015  # modules with adapters are not fused here
    assert terms["pools"] == memory.pools(setup, terms) + math.ceil(share * moving)
    fused = dataclasses.replace(setup, fuses_modules=True)
    assert memory.estimate_terms(fused)["pools"] == memory.pools(fused, terms) + math.ceil(0.015 * moving)
    assert all(isinstance(size, int) and size >= 0 for size in terms.values())


def test_rows_of_one_length_that_leave_padding_keep_the_result_of_attention_twice():
    plain = make_input(llama_8b(), pack_tokens=12416, row_length=None)
    padded, whole = change_input(plain, row_length=1540), change_input(plain, row_length=1552)
    assert block_bytes_per_token(padded) - block_bytes_per_token(plain) == 2 * 32 * 128
    assert block_bytes_per_token(whole) == block_bytes_per_token(plain)
