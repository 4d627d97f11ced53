"""What weights in NF4 take, against arithmetic by hand."""

from __future__ import annotations

from manyhands.facts.types import LinearShape
from manyhands.planner.memory import terms as memory
from tests.planner.examples import llama_8b
from tests.support.plans import change_input, make_input

QLORA = make_input(llama_8b(), num_adapter_parameters=1000, adapter_rank=16, nf4_blocks=True)
LORA = change_input(QLORA, nf4_blocks=False)
IN_BLOCK = (
    2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336
)  # q and o, k and v, the MLP: each whole rows of 16,384 values
NORMS, ROOT = 2 * 4096, 2 * 128256 * 4096 + 4096
BLOCK_BYTES = IN_BLOCK // 2 + IN_BLOCK // 64 + 8 * IN_BLOCK // 16384 + 2 * NORMS


def test_blocks_take_little_over_half_a_byte_and_the_rest_two():
    assert memory.weights(QLORA) == 32 * BLOCK_BYTES + 2 * ROOT + 4 * 1000
    assert memory.weights(LORA) == 2 * (32 * (IN_BLOCK + NORMS) + ROOT) + 4 * 1000
    assert memory.gradients(QLORA) == memory.gradients(LORA) and memory.at_the_loss(QLORA) == memory.at_the_loss(LORA)


def test_shards_are_gathered_as_codes():
    shards = change_input(QLORA, strategy="fsdp", world_size=4, reshard_after_forward=True)
    assert memory.weights(shards) == memory.weights(QLORA) // 4
    assert memory.gathered(shards) == 2 * ROOT + 3 * BLOCK_BYTES
    assert memory.gathered(QLORA) == 0


def test_one_weight_at_a_time_is_dequantized():
    assert memory.dequantized(QLORA) == 2 * 4096 * 14336 + 5 * 4096 * 14336 // 64
    assert memory.dequantized(LORA) == 0


def test_scales_in_float32_take_four_bytes_and_need_no_room_beside():
    single = change_input(QLORA, nf4_double=False)
    assert single.frozen_block_bytes == IN_BLOCK // 2 + 4 * IN_BLOCK // 64 + 2 * NORMS
    assert memory.dequantized(single) == 2 * 4096 * 14336


def test_an_odd_weight_fills_its_last_row():
    shapes = {"q_proj": LinearShape(100, 100)}  # 10,000 values: one row
    model = llama_8b().model_copy(
        update={
            "block_linear_shapes": shapes,
            "num_block_parameters": 10_000,
        }
    )
    assert change_input(QLORA, model=model).frozen_block_bytes == 8192 + 264
