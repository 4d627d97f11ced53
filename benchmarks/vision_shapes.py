"""Published shapes of vision-language models as folders without weights, and rows with images that they take."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.vision_tables import GEMMA_4B, write_header
from manyhands.bench.shapes import write_model_folder

QWEN3_VL_4B: dict[str, Any] = {
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "tie_word_embeddings": True,
}
_QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_GEMMA_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}

# By shape: model type, its config, tokens of images, the field of config.json of each, what the template writes for an
# image, preprocessor_config.json, processor_config.json.
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, str], dict[str, str], str, dict[str, Any], dict[str, Any]]] = {
    "gemma3-4b": (
        "gemma3",
        GEMMA_4B,
        _GEMMA_TOKENS,
        {"image_token_index": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
        "<start_of_image>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}},
        {"processor_class": "Gemma3Processor", "image_seq_length": 256},
    ),
    "qwen3-vl-4b": (
        "qwen3_vl",
        QWEN3_VL_4B,
        _QWEN_TOKENS,
        {f"{name}_id": name for name in _QWEN_TOKENS},
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
        {"processor_class": "Qwen3VLProcessor"},
    ),
}
TEMPLATE = (
    "{%% for message in messages %%}{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}"
    "{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}"
    "{%% endfor %%}{%% endif %%}<eos>{%% endfor %%}"
)
WORDS = [f"w{number}" for number in range(2, 512)]


def write_vision_folder(folder: Path, shape: str, num_layers: int | None = None) -> None:
    """config.json, the weights' header, tokenizer, chat template and processor files; weights are drawn on the device.

    With ``num_layers``, so many blocks of text and of the tower, a small vocabulary and small images: to try a case on
    a CPU.
    """
    from transformers import AutoConfig, AutoTokenizer

    kind, config, tokens, fields, image, preprocessor, processor = SHAPES[shape]
    write_model_folder(folder, "tiny")  # its tokenizer of words
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokens.values()]})
    tokenizer.chat_template = TEMPLATE % image
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_specific_special_tokens": tokens}))
    config = json.loads(json.dumps(config))  # a copy
    if num_layers:
        config["text_config"] |= {"num_hidden_layers": num_layers, "vocab_size": 2048}
        depth = "depth" if "depth" in config["vision_config"] else "num_hidden_layers"
        config["vision_config"][depth] = num_layers
        if "deepstack_visual_indexes" in config["vision_config"]:
            config["vision_config"]["deepstack_visual_indexes"] = [0]
        if "image_size" in config["vision_config"]:
            config["vision_config"]["image_size"] = 224
            preprocessor = preprocessor | {"size": {"height": 224, "width": 224}}
    ids = {field: int(tokenizer.convert_tokens_to_ids(tokens[name])) for field, name in fields.items()}
    made = AutoConfig.for_model(kind, dtype="bfloat16", **config, **ids)
    made.save_pretrained(folder)
    write_header(folder, made)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (folder / "processor_config.json").write_text(json.dumps(processor))


def write_image_rows(file: Path, num_rows: int, *, words: int, pixels: int, share: float = 1.0, seed: int = 1) -> None:
    """``num_rows`` rows of a question and an answer, each ``words`` words together; of the rows a ``share`` has one
    image of ``pixels`` x ``pixels``, each another one: a JPEG of colors that change as slowly as a photograph's.

    Rows without an image have the words alone.
    """
    import numpy as np
    from PIL import Image

    choose, draw = random.Random(seed), np.random.default_rng(seed)
    images = file.parent / f"images-{pixels}"
    images.mkdir(parents=True, exist_ok=True)
    with file.open("w") as out:
        for number in range(num_rows):
            text = " ".join(choose.choices(WORDS, k=words // 2))
            parts: list[dict[str, str]] = [{"type": "text", "text": text}]
            if choose.random() < share:
                path = images / f"{number}.jpg"
                if not path.exists():
                    coarse = Image.fromarray(draw.integers(0, 256, (48, 48, 3), dtype=np.uint8))
                    coarse.resize((pixels, pixels), Image.Resampling.BICUBIC).save(path, quality=90)
                parts.insert(0, {"type": "image", "image": str(path)})
            answer = " ".join(choose.choices(WORDS, k=words - words // 2))
            messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": messages}) + "\n")
