"""Llama 4: blocks of experts beside a shared one, attention within chunks, and layers without positions."""

from manyhands.families.family import Config, Experts, Family, Shapes
from manyhands.families.hybrids import attention, mlp, norms


def _block(config: Config, index: int, dense: bool) -> Shapes:
    width = config.get("intermediate_size_mlp") or 16_384
    feed = mlp(config, width, "feed_forward") if dense else {}
    outer = norms(config, "input_layernorm", "post_attention_layernorm")
    return attention(config, config.get("head_dim") or 128) | feed | outer


LLAMA4_TEXT = Family(
    name="Llama 4",
    model_types=("llama4_text",),
    head_dim=128,
    block=_block,
    experts=Experts(
        "feed_forward",
        router="router.weight",
        inner="intermediate_size",
        shared="shared_expert",
        shared_inner="intermediate_size",
        transposed=True,
        weighs_inputs="Llama4TextExperts",
    ),
    why_unpacked="its chunks of attention, and the temperature of layers without positions, count tokens from the "
    "beginning of a row and not of a document",
)
LLAMA4 = Family(
    name="Llama 4",
    model_types=("llama4",),
    decoder="language_model.model",
    towers=("vision_model",),
    projectors=("multi_modal_projector",),
)

FAMILIES = (LLAMA4_TEXT, LLAMA4)
