"""GLM-4: gate and up projection are one matrix, and each part has a norm on either side; and its models of images."""

from dataclasses import replace

from manyhands.families.family import Experts, Family, KnownModule
from manyhands.families.qwen2 import QWEN_IMAGES

GLM4 = Family(
    name="GLM-4",
    model_types=("glm4",),
    head_dim=128,
    flags={"attention_bias": True},
    output_bias=False,
    mlp_bias=False,
    norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    merged={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
    packs=True,
    known_modules=(KnownModule("attention", "Glm4Attention"), KnownModule("mlp", "Glm4MLP")),
)

GLM4V_TEXT = replace(
    GLM4,
    name="GLM-4V",
    model_types=("glm4v_text",),
    head_dim=None,
    flags={},
    qkv_bias=True,
    packs=None,
    known_modules=(),
)
GLM4V = Family(
    name="GLM-4V",
    model_types=("glm4v", "glm46v"),
    text_model_type="glm4v_text",
    towers=("model.visual",),
    projectors=("model.visual.downsample", "model.visual.merger"),
    images=replace(
        QWEN_IMAGES,
        words={"image_token": "<|image|>"},
        grid_inputs=("position_ids", "cu_seqlens"),
        keeps_features=False,
        reads_grids=True,
    ),
)

GLM4V_MOE_TEXT = Family(
    name="GLM-4.5V",
    model_types=("glm4v_moe_text",),
    flags={"attention_bias": True},
    output_bias=False,
    mlp_bias=False,
    experts=Experts(shared="shared_experts"),
)
GLM4V_MOE = replace(GLM4V, name="GLM-4.5V", model_types=("glm4v_moe",), text_model_type="glm4v_moe_text")

FAMILIES = (GLM4, GLM4V_TEXT, GLM4V, GLM4V_MOE_TEXT, GLM4V_MOE)
