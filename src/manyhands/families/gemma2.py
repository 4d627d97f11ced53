"""Gemma 2: soft-capped attention scores, which few kernels can compute, and a norm on either side of each part."""

from manyhands.families.family import Family

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GEMMA2 = Family(
    name="Gemma 2",
    model_types=("gemma2",),
    tied=True,
    head_dim=256,
    attention_softcap=50.0,
    norms=NORMS,
    mlp_bias=False,
    peft_targets=("q_proj", "v_proj"),
    packs=True,
)

FAMILIES = (GEMMA2,)
