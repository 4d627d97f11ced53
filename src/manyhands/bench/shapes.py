"""Published shapes of models (their public config.json) and model folders without weights. No torch at import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NUM_WORDS = 512  # of the tokenizer that comes with every folder


def read_shapes(file: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Read shapes by name: each a model type and the fields of its config."""
    return {name: (kind, fields) for name, (kind, fields) in json.loads(file.read_text()).items()}


# The shapes of the table; gemma27b is the text model of google/gemma-3-27b-it. The benchmarks of a checkout add others.
SHAPES = read_shapes(Path(__file__).with_name("shapes.json"))


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
    """Rows of random ids (some model types bring their own tokenizer class) of exactly these lengths, with <eos>."""
    import random

    choose = random.Random(seed)
    with file.open("w") as out:
        for length in lengths:
            out.write(json.dumps({"input_ids": [*choose.choices(range(2, NUM_WORDS), k=length - 1), 1]}) + "\n")


def write_pairs(file: Path, num_pairs: int, length: int, seed: int = 1) -> None:
    """Pairs of answers in words, each a token: half of ``length`` is prompt, and each answer ends with <eos>."""
    import random

    choose = random.Random(seed)

    def say(count: int) -> str:
        return " ".join(f"w{i}" for i in choose.choices(range(2, NUM_WORDS), k=count))

    with file.open("w") as out:
        for _ in range(num_pairs):
            answers = {key: " " + say(length - length // 2 - 1) for key in ("chosen", "rejected")}
            out.write(json.dumps({"prompt": say(length // 2), **answers}) + "\n")


def flops_per_token(shape: str, length: int, *, full: bool) -> float:
    """Operations a token: 6 a matmul weight where all are trained, 4 where adapters are, plus causal attention forward
    and backward.

    The peers' figures count the same way: ``length / 2`` positions seen by a token, recomputation not counted.
    """
    _, fields = SHAPES[shape]
    hidden, heads, layers = fields["hidden_size"], fields["num_attention_heads"], fields["num_hidden_layers"]
    head_dim = fields.get("head_dim", hidden // heads)
    attention_weights = hidden * head_dim * (2 * heads + 2 * fields["num_key_value_heads"])
    inner = fields["intermediate_size"]
    if "num_experts_per_tok" in fields:  # those that a token passes through
        inner = fields["num_experts_per_tok"] * fields.get("moe_intermediate_size", inner)
    weights = layers * (attention_weights + 3 * hidden * inner) + hidden * fields["vocab_size"]
    return (6 if full else 4) * weights + layers * 3 * 2 * 2 * (length / 2) * heads * head_dim
