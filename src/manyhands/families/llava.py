"""LLaVA 1.5, NeXT and OneVision: images around Llama, Mistral or Qwen 2."""

from manyhands.families.family import Family

LLAVA = Family(
    name="LLaVA",
    model_types=("llava", "llava_next", "llava_onevision"),
    packs=True,
    towers=("model.vision_tower",),
    projectors=("model.multi_modal_projector",),
)

FAMILIES = (LLAVA,)
