"""Gemma 3: the text model, and images around it."""

from collections.abc import Mapping
from typing import Any

from manyhands.families.family import Family, ImageLayout, KnownModule
from manyhands.families.gemma2 import NORMS
from manyhands.families.images import ImageKind, ImageShape

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


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    features = processor["image_token"] * processor["image_seq_length"]
    return f"\n\n{processor['boi_token']}{features}{processor['eoi_token']}\n\n"


IMAGES = ImageLayout(
    ImageKind(),
    _expand,
    {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    placeholder="boi_token",
    token_field="image_token_index",
    fields={"image_seq_length": 256},
    arguments=lambda _: {"do_convert_rgb": True, "do_pan_and_scan": False},
    bidirectional=True,
    after_pooling="mm_soft_emb_norm",
)
GEMMA3 = Family(
    name="Gemma 3",
    model_types=("gemma3",),
    packs=True,
    text_model_type="gemma3_text",
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
    images=IMAGES,
)

FAMILIES = (GEMMA3_TEXT, GEMMA3)
