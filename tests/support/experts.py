"""Tiny mixtures of experts: 2 blocks of width 64, 8 experts of which a token goes to 2. Imports torch when called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.multimodal import WHOLE
from tests.support.other_vision import LIKE_OTHERS
from tests.support.tiny import VOCAB_SIZE

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "v_head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "initializer_range": 0.08,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 259,
}
AROUND_IMAGES = {  # models of images, and the type of their text
    "glm4v_moe": "glm4v_moe_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral4",
    "kimi_k25": "deepseek_v3",
}
_LLAMA4_VISION = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64)
_LLAMA4_VISION |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
_LLAMA4_VISION |= {"image_size": 28, "patch_size": 14, "pixel_shuffle_ratio": 0.5}
_OTHERS = {kind: ("", {}, *WHOLE[kind][2:]) for kind in ("gemma4", "mistral3")}
_KIMI_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_KIMI_VISION |= {"pos_emb_height": 4, "pos_emb_width": 4}
_OTHERS["kimi_k25"] = (
    "",
    {},
    {"vision_config": _KIMI_VISION},
    {"projection_hidden_size": 32, "tie_word_embeddings": False},
)
_OTHERS |= {"llama4": ("", {}, {"vision_config": _LLAMA4_VISION}, {})}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "moe", "full_attention"],
                   "moe_shared_expert_intermediate_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 16,
                   "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["sparse", "sparse"],
                    "linear_head_dim": 16, "linear_num_heads": 2},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 32,
                         "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = HYBRIDS | {
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
    },
    "llama4_text": {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 16,
        "floor_scale": 16,
    },
    "deepseek_v3": {},
    # queries of later positions are longer
    "mistral4": {"head_dim": 32, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 4,
        "max_position_embeddings": 512, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.5}},
}  # fmt: skip


def expert_config(model_type: str, **changes: Any) -> Any:
    """A config of ``model_type`` with those of the sizes above that it has, and with ``changes``."""
    from transformers import AutoConfig

    if text_type := AROUND_IMAGES.get(model_type):
        _, own, towers, fields = (LIKE_OTHERS | _OTHERS)[model_type]
        text = expert_config(text_type, **own | changes).to_dict()
        return AutoConfig.for_model(model_type, text_config=text, **towers, **fields)
    usual = AutoConfig.for_model(model_type)
    usual.allow_global_per_layer_attribute_access = True  # of one whose layers differ
    values = {key: value for key, value in SIZES.items() if hasattr(usual, key)}
    if hasattr(usual, "kv_lora_rank"):
        values |= LATENT
    return AutoConfig.for_model(model_type, **values | OWN.get(model_type, {}) | changes)


def expert_model(model_type: str, *, eager: bool = True, **changes: Any) -> Any:
    """A transformers model in float32 with random weights, its experts computed by its own loop if ``eager``."""
    import torch

    from manyhands.model.attention import plain_attention
    from manyhands.model.structure import auto_class

    config = expert_config(model_type, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class(config).from_config(
            config,
            dtype=torch.float32,
            attn_implementation=plain_attention(config),
            **{"experts_implementation": "eager"} if eager else {},
        )
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if "correction_bias" in name or "expert_bias" in name:
                    tensor.normal_(std=0.05)
                elif name.endswith(("sinks", "router.bias", "expert_scale", "router.scale")):
                    tensor.normal_()
                elif isinstance(tensor, torch.nn.Parameter) and tensor.dim() > 1:
                    tensor.normal_(std=0.08)
    return model.train()


def write_mxfp4_model(folder: Path) -> Path:
    """A tiny gpt-oss in ``folder`` as the hub has it: experts in MXFP4, the rest in bfloat16. Without a tokenizer."""
    from safetensors.torch import load_file, save_file

    from manyhands.kernels.mxfp4.reference import quantize

    expert_model("gpt_oss", intermediate_size=64).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight = tensors.pop(name).mT
        codes, scales = quantize(weight.flatten(0, 1))
        blocks = codes.view(*weight.shape[:2], -1, 16)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales.view(blocks.shape[:3])}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
