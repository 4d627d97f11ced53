"""Tiny models of images and text without a file of their own in ``families``, whose images are inferred; as
``multimodal.WHOLE`` and ``vision.KINDS`` have the others.
"""

from __future__ import annotations

from typing import Any

from tests.support.multimodal import _CLIP, _PIXTRAL, _QWEN, _SIGLIP, _SIZES, _UNTIED, WHOLE

_SQUARE = {"height": 28, "width": 28}

HOMES = {
    "glm4v_moe": "glm4v",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "vipllava": "llava",
    "qwen3_5": "qwen3_vl",
    "mistral3": "pixtral",
    "mistral3 experts": "pixtral",
    "gemma4 experts": "gemma4",
}  # whose processor it is
LIKE_OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lighton_ocr": (
        "qwen3",
        {},
        {"vision_config": _PIXTRAL},
        {"image_token_id": 250, "spatial_merge_size": 2} | _UNTIED,
    )
}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
LIKE_OTHERS |= {
    kind: (
        text,
        experts
        | {
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [1, 1, 2],
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            }
        },
        {
            "vision_config": _SIZES
            | {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "image_size": 28, "intermediate_size": 48}
        },
        {"image_token_id": 250, "video_token_id": 251} | _UNTIED,
    )
    for kind, text, experts in (
        ("glm4v", "glm4v_text", {}),
        ("glm46v", "glm4v_text", {}),
        ("glm4v_moe", "glm4v_moe_text", _EXPERTS),
    )
}
_CHOSEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LIKE_OTHERS |= {
    f"{dense}_moe": (f"{dense}_moe_text", WHOLE[dense][1] | _CHOSEN, *WHOLE[dense][2:])
    for dense in ("qwen3_vl", "qwen3_5")
}
LIKE_OTHERS["gemma4 experts"] = (
    "gemma4_text",
    WHOLE["gemma4"][1]
    | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"}
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48},
    *WHOLE["gemma4"][2:],
)
LIKE_OTHERS["mistral3 experts"] = (
    "mistral4",
    _CHOSEN
    | {"n_routed_experts": 8, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16}
    | {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 32},
    *WHOLE["mistral3"][2:],
)
LIKE_OTHERS["exaone4_5"] = (
    "exaone4",
    {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 8},
    {"vision_config": _QWEN | {"num_key_value_heads": 1, "fullatt_block_indexes": [1]}},
    {"image_token_id": 250, "video_token_id": 251} | _UNTIED,
)
# whose images torchvision prepares: see torchvision.py beside this file
LIKE_OTHERS |= {
    "cohere2_vision": (
        "cohere2",
        {},
        {"vision_config": _SIGLIP | {"vision_use_head": False}},
        {"downsample_factor": 2, "alignment_intermediate_size": 64},
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 8}
        | {"global_head_dim": 32, "tie_word_embeddings": True, "use_bidirectional_attention": "vision"},
        {
            "vision_config": {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 64, "output_proj_dims": 32},
            "audio_config": None,
        },
        {},
    ),
    "muse_glimmer": (
        "muse_glimmer_text",
        {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 8}
        | {"layer_rope_theta": [10_000.0, 10_000.0, 0]},
        {
            "vision_config": {key: _SIZES[key] for key in _SIZES if key != "image_size"}
            | {"pos_emb_height": 4, "pos_emb_width": 4, "layer_types": ["window_attention", "full_attention"]}
        },
        {"out_hidden_size": 128, "projector_hidden_size": 48} | _UNTIED,
    ),
    "kimi_k25": (
        "deepseek_v3",
        _EXPERTS
        | {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "n_group": 1, "topk_group": 1}
        | {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 16},
        {
            "vision_config": {key: _SIZES[key] for key in _SIZES if key != "image_size"}
            | {"pos_emb_height": 4, "pos_emb_width": 4}
        },
        {"projection_hidden_size": 32} | _UNTIED,
    ),
    "llama4": (
        "llama4_text",
        {"num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "no_rope_layers": [1, 0, 1]}
        | {"attention_chunk_size": 16, "floor_scale": 16, "pad_token_id": 259},
        {
            "vision_config": dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64)
            | _SIZES
            | {"intermediate_size": 128}
        },
        _UNTIED,
    ),
    "lfm2_vl": (
        "lfm2",
        {"tie_word_embeddings": True},
        {"vision_config": _SIZES | {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False}},
        {"projector_hidden_size": 48},
    ),
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "vipllava": ("llama", {}, {"vision_config": _CLIP}, {"vision_feature_layers": [-2, 1]} | _UNTIED),
    "aya_vision": ("cohere2", {}, {"vision_config": _SIGLIP | {"vision_use_head": False}}, {"downsample_factor": 2}),
    "deepseek_vl": ("llama", {}, {"vision_config": _SIGLIP}, _UNTIED),
    "qianfan_ocr": (
        "qwen3",
        {},
        {"vision_config": _SIZES | {"image_size": [28, 28], "patch_size": [14, 14]}},
        {"image_seq_length": 1, "downsample_ratio": 0.5} | _UNTIED,
    ),
    "janus": (
        "llama",
        {},
        {
            "vision_config": {k: v for k, v in _SIZES.items() if k != "intermediate_size"}
            | {"projection_dim": 64, "mlp_ratio": 2, "num_image_tokens": 4},
            "vq_config": {
                "base_channels": 32,
                "channel_multiplier": [1],
                "num_res_blocks": 1,
                "latent_channels": 32,
                "num_embeddings": 16,
                "num_patches": 4,
                "projection_dim": 64,
                "image_token_embed_dim": 64,
            },
        },
        _UNTIED,
    ),
}
LLAVA_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "patch_size": 14,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
# Tokens by name, what the template writes for an image, preprocessor_config.json, processor_config.json, fields.
KINDS: dict[str, tuple[dict[str, str], str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "vipllava": (
        {"image_token": "<image>"},
        "<image>\n",
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": _SQUARE},
        LLAVA_PROCESSOR,
        {"image_token_index": "image_token"},
    ),
    "aya_vision": (
        {
            "image_token": "<image>",
            "start_of_img_token": "<|START_OF_IMG|>",
            "end_of_img_token": "<|END_OF_IMG|>",
            "img_patch_token": "<|IMG_PATCH|>",
        },
        "<image>",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": _SQUARE, "max_patches": 3, "crop_to_patches": True},
        {"processor_class": "AyaVisionProcessor", "patch_size": 14, "img_size": 28, "downsample_factor": 2},
        {"image_token_index": "img_patch_token"},
    ),
    "deepseek_vl": (
        {"image_token": "<image_placeholder>"},
        "<image_placeholder>",
        {"image_processor_type": "DeepseekVLImageProcessor", "size": _SQUARE},
        {"processor_class": "DeepseekVLProcessor", "num_image_tokens": 4},
        {"image_token_id": "image_token"},
    ),
    "qianfan_ocr": (
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
        },
        "<image>\n",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": _SQUARE, "max_patches": 3, "crop_to_patches": True},
        {"processor_class": "QianfanOCRProcessor", "image_seq_length": 1},
        {"image_token_id": "context_image_token"},
    ),
    "janus": (
        {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
        "<image_placeholder>\n",
        {"image_processor_type": "JanusImageProcessor", "size": _SQUARE},
        {"processor_class": "JanusProcessor", "num_image_tokens": 4},
        {"image_token_id": "image_token"},
    ),
    "llama4": (
        {name: f"<|{name}|>" for name in ("image", "patch", "image_start", "image_end")}
        | {name: f"<|{name}|>" for name in ("tile_x_separator", "tile_y_separator")},
        "<|image|>",
        {"image_processor_type": "Llama4ImageProcessorFast", "size": _SQUARE, "max_patches": 4},
        {"processor_class": "Llama4Processor", "patch_size": 14},
        {"image_token_index": "patch", "boi_token_index": "image_start", "eoi_token_index": "image_end"},
    ),
    "lfm2_vl": (
        {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
        | {"image_thumbnail_token": "<|img_thumbnail|>"}
        | {f"{row} {column}": f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3) for column in (1, 2, 3)},
        "<image>",
        {"image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 14, "tile_size": 28}
        | {"max_tiles": 3, "min_image_tokens": 1, "max_image_tokens": 4, "max_pixels_tolerance": 1.0},
        {"processor_class": "Lfm2VlProcessor"},
        {"image_token_id": "image_token"},
    ),
    "cohere2_vision": (
        {"image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"}
        | {"img_line_break_token": "<|IMG_LINE_BREAK|>"},
        "<|IMG_PATCH|>",
        {"image_processor_type": "Cohere2VisionImageProcessorFast", "size": _SQUARE, "patch_size": 1, "max_patches": 4},
        {"processor_class": "Cohere2VisionProcessor"},
        {"image_token_id": "image_token"},
    ),
    "gemma4_unified": (
        {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
        | {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
        "<|image|>",
        {"image_processor_type": "Gemma4UnifiedImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
        {"processor_class": "Gemma4UnifiedProcessor", "image_seq_length": 70},
        {"image_token_id": "image_token", "boi_token_id": "boi_token", "eoi_token_id": "eoi_token"},
    ),
    "kimi_k25": (
        {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        {"image_processor_type": "Kimi_K25ImageProcessor", "max_patches": 24},
        {"processor_class": "Kimi_K25Processor"},
        {"image_token_id": "image_token", "video_token_id": "video_token"},
    ),
    "muse_glimmer": (
        {name: f"<|{name}|>" for name in ("patch", "image_start", "image_end", "video")},
        "<|patch|>",
        {"image_processor_type": "MuseGlimmerImageProcessor", "max_image_tokens": 6},
        {"processor_class": "MuseGlimmerProcessor"},
        {"image_token_id": "patch", "video_token_id": "video"},
    ),
}
