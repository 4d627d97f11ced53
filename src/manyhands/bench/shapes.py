"""Published shapes of models (their public config.json), and how to write them as model folders without weights. No
torch at import.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NUM_WORDS = 512  # of the tokenizer that comes with every folder

_LLAMA: dict[str, Any] = dict(
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5
)

_QWEN3: dict[str, Any] = dict(
    num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6
)
_GEMMA3: dict[str, Any] = dict(vocab_size=262208, max_position_embeddings=131072, sliding_window=1024)

# name: (model_type, fields of its config). gemma27b is the text model of google/gemma-3-27b-it.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "llama",
        dict(
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            vocab_size=520,
            max_position_embeddings=8192,
        ),
    ),
    "llama1b": (
        "llama",
        _LLAMA
        | dict(
            hidden_size=2048,
            intermediate_size=8192,
            num_attention_heads=32,
            head_dim=64,
            num_hidden_layers=16,
            tie_word_embeddings=True,
        ),
    ),
    "llama8b": (
        "llama",
        _LLAMA | dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_hidden_layers=32),
    ),
    "llama70b": (
        "llama",
        _LLAMA | dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_hidden_layers=80),
    ),
    "qwen32b": (
        "qwen3",
        dict(
            hidden_size=5120,
            intermediate_size=25600,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            num_hidden_layers=64,
            vocab_size=151936,
            max_position_embeddings=40960,
            rms_norm_eps=1e-6,
        ),
    ),
    "gemma27b": (
        "gemma3_text",
        dict(
            hidden_size=5376,
            intermediate_size=21504,
            num_attention_heads=32,
            num_key_value_heads=16,
            head_dim=128,
            num_hidden_layers=62,
            vocab_size=262208,
            max_position_embeddings=131072,
            sliding_window=1024,
            query_pre_attn_scalar=168,
        ),
    ),
    # Shapes that no row of the table has: the memory estimate is compared with what they take.
    "phi3mini": (
        "phi3",
        dict(
            hidden_size=3072,
            intermediate_size=8192,
            num_attention_heads=32,
            num_key_value_heads=32,
            num_hidden_layers=32,
            vocab_size=32064,
            max_position_embeddings=4096,
            original_max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            pad_token_id=0,
        ),
    ),
    "phi4": (
        "phi3",
        dict(
            hidden_size=5120,
            intermediate_size=17920,
            num_attention_heads=40,
            num_key_value_heads=10,
            num_hidden_layers=40,
            vocab_size=100352,
            max_position_embeddings=16384,
            original_max_position_embeddings=16384,
            rms_norm_eps=1e-5,
            pad_token_id=0,
        ),
    ),
    "qwen14b": (
        "qwen3",
        dict(
            hidden_size=5120,
            intermediate_size=17408,
            num_attention_heads=40,
            num_key_value_heads=8,
            head_dim=128,
            num_hidden_layers=40,
            vocab_size=151936,
            max_position_embeddings=40960,
            rms_norm_eps=1e-6,
        ),
    ),
    "mistral7b": (
        "mistral",
        dict(
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            num_hidden_layers=32,
            vocab_size=32768,
            max_position_embeddings=32768,
            sliding_window=None,
            rms_norm_eps=1e-5,
        ),
    ),
    "smollm135m": (
        "llama",
        dict(
            hidden_size=576,
            intermediate_size=1536,
            num_attention_heads=9,
            num_key_value_heads=3,
            num_hidden_layers=30,
            vocab_size=49152,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
    ),
    "smollm360m": (
        "llama",
        dict(
            hidden_size=960,
            intermediate_size=2560,
            num_attention_heads=15,
            num_key_value_heads=5,
            num_hidden_layers=32,
            vocab_size=49152,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
    ),
    "llama3b": (
        "llama",
        _LLAMA
        | dict(
            hidden_size=3072,
            intermediate_size=8192,
            num_attention_heads=24,
            head_dim=128,
            num_hidden_layers=28,
            tie_word_embeddings=True,
        ),
    ),
    "qwen06b": (
        "qwen3",
        _QWEN3
        | dict(
            hidden_size=1024,
            intermediate_size=3072,
            num_attention_heads=16,
            num_hidden_layers=28,
            tie_word_embeddings=True,
        ),
    ),
    "qwen4b": (
        "qwen3",
        _QWEN3
        | dict(
            hidden_size=2560,
            intermediate_size=9728,
            num_attention_heads=32,
            num_hidden_layers=36,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2-1.5b": (
        "qwen2",
        dict(
            hidden_size=1536,
            intermediate_size=8960,
            num_attention_heads=12,
            num_key_value_heads=2,
            num_hidden_layers=28,
            vocab_size=151936,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2-7b": (
        "qwen2",
        dict(
            hidden_size=3584,
            intermediate_size=18944,
            num_attention_heads=28,
            num_key_value_heads=4,
            num_hidden_layers=28,
            vocab_size=152064,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
        ),
    ),
    "qwen2-72b": (
        "qwen2",
        dict(
            hidden_size=8192,
            intermediate_size=29568,
            num_attention_heads=64,
            num_key_value_heads=8,
            num_hidden_layers=80,
            vocab_size=152064,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
        ),
    ),
    "gemma4b": (
        "gemma3_text",
        _GEMMA3
        | dict(
            hidden_size=2560,
            intermediate_size=10240,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            num_hidden_layers=34,
            query_pre_attn_scalar=256,
        ),
    ),
    "gemma12b": (
        "gemma3_text",
        _GEMMA3
        | dict(
            hidden_size=3840,
            intermediate_size=15360,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=256,
            num_hidden_layers=48,
            query_pre_attn_scalar=256,
        ),
    ),
    "mistral24b": (
        "mistral",
        dict(
            hidden_size=5120,
            intermediate_size=32768,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            num_hidden_layers=40,
            vocab_size=131072,
            max_position_embeddings=32768,
            sliding_window=None,
            rms_norm_eps=1e-5,
        ),
    ),
    "olmo2-7b": (
        "olmo2",
        dict(
            hidden_size=4096,
            intermediate_size=11008,
            num_attention_heads=32,
            num_key_value_heads=32,
            num_hidden_layers=32,
            vocab_size=100352,
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            pad_token_id=0,
        ),
    ),
    "granite8b": (
        "granite",
        dict(
            hidden_size=4096,
            intermediate_size=12800,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=40,
            vocab_size=49155,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            attention_multiplier=0.0078125,  # 1 where left out: scores too large for bfloat16
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=16.0,
            tie_word_embeddings=True,
        ),
    ),
    "smollm3-3b": (
        "smollm3",
        dict(
            hidden_size=2048,
            intermediate_size=11008,
            num_attention_heads=16,
            num_key_value_heads=4,
            num_hidden_layers=36,
            vocab_size=128256,
            max_position_embeddings=65536,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            pad_token_id=0,
        ),
    ),
    "glm9b": (
        "glm4",
        dict(
            hidden_size=4096,
            intermediate_size=13696,
            num_attention_heads=32,
            num_key_value_heads=2,
            head_dim=128,
            num_hidden_layers=40,
            vocab_size=151552,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            attention_bias=True,
            pad_token_id=0,
        ),
    ),
    "yi34b": (
        "llama",
        dict(
            hidden_size=7168,
            intermediate_size=20480,
            num_attention_heads=56,
            num_key_value_heads=8,
            num_hidden_layers=60,
            vocab_size=64000,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
        ),
    ),
    "falcon10b": (
        "llama",
        dict(
            hidden_size=3072,
            intermediate_size=23040,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=256,
            num_hidden_layers=40,
            vocab_size=131072,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
        ),
    ),
}


def write_model_folder(folder: Path, shape: str, num_layers: int | None = None) -> None:
    """config.json and a word-level tokenizer; the weights are drawn on the device (``model.init: random``)."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type, fields = SHAPES[shape]
    fields = dict(fields) | ({"num_hidden_layers": num_layers} if num_layers else {})
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    AutoConfig.for_model(model_type, dtype="bfloat16", architectures=[architecture], **fields).save_pretrained(folder)
    vocabulary = {"<unk>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


def write_rows(file: Path, lengths: list[int], seed: int = 1) -> None:
    """Rows of random ids with exactly these numbers of tokens, the closing <eos> included.

    Ids, not words: of some model types transformers takes a tokenizer class of its own, whatever the folder's.
    """
    import random

    choose = random.Random(seed)
    with file.open("w") as out:
        for length in lengths:
            out.write(json.dumps({"input_ids": [*choose.choices(range(2, NUM_WORDS), k=length - 1), 1]}) + "\n")


def flops_per_token(shape: str, length: int, *, full: bool) -> float:
    """Operations a token: 6 a matmul weight where all are trained, 4 where adapters are, plus causal attention forward
    and backward.

    The peers' figures count the same way: ``length / 2`` positions seen by a token, recomputation not counted.
    """
    _, fields = SHAPES[shape]
    hidden, heads, layers = fields["hidden_size"], fields["num_attention_heads"], fields["num_hidden_layers"]
    head_dim = fields.get("head_dim", hidden // heads)
    attention_weights = hidden * head_dim * (2 * heads + 2 * fields["num_key_value_heads"])
    weights = layers * (attention_weights + 3 * hidden * fields["intermediate_size"]) + hidden * fields["vocab_size"]
    return (6 if full else 4) * weights + layers * 3 * 2 * 2 * (length / 2) * heads * head_dim
