"""A tiny Llama with a tokenizer and a chat template, as a model folder; and the same with trained-looking adapters."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from manyhands.config.schema import MethodSection
from manyhands.convert.lora import adapted_layers, apply_lora

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
METHOD = MethodSection(rank=4, alpha=8.0)


def make_model(
    *, tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0, num_layers: int = 2
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        tie_word_embeddings=tied,
        eos_token_id=2,
        bos_token_id=1,
        initializer_range=0.1,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(dtype)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system"] + [
        f"w{i}" for i in range(248)
    ]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **special
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_source(folder: Path, model: LlamaForCausalLM) -> Path:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def adapt(model: nn.Module, method: MethodSection = METHOD) -> nn.Module:
    """Adapters whose B is not zero, as after training."""
    apply_lora(model, method, seed=0)
    torch.manual_seed(5)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.weight.normal_(std=0.1)
    return model
