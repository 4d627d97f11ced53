"""Tiny models of the supported families, as configs and as real Hugging Face folders. Imports torch only when called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.plan.types import Plan

FAMILIES = ("llama", "qwen3", "mistral", "gemma3")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)  # every byte is a token
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_config(family: str, **changes: Any) -> Any:
    """A transformers config of ``family`` with 3 blocks of width 64; windows of 8 tokens for mistral and gemma3.

    Weights are drawn four times wider than usual, so that logits are not flat. ``changes`` override single fields.
    """
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,
        "tie_word_embeddings": family in ("llama", "gemma3"),
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 259,
    }
    if family in ("mistral", "gemma3"):
        values["sliding_window"] = 8
    if family == "gemma3":
        values["query_pre_attn_scalar"] = 16
    values |= changes
    if family == "gemma3" and "layer_types" not in values:
        num_layers = values["num_hidden_layers"]
        values["layer_types"] = ["sliding_attention"] * (num_layers - 1) + ["full_attention"]
    classes = {"llama": "LlamaConfig", "qwen3": "Qwen3Config", "mistral": "MistralConfig", "gemma3": "Gemma3TextConfig"}
    classes["starcoder2"] = "Starcoder2Config"  # plain layer norms: the others' RMS norms compute in float32 even in a float64 model
    return getattr(transformers, classes[family])(**values)


def tiny_tokenizer() -> Any:
    """A tokenizer whose tokens are single bytes and four specials, with a ChatML chat template. No BOS is added."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
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
    folder: str | Path, family: str = "llama", dtype: str = "float32", with_tokenizer: bool = True, seed: int = 0, **changes: Any
) -> Path:
    """Write a Hugging Face folder: config.json, model.safetensors and, if asked, a tokenizer. Returns the folder."""
    folder = Path(folder)
    tiny_model(family, dtype, seed, **changes).save_pretrained(folder)
    if with_tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_run(folder: str | Path, method: str = "full", **method_keys: Any) -> RunConfig:
    """A run file for the model in ``folder``; its data is never read."""
    sections = {
        "name": "tiny",
        "model": {"name": str(folder)},
        "method": {"name": method, "rank": 4, "alpha": 8.0, **method_keys} if method == "lora" else {"name": method},
        "data": {"train": "rows.jsonl"},
    }
    return RunConfig.model_validate(sections)


def tiny_plan(folder: str | Path, **changes: Any) -> Plan:
    """A plan for one CPU process in float32 with packing; ``changes`` override single fields."""
    values: dict[str, Any] = {
        "config_digest": "",
        "data_digest": "",
        "data_folder": "",
        "model_folder": str(folder),
        "device": "cpu",
        "world_size": 1,
        "strategy": "one",
        "reshard": True,
        "recompute": "none",
        "compile": False,
        "compute_dtype": "float32",
        "master_dtype": "float32",
        "frozen_dtype": "float32",
        "attention": "sdpa",
        "packing": True,
        "batch_rows": 4,
        "batch_tokens": None,
        "micro_rows": None,
        "micro_tokens": 64,
        "accumulation": None,
        "steps_per_epoch": 1,
        "num_steps": 1,
        "warmup_steps": 0,
        "learning_rate": 1e-3,
        "evaluate_every": 0,
        "checkpoint_every": 0,
        "output_dtype": "float32",
        "memory": {"terms": {}, "limit": 2**30},
    }
    return Plan.model_validate(values | changes)
