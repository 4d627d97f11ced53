"""Each term of the estimate against arithmetic by hand, on a Llama with hidden 8, inner 16, 2 blocks, 2 heads of 4, vocabulary 32."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyhands.plan import memory
from manyhands.plan.memory import Setup
from tests.plan.examples import model_facts

TINY = model_facts()
# a block: q 8x8, k and v 4x8, o 8x8, gate, up and down 16x8, two norms of 8
BLOCK = 64 + 32 + 32 + 64 + 3 * 128 + 16
ROOT = 32 * 8 + 8  # tied embeddings and the last norm
FULL = Setup(
    model=TINY, num_adapter_parameters=0, adapter_rank=4, adapter_dropout=False, device="cuda", world_size=1, strategy="one", reshard=False,
    recompute="none", compile=True, compute_bytes=2, master_bytes=4, frozen_bytes=2, micro_tokens=10, builds_mask=False,
)  # fmt: skip
LORA = replace(FULL, num_adapter_parameters=1000)


def sharded(setup: Setup, ranks: int, *, reshard: bool) -> Setup:
    return replace(setup, strategy="fsdp", world_size=ranks, reshard=reshard)


def test_parameters_of_the_example():
    assert TINY.num_block_parameters == BLOCK == 592
    assert TINY.num_parameters == 2 * BLOCK + ROOT == 1448


def test_full_training_keeps_16_bytes_a_parameter_and_a_compute_copy():
    assert memory.weights(FULL) == 4 * 1448
    assert memory.gradients(FULL) == 4 * 1448
    assert memory.optimizer(FULL) == 8 * 1448
    assert memory.gathered(FULL) == 2 * 1448  # the copy beside the masters


def test_float32_training_in_one_process_has_no_copy():
    single = replace(FULL, compute_bytes=4)
    assert memory.gathered(single) == 0
    assert memory.weights(single) + memory.gradients(single) + memory.optimizer(single) == 16 * 1448


def test_fsdp_divides_states_by_ranks_and_gathers_two_blocks():
    four = sharded(replace(FULL, model=replace_layers(8)), 4, reshard=True)
    parameters = 8 * BLOCK + ROOT
    assert memory.weights(four) == parameters
    assert memory.optimizer(four) == 2 * parameters
    assert memory.gathered(four) == 2 * (ROOT + 2 * BLOCK)
    assert memory.gathered(replace(four, reshard=False)) == 2 * (ROOT + 8 * BLOCK)


def replace_layers(layers: int):
    return model_facts(layers=layers)


def test_lora_keeps_frozen_weights_once_and_16_bytes_an_adapter_parameter():
    assert memory.weights(LORA) == 2 * 1448 + 4 * 1000
    assert memory.gradients(LORA) == 4 * 1000
    assert memory.optimizer(LORA) == 8 * 1000
    assert memory.gathered(LORA) == 0
    assert memory.reduction(LORA, passing=0) == 0


def test_lora_on_two_ranks_shards_frozen_weights_only_with_fsdp():
    copy = replace(LORA, strategy="ddp", world_size=2)
    assert memory.weights(copy) == memory.weights(LORA)
    assert memory.weights(sharded(LORA, 2, reshard=True)) == memory.weights(LORA) // 2
    assert memory.gathered(sharded(LORA, 2, reshard=False)) == 2 * 1448


def test_bytes_a_token_of_one_block():
    norms, linear_inputs = 2 * 2 * 8, 2 * 2 * 8
    attention = 2 * (8 + 4 + 4) + 2 * 8 + 4 * 2  # q, k, v; output; log-sum-exp of 2 heads
    mlp = 2 * 3 * 16
    assert memory.block_bytes_per_token(FULL) == norms + linear_inputs + attention + mlp == 216
    # eager: norms in float32, their results again for the norms' own weights, and the activation's result
    assert memory.block_bytes_per_token(replace(FULL, compile=False)) == 216 + 2 * 2 * 8 + 2 * 2 * 8 + 2 * 16
    assert memory.block_bytes_per_token(replace(LORA, compile=False)) == 216 + 2 * 4 * 7 + 2 * 2 * 8 + 2 * 16
    # 7 layers' inner results of rank 4
    assert memory.block_bytes_per_token(LORA) == 216 + 2 * 4 * 7
    dropped = 6 * 8 + 16  # inputs of six layers of width 8 and one of 16
    assert memory.block_bytes_per_token(replace(LORA, adapter_dropout=True)) == 216 + 2 * 4 * 7 + 3 * dropped


def test_activations_kept_and_recomputed():
    last_hidden = 2 * 10 * 2 * 8
    assert memory.activations(FULL) == 10 * 2 * 216 + last_hidden
    assert memory.activations(replace(FULL, recompute="block")) == 10 * (2 * 2 * 8 + 216) + last_hidden


def test_attention_mask_is_square_and_only_where_built():
    assert memory.attention_mask(FULL) == 0
    assert memory.attention_mask(replace(FULL, compute_bytes=4, builds_mask=True)) == 100 * 5


def test_logits_are_held_a_chunk_at_a_time():
    assert memory.logits(FULL) == 10 * 32 * 10  # few tokens: all of them
    large = replace(FULL, micro_tokens=10**6, model=model_facts(vocab=128256))
    assert memory.logits(large) == 2**27 // 128256 * 128256 * 10


def test_reduction_is_two_blocks_or_the_root_whichever_is_worse():
    head, freed = 2 * 32 * 8 * 2, replace(FULL, reshard=True)
    assert memory.reduction(freed, passing=10**6) == 2 * BLOCK * 6 + head
    wide = replace(freed, model=model_facts(vocab=4096))
    assert memory.reduction(wide, passing=1000) == (4096 * 8 + 8) * 6 - 1000


def test_gradients_of_a_kept_copy_are_one_block_and_the_head():
    assert memory.reduction(FULL, passing=0) == BLOCK * 2 + 32 * 8 * 6
    assert memory.reduction(replace(FULL, world_size=2, strategy="ddp"), passing=10**6) == 2 * BLOCK * 6 + 2 * 32 * 8 * 2


def test_overhead_counts_communication_only_between_ranks():
    alone = memory.overhead(FULL, moving=1000)
    assert alone == int(0.6 * 2**30) + 50
    assert memory.overhead(replace(FULL, world_size=2, strategy="ddp"), moving=1000) == alone + 2**30


@pytest.mark.parametrize("setup", [FULL, LORA, sharded(FULL, 4, reshard=True), sharded(LORA, 4, reshard=False)])
def test_terms_are_whole_non_negative_bytes(setup):
    assert all(isinstance(size, int) and size >= 0 for size in memory.estimate_terms(setup).values())
