"""Tiny models of the supported families, as configs and as real Hugging Face folders. Imports torch only when
called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.planner.types import Plan
from tests.support.plans import make_plan

FAMILIES = ("llama", "qwen3", "mistral", "gemma3")
_LINEAR_ATTENTION: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
# What makes a family itself: windows of 8 tokens, caps and scales far enough from 1 that forgetting them shows.
OF_FAMILY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "starcoder2": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3n_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                     "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
                     "altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0]},
    "smollm3": {"no_rope_layers": [1, 0, 1], "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "sliding_window": 8} | {"use_sliding_window": True},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.1},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 4,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_5_text": _LINEAR_ATTENTION,
    "qwen3_5_moe_text": _LINEAR_ATTENTION
    | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2},
    "olmo_hybrid": _LINEAR_ATTENTION,
    "bamba": _MAMBA | {"mamba_d_head": "auto", "attn_layer_indices": [1]},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "granitemoehybrid": _MAMBA
    | {
        "mamba_d_head": "auto",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
    },
    "jamba": {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8,
              "use_mamba_kernels": False},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "mamba_num_heads": 8,
                   "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16},
    "qwen3_next": _LINEAR_ATTENTION | {"num_experts": 0},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
                    "mlp_layer_types": ["dense", "sparse", "sparse"], "linear_head_dim": 16, "linear_num_heads": 2,
                    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
                    "v_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "minimax": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "block_size": 16,
                "num_local_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "gpt_neox": {"rotary_pct": 0.5},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}  # fmt: skip
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)  # every byte is a token
TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 259,
}
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_config(family: str, **changes: Any) -> Any:
    """A transformers config of ``family`` (a model type; gemma3 is short for gemma3_text) with 3 blocks of width 64.

    Weights are drawn four times wider than usual, so that logits are not flat. ``changes`` override single fields.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = "gemma3_text" if family == "gemma3" else family
    values = TINY | {"tie_word_embeddings": family in ("llama", "gemma3_text")} | OF_FAMILY.get(family, {}) | changes
    if family == "gemma3_text" and "layer_types" not in values:
        num_layers = values["num_hidden_layers"]
        values["layer_types"] = ["sliding_attention"] * (num_layers - 1) + ["full_attention"]
    return CONFIG_MAPPING[family](**values)


def tiny_tokenizer(special_tokens: tuple[str, ...] = SPECIAL_TOKENS) -> Any:
    """A tokenizer whose tokens are single bytes and four specials, with a ChatML chat template. No BOS is added.

    Other ``special_tokens`` make the tokenizer of a base model: the first one ends documents, and there is no template.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    if special_tokens != SPECIAL_TOKENS:
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=special_tokens[0], clean_up_tokenization_spaces=False
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = CHATML
    return fast


def tiny_model(family: str, dtype: str = "float32", seed: int = 0, **changes: Any) -> Any:
    """A transformers model of ``tiny_config``, weights from ``seed``."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=getattr(torch, dtype))


def write_tiny_model(
    folder: str | Path,
    family: str = "llama",
    dtype: str = "float32",
    with_tokenizer: bool = True,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a Hugging Face folder: config.json, model.safetensors and, if asked, a tokenizer. Returns the folder."""
    folder = Path(folder)
    tiny_model(family, dtype, seed, **changes).save_pretrained(folder)
    if with_tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def write_tiny_models(root: Path, *families: str) -> dict[str, str]:
    """A folder below ``root`` for each family, without a tokenizer."""
    return {family: str(write_tiny_model(root / family, family, with_tokenizer=False)) for family in families}


def tiny_run(folder: str | Path, method: str = "full", **method_keys: Any) -> RunConfig:
    """A run file for the model in ``folder``; its data is never read."""
    sections = {
        "name": "tiny",
        "model": {"name": str(folder)},
        "method": {"name": method} | ({"rank": 4, "alpha": 8.0} if method in ("lora", "qlora") else {}) | method_keys,
        "data": {"train": "rows.jsonl"},
    }
    return RunConfig.model_validate(sections)


def tiny_plan(folder: str | Path, **changes: Any) -> Plan:
    """A plan for one CPU process in float32 with packing; ``changes`` override single fields of it or its layout."""
    return make_plan(model_folder=str(folder), **changes)
