"""OLMo 2: norms behind attention and MLP, and of all heads of queries and keys at once."""

from manyhands.families.family import Family, KnownModule

OLMO2 = Family(
    name="OLMo 2",
    model_types=("olmo2",),
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    mlp_bias=False,
    qk_norm="all heads",
    packs=True,
    known_modules=(KnownModule("attention", "Olmo2Attention"), KnownModule("mlp", "Olmo2MLP")),
)

FAMILIES = (OLMO2,)
