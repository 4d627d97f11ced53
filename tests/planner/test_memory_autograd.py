"""The bytes a block keeps for its backward pass, against what autograd really keeps (eager, on CPU, without
dropout).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from manyhands.config.schema import MethodSection
from manyhands.convert.lora import apply_lora
from manyhands.data.batch.divide import KEY_BOUNDS, KEY_POSITIONS
from manyhands.facts.model import read_model_facts
from manyhands.model.attention import attention_kwargs, register_attention
from manyhands.planner.memory.activations import block_bytes_per_token
from manyhands.planner.memory.input import EstimateInput
from tests.support.plans import change_input, make_input

NUM_TOKENS = 256
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
}


def kept_bytes(
    layers: int, family: str, dtype: torch.dtype, method: MethodSection | None = None, **inputs: torch.Tensor
) -> int:
    """Bytes of all storages that the graph of one forward pass holds, parameters apart."""
    config = AutoConfig.for_model(family, **SIZES | {"num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    if method is not None:
        apply_lora(model, method, seed=0)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.arange(NUM_TOKENS)[None] % 64, use_cache=False, **inputs)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_a_blocks_bytes_are_what_autograd_keeps(family: str, dtype: torch.dtype, tmp_path):
    one_block = kept_bytes(3, family, dtype) - kept_bytes(2, family, dtype)
    within = 0.15 if family == "gemma3_text" else 0.01  # Gemma's norms keep their results in float32 too
    assert block_bytes_per_token(make_setup(family, dtype, tmp_path)) * NUM_TOKENS == pytest.approx(
        one_block, rel=within
    )


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shares_prompt", [False, True])
def test_blocks_of_a_pack_share_one_mask(shares_prompt: bool, dtype: torch.dtype, tmp_path):
    """On a CPU, with keys and values repeated for all heads. transformers builds the mask, or we do where answers share
    a prompt.
    """
    register_attention()
    half = torch.arange(NUM_TOKENS // 2)
    batch = {"input_ids": torch.zeros(1, NUM_TOKENS), "position_ids": half.repeat(2)[None]}
    if shares_prompt:
        bounds = torch.tensor([0, NUM_TOKENS // 2, NUM_TOKENS], dtype=torch.int32)
        batch |= {"cu_seq_lens": bounds, KEY_BOUNDS: bounds, KEY_POSITIONS: torch.arange(NUM_TOKENS)}
    else:
        batch["cu_seq_lens"] = torch.zeros(0)  # a pack; sdpa finds its documents by their positions
    inputs = attention_kwargs(batch, "sdpa")
    one_block = kept_bytes(3, "llama", dtype, **inputs) - kept_bytes(2, "llama", dtype, **inputs)
    setup = change_input(make_setup("llama", dtype, tmp_path), builds_mask=True)
    assert block_bytes_per_token(setup) * NUM_TOKENS == pytest.approx(one_block, rel=0.01)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_dora_scales_is_kept(dropout: float, tmp_path):
    """Beside LoRA without dropout; rows' lengths, (o) for each layer, are no part of the estimate."""
    plain = MethodSection(name="lora", rank=4)
    dora = plain.model_copy(update={"dora": True, "dropout": dropout})
    more = [
        kept_bytes(layers, "llama", torch.bfloat16, dora) - kept_bytes(layers, "llama", torch.bfloat16, plain)
        for layers in (2, 3)
    ]
    setup = change_input(make_setup("llama", torch.bfloat16, tmp_path), num_adapter_parameters=1, adapter_rank=4)
    counted = block_bytes_per_token(
        change_input(setup, adapter_dora=True, adapter_dropout=dropout > 0)
    ) - block_bytes_per_token(setup)
    assert counted * NUM_TOKENS == pytest.approx(more[1] - more[0], rel=0.1)


def make_setup(family: str, dtype: torch.dtype, folder: Path) -> EstimateInput:
    AutoConfig.for_model(family, **SIZES).save_pretrained(folder)
    name = "float32" if dtype == torch.float32 else "bfloat16"
    return make_input(
        read_model_facts(folder, "tiny", "random"),
        adapter_rank=0,
        device="cpu",
        compile=False,
        compute_dtype=name,
        frozen_dtype=name,
        full_micro_tokens=NUM_TOKENS,
    )
