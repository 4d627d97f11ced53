"""Mistral, and Mistral 3 with images around it."""

from manyhands.families.family import Family, KnownModule

MISTRAL = Family(
    name="Mistral",
    model_types=("mistral",),
    sizes={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    known_modules=(
        KnownModule("attention", "MistralAttention", window_in_config=True),
        KnownModule("mlp", "MistralMLP"),
    ),
    peft_targets=("q_proj", "v_proj"),
    packs=True,
)
MISTRAL3 = Family(
    name="Mistral 3",
    model_types=("mistral3",),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
)

FAMILIES = (MISTRAL, MISTRAL3)
