"""Tiny checkpoints of text and more, as their publishers lay them out. Imports torch only when called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyhands.core.files import write_json
from tests.support.tiny import OF_FAMILY, TINY, tiny_tokenizer

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_SIGLIP = _SIZES | {"model_type": "siglip_vision_model", "vision_use_head": False}
_CLIP = _SIZES | {"model_type": "clip_vision_model", "projection_dim": 32}
_PIXTRAL = _SIZES | {"model_type": "pixtral", "head_dim": 16}
_QWEN = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
_QWEN_TOKENS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
_ROTATED = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
}  # by time, height, width
_UNTIED = {"tie_word_embeddings": False}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 8,
    "global_head_dim": 32,
}
_GEMMA4 |= {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 1, "tie_word_embeddings": True}
_GEMMA4_VISION = {
    key: _SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
_GEMMA4_VISION |= {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3}
_GEMMA4_VISION |= {"position_embedding_size": 256, "use_clipped_linears": True, "standardize": True}

# Outer model type: the text's and what it has of its own, the towers', and the outer configuration's fields.
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True}, {"vision_config": _SIGLIP},
               {"mm_tokens_per_image": 4, "image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252,
                "tie_word_embeddings": True}),
    # tied by its configuration's default, and published with a head of its own
    "mistral3": ("mistral", {}, {"vision_config": _PIXTRAL}, {"image_token_index": 250} | _UNTIED),
    "llava": ("llama", {}, {"vision_config": _CLIP}, {"image_token_index": 250} | _UNTIED),
    # a parameter of the whole model's own marks the end of an image's row
    "llava_next": ("mistral", {}, {"vision_config": _CLIP},
                   {"image_token_index": 250, "image_grid_pinpoints": [[28, 28]]} | _UNTIED),
    "llava_next_video": ("llama", {}, {"vision_config": _CLIP},
                         {"image_token_index": 250, "video_token_index": 251,
                          "image_grid_pinpoints": [[28, 28]]} | _UNTIED),
    "llava_onevision": ("qwen2", {}, {"vision_config": _SIGLIP},
                        {"image_token_index": 250, "video_token_index": 251,
                         "image_grid_pinpoints": [[28, 28]]} | _UNTIED),
    "qwen2_vl": ("qwen2_vl_text", _ROTATED,
                 {"vision_config": _QWEN | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}}, _QWEN_TOKENS),
    "qwen2_5_vl": ("qwen2_5_vl_text", _ROTATED, {"vision_config": _QWEN | {"fullatt_block_indexes": [1]}},
                   _QWEN_TOKENS | _UNTIED),
    "qwen3_vl": ("qwen3_vl_text", _ROTATED,
                 {"vision_config": _QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}},
                 _QWEN_TOKENS | _UNTIED),
    "qwen3_5": ("qwen3_5_text", _ROTATED, {"vision_config": _QWEN | {"num_position_embeddings": 16}},
                _QWEN_TOKENS | _UNTIED),
    "idefics3": ("llama", {}, {"vision_config": _SIGLIP | {"model_type": "idefics3_vision"}},
                 {"image_token_id": 250} | _UNTIED),
    "smolvlm": ("llama", {}, {"vision_config": _SIGLIP | {"model_type": "smolvlm_vision"}},
                {"image_token_id": 250} | _UNTIED),
    "internvl": (
        "qwen2",
        {},
        {"vision_config": _SIZES | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}},
        {"image_token_id": 250} | _UNTIED,
    ),
    "gemma4": ("gemma4_text", _GEMMA4, {"vision_config": _GEMMA4_VISION, "audio_config": None},
               {"image_token_id": 250}),
    "paligemma": ("gemma", {"tie_word_embeddings": True}, {"vision_config": _SIGLIP},
                  {"image_token_index": 250, "projection_dim": 64, "tie_word_embeddings": True}),
    "mllama": (
        "mllama_text_model",
        {"cross_attention_layers": [1]},
        {
            "vision_config": _SIZES
            | {"num_global_layers": 1, "vision_output_dim": 64, "intermediate_layers_indices": [0]}
        },
        {"image_token_index": 250},
    ),
}  # fmt: skip
FLAT = ("qwen2_vl", "qwen2_5_vl")  # published with the text's fields beside the vision_config
UNSAID = ("mistral3", "internvl")  # published without a word on tied embeddings, which are tied by default
REFUSED = ("paligemma", "mllama")
TRAINED = tuple(family for family in WHOLE if family not in REFUSED)


def write_tiny_multimodal(
    folder: str | Path,
    dtype: str = "float32",
    seed: int = 0,
    family: str = "gemma3",
    whole: tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]] | None = None,
) -> Path:
    """A model of text and images of ``WHOLE``, as its publisher lays it out, with a processor's files. Returns the
    folder.

    Names in the files are not the model's where they are not in published ones; every tensor is drawn from ``seed``.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForMultimodalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder = Path(folder)
    kind, own, towers, fields = whole or WHOLE[family]
    text = TINY | OF_FAMILY.get(kind, {}) | {"model_type": kind} | own
    text["vocab_size_per_layer_input"] = text["vocab_size"]
    config = CONFIG_MAPPING[family.partition(" ")[0]](
        text_config=text, **towers, **fields, eos_token_id=258, initializer_range=0.08
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForMultimodalLM.from_config(config, dtype=getattr(torch, dtype))
        for parameter in model.parameters():
            if not parameter.any():  # zeros would agree by chance
                torch.nn.init.normal_(parameter, std=0.08)
        if kind.startswith("gemma4"):  # its scores have no scale, and of drawn weights they choose one key
            for name, parameter in model.named_parameters():
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    torch.nn.init.constant_(parameter, 0.4)
        for name, buffer in model.named_buffers():  # so would bounds that bound nothing
            if name.endswith(("put_min", "put_max")):
                buffer.clamp_(-2.0, 2.0)
            elif name.endswith(("std_bias", "std_scale", "layer_scalar")):
                torch.nn.init.normal_(buffer, mean=1.0, std=0.1)
    model.save_pretrained(folder)
    _publish(folder, family)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    if towers["vision_config"].get("model_type") in ("siglip_vision_model", "clip_vision_model"):
        tensors = {
            name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()
        }
    save_file(tensors, weights, metadata={"format": "pt"})
    tiny_tokenizer().save_pretrained(folder)
    for name, more in {
        "preprocessor_config": {"image_processor_type": "Gemma3ImageProcessor"},
        "processor_config": {},
    }.items():
        write_json(folder / f"{name}.json", more | {"processor_class": "Gemma3Processor"})
    return folder


def _publish(folder: Path, family: str) -> None:
    """Write config.json as the family's publisher does."""
    path = folder / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    if family in FLAT:
        fields = {**fields.pop("text_config"), **fields}
    if family in UNSAID:
        del fields["tie_word_embeddings"]
        fields["text_config"].pop("tie_word_embeddings", None)
    write_json(path, fields)
