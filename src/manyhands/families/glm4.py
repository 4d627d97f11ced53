"""GLM-4: gate and up projection are one matrix, and each part has a norm on either side."""

from manyhands.families.family import Family

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
)

FAMILIES = (GLM4,)
