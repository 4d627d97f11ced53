"""LLaVA 1.5, NeXT and OneVision: images around Llama, Mistral or Qwen 2."""

from manyhands.families.family import SQUARES, Family, ImageEntry, ImageLayout

LLAVA = Family(
    name="LLaVA",
    model_types=("llava",),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
    images=ImageLayout("images", (SQUARES,), token_field="image_token_index"),
)
LLAVA_NEXT = Family(
    name="LLaVA-NeXT",
    model_types=("llava_next",),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
)
LLAVA_ONEVISION = Family(
    name="LLaVA-OneVision",
    model_types=("llava_onevision",),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
    # The tiles of all images are end to end, the whole image first; a document of several images has one tile of each.
    images=ImageLayout(
        "anyres",
        (SQUARES, ImageEntry("image_sizes", "image", (2,)), ImageEntry("batch_num_images", "document")),
        token_field="image_token_index",
    ),
)

FAMILIES = (LLAVA, LLAVA_NEXT, LLAVA_ONEVISION)
