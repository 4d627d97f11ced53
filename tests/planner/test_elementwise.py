"""Values that elementwise kernels move, against what torch's operators of transformers' blocks are given and give."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from manyhands.facts.model import read_model_facts
from manyhands.facts.types import LinearShape
from manyhands.planner.time.elementwise import EXPERTS_RATE, LONGEST_SUM, moved_values, num_kernels
from tests.planner.examples import mixture
from tests.support.plans import change_input, make_input

NUM_TOKENS = 512
SIZES = dict(hidden_size=192, intermediate_size=448, num_attention_heads=6, num_key_value_heads=2, head_dim=32)
MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "attention", "empty", "ones_like")


class Moved(TorchDispatchMode):
    """Bytes that operators read and write, but matmuls and attention; what a dimension repeats is read once."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        is_view = bool(function._schema.returns) and function._schema.returns[0].alias_info is not None
        name = function._schema.name
        if not (is_view and "copy_" not in name) and not any(part in name for part in (*MATMULS, "_unsafe_view")):
            given = [] if name == "aten::zeros" else tree_leaves((args, kwargs))
            written = [] if "copy_" in name else tree_leaves(out)
            self.total += sum(bytes_of(value) for value in given + written if isinstance(value, torch.Tensor))
        return out


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.element_size() * prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_block_that_is_not_compiled_moves_what_its_operators_do(family: str, dtype: torch.dtype, tmp_path):
    config = AutoConfig.for_model(family, **SIZES, num_hidden_layers=1, vocab_size=64)
    config.save_pretrained(tmp_path)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).model
    name = str(dtype).removeprefix("torch.")
    setup = make_input(read_model_facts(tmp_path, "tiny", "random"), compile=False, compute_dtype=name)
    hidden = torch.randn(1, NUM_TOKENS, SIZES["hidden_size"], dtype=dtype, requires_grad=True)
    rotary = model.rotary_emb(hidden, torch.arange(NUM_TOKENS)[None])
    with Moved() as forward:
        result = model.layers[0](hidden, attention_mask=None, position_embeddings=rotary)
    with Moved() as backward:
        result.backward(torch.ones_like(result))
    for moved, is_backward in ((forward, False), (backward, True)):
        found = moved.total / NUM_TOKENS / setup.compute_bytes
        assert moved_values(setup, backward=is_backward) == pytest.approx(found, rel=0.06), is_backward


def test_compiled_kernels_move_less_and_are_fewer(tmp_path):
    AutoConfig.for_model("llama", **SIZES).save_pretrained(tmp_path)
    compiled = make_input(read_model_facts(tmp_path, "tiny", "random"), device="cuda")
    eager = change_input(compiled, compile=False)
    for backward in (False, True):
        assert 2.5 * moved_values(compiled, backward=backward) < moved_values(eager, backward=backward)
        assert 0 < num_kernels(compiled, backward=backward) < num_kernels(eager, backward=backward)
    frozen = change_input(compiled, num_adapter_parameters=1000)
    assert moved_values(frozen, backward=True) < moved_values(compiled, backward=True), "no gradients of norms' weights"


def test_training_in_fp8_quantizes_both_sides_of_each_matmul_and_transposes_those_of_the_weights_gradient(tmp_path):
    AutoConfig.for_model("llama", **SIZES).save_pretrained(tmp_path)
    plain = make_input(read_model_facts(tmp_path, "tiny", "random"), device="cuda")
    outs, ins = (sum(shape[side] for shape in plain.model.block_linear_shapes.values()) for side in (0, 1))
    for setup, transposed in ((plain, outs + ins), (change_input(plain, num_adapter_parameters=1000), 0)):
        fp8 = change_input(setup, fp8_blocks=True)
        more = [moved_values(fp8, backward=backward) - moved_values(setup, backward=backward) for backward in (0, 1)]
        assert more == pytest.approx([1.5 * ins, 1.5 * outs + transposed * 2 / plain.compute_bytes])


@pytest.mark.parametrize(
    ("width", "in_fp8", "is_inside"),
    [
        (LONGEST_SUM, False, (True, True)),
        (LONGEST_SUM + 8, False, (False, True)),
        (LONGEST_SUM // 2, True, (True, True)),
        (LONGEST_SUM, True, (True, False)),
        (LONGEST_SUM + 8, True, (False, False)),
    ],
)
def test_low_rank_sums_inside_a_grouped_product_move_nothing(
    width: int, in_fp8: bool, is_inside: tuple[bool, bool]
) -> None:
    model = mixture()
    hidden, rows = model.hidden_size, model.rows_per_token * model.hidden_size
    wide = 2 * LONGEST_SUM  # the other stack's sums run over it
    stacks = {"mlp.experts.gate_up_proj": LinearShape(8 * width, wide, 4, 2)}
    stacks |= {"mlp.experts.down_proj": LinearShape(4 * hidden, width, 4, 2)}
    outside = make_input(
        model.model_copy(update={"block_linear_shapes": model.block_linear_shapes | stacks}),
        num_adapter_parameters=1000,
        fuses_experts=True,
        fp8_groups=in_fp8,
    )
    inside = change_input(outside, sums_in_products=True)
    for backward, saved in enumerate(is_inside):
        less = moved_values(outside, backward=bool(backward)) - moved_values(inside, backward=bool(backward))
        assert less == pytest.approx(2 * rows / EXPERTS_RATE * saved)
