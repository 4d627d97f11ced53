"""What a plan counts of blocks whose attention is linear attention, a state space model or a convolution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.facts.model import read_model_facts
from manyhands.facts.types import ModelFacts
from manyhands.planner.search import plan
from tests.planner.examples import data_facts, facts, run_config

# a published dense Qwen3.5 of 9 billion parameters: one block in four has attention
QWEN3_5_9B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def shape(folder: Path, every: int = 4) -> ModelFacts:
    kinds = ["full_attention" if index % every == every - 1 else "linear_attention" for index in range(32)]
    (folder / "config.json").write_text(json.dumps(QWEN3_5_9B | {"layer_types": kinds}))
    return read_model_facts(folder, "hybrid", "random")


def test_blocks_of_each_kind_are_counted(tmp_path: Path) -> None:
    model = shape(tmp_path)
    assert (model.num_attention_layers, model.num_mixer_layers) == (8, 24)
    # qkv, z, b, a go in; q, k, v through the convolution; four times the values behind it
    assert model.mixer_values == 8192 + 4096 + 32 + 32 + 8192 + 4 * 4096
    assert model.mixer_state == 32 * 128 * 128
    assert 8.9e9 < model.num_parameters < 9.1e9
    assert shape(tmp_path, 1).num_mixer_layers == 0


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_hybrid_of_nine_billion_is_planned_beside_its_dense_twin(tmp_path: Path, method: str) -> None:
    """Packed 4k: about as fast and as large. At 128k, where pairs of tokens decide, much faster."""
    hybrid, dense = shape(tmp_path), shape(tmp_path, 1)
    found = {}
    for length in (4096, 131072):
        data = data_facts(num_samples=4096, mean=float(length), longest=length)
        for model in (hybrid, dense):
            config = run_config(method__name=method, data__max_length=length, data__packing=True, batch__samples=8)
            made = plan(config, facts(model, data=data, gpus=4))
            assert made.step_s and made.memory.fits
            found[length, model is hybrid] = made.step_s / model.num_parameters
    assert 0.8 < found[4096, True] / found[4096, False] < 1.25
    assert found[131072, True] / found[131072, False] < 0.6


def test_blocks_named_by_number_in_a_part_of_config_json_are_counted(tmp_path: Path) -> None:
    """As Kimi Linear 48B is published: blocks count from one, and transformers has other names for half of the keys."""
    mixers = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
    mixers["full_attn_layers"] = [4, 8, 12, 16, 20, 24, 27]
    sizes = dict(zip(("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), (128, 128, 64), strict=True))
    sizes |= {"kv_lora_rank": 512, "q_lora_rank": None, "num_experts": 256, "num_experts_per_token": 8}
    sizes |= {"hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 27}
    sizes |= {"num_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 163840, "num_attention_heads": 32}
    config = {"model_type": "kimi_linear", "linear_attn_config": mixers, "tie_word_embeddings": False} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model_facts(tmp_path, "hybrid", "random")
    assert (model.num_attention_layers, model.num_mixer_layers, model.mixer_state) == (7, 20, 32 * 128 * 128)
    assert (model.num_parameters, model.num_active_parameters) == (49_122_675_072, 3_484_453_248)
