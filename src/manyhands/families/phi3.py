"""Phi-3 and Phi-4: queries, keys and values are one matrix, and so are gate and up projection."""

from manyhands.families.family import Family, KnownModule

PHI3 = Family(
    name="Phi-3",
    model_types=("phi3",),
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    merged={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    packs=True,
    known_modules=(
        KnownModule("attention", "Phi3Attention", window_in_config=True),
        KnownModule("mlp", "Phi3MLP"),
    ),
)

FAMILIES = (PHI3,)
