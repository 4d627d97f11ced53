"""Gemma 3: the text model, and images around it."""

from manyhands.families.family import SQUARES, Family, ImageLayout, KnownModule
from manyhands.families.gemma2 import NORMS

GEMMA3_TEXT = Family(
    name="Gemma 3",
    model_types=("gemma3_text",),
    tied=True,
    head_dim=256,
    sizes={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
    norms=NORMS,
    qk_norm="shared",
    mlp_bias=False,
    known_modules=(
        KnownModule("attention", "Gemma3Attention"),
        KnownModule("mlp", "Gemma3MLP", activation_field="hidden_activation"),
    ),
    peft_targets=("q_proj", "v_proj"),
    packs=True,
)
GEMMA3 = Family(
    name="Gemma 3",
    model_types=("gemma3",),
    packs=True,
    text_model_type="gemma3_text",
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
    images=ImageLayout("images", (SQUARES,), token_field="image_token_index", bidirectional=True),
)

FAMILIES = (GEMMA3_TEXT, GEMMA3)
