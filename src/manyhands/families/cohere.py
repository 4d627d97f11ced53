"""Command R: one norm a block, for attention and MLP side by side, and scaled logits."""

from manyhands.families.family import Family, KnownModule

COHERE = Family(
    name="Command R",
    model_types=("cohere",),
    tied=True,
    norms=("input_layernorm",),
    mlp_bias=False,
    qk_norm="per head",
    qk_norm_key="use_qk_norm",
    packs=True,
    known_modules=(KnownModule("attention", "CohereAttention"), KnownModule("mlp", "CohereMLP")),
)

FAMILIES = (COHERE,)
