"""Images in an Axolotl run, which ``processor_type`` switches on: parts of the model, sizes, what is not cut. Part of
the dialect ``axolotl.py``.
"""

from __future__ import annotations

from typing import Any

from manyhands.config.dialects.images import split_projector
from manyhands.config.dialects.translation import Translator, names
from manyhands.config.keys import show

TOWERS = names("vision_tower vision_model vision_encoder visual embed_vision audio_tower audio_model embed_audio")
# Chat templates of models of images, by Axolotl's names; they are made after the models' own.
TEMPLATES = names(
    "gemma3 gemma3n gemma4 gemma4_unified llama3_2_vision llama4 llava mistral_v7_tekken pixtral qwen2_vl qwen3_5"
)
_SIZES = ("image_size", "image_resize_algorithm")


def map_images(t: Translator) -> None:
    """``processor_type`` and what belongs to it. Called once ``map_method`` has been."""
    if not t.has("processor_type"):
        for key in ("processor_type", *_SIZES, "processor_kwargs", "role_boundaries"):
            t.already(key, "only with `processor_type`" if t.has(key) else "")
        t.already("freeze_mm_modules", "without images the parts that they pass through are left as they are")
        return
    kind = str(t.get("processor_type"))
    if kind == "AutoProcessor":
        t.map("processor_type", "data.images", True, "images are prepared while the run trains")
    else:
        t.refuse("processor_type", f"{kind}: images are prepared by the model's own processor: write AutoProcessor")
    t.already("skip_prepare_dataset", "rows become tokens before training, images pixels while it runs")
    t.only("processor_kwargs", (None, {}), "write these settings into the model's preprocessor_config.json")
    if t.get("role_boundaries"):
        t.ignore("role_boundaries", "which tokens are an assistant's follows from the chat template")
    t.already("role_boundaries")
    _map_size(t)
    _map_parts(t)


def _map_size(t: Translator) -> None:
    size = t.get("image_size")
    sides = [size, size] if isinstance(size, int) and not isinstance(size, bool) else size
    if size is None:
        t.already("image_size")
    elif isinstance(sides, list) and len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides):
        why = (
            f"images of more than {sides[0]} x {sides[1]} pixels are made smaller in proportion; in Axolotl those of "
            "columns get these sides, padded or squeezed"
        )
        t.substitute("image_size", {"data.shrink_images_above": sides[0] * sides[1]}, why)
    else:
        t.refuse("image_size", f"got {show(size)}, allowed: pixels of a side, or [width, height]")
    if str(t.get("image_resize_algorithm", "bicubic")).lower() != "bicubic":
        t.ignore("image_resize_algorithm", "images are made smaller with bicubic interpolation")
    t.already("image_resize_algorithm")


def _map_parts(t: Translator) -> None:
    """``adapter`` leaves tower and projector as they are; without it all is trained, but for ``freeze_mm_modules``."""
    parts: dict[str, Any] = {"vision": "frozen", "projector": "frozen"}
    given = ["freeze_mm_modules"] if t.flag("freeze_mm_modules") else []
    if t.has("adapter"):
        if split_projector(_listed(t, "lora_modules_to_save"))[1]:
            parts["projector"] = "trained"
            given.append("lora_modules_to_save")
        if isinstance(t.get("lora_target_modules"), list) and not t.flag("lora_target_linear"):
            why = (
                "adapters are for the language model alone; in Axolotl the tower's modules of these names have them too"
            )
            t.substitute("lora_target_modules", {}, why)
    elif t.has("unfrozen_parameters"):
        given.append("unfrozen_parameters")
        rest, trains = split_unfrozen(t)
        parts["projector"] = "trained" if trains else "frozen"
        parts |= {} if rest else {"language": "frozen"}
    elif not given:
        parts = {"vision": "trained", "projector": "trained", "language": "full"}
    for key in given:
        t.map(key, "method.parts", parts)
    t.already("freeze_mm_modules")
    t.carry("method.parts", parts, "Axolotl trains the whole model" if "language" in parts else "adapters alone")


def split_unfrozen(t: Translator) -> tuple[list[Any], bool]:
    """Of ``unfrozen_parameters`` what is not the projector's, and whether some is."""
    return split_projector([str(one).replace("\\", "") for one in _listed(t, "unfrozen_parameters")])


def refuse_tower(t: Translator, patterns: list[Any]) -> None:
    """Refuses patterns of weights that are a tower's."""
    for pattern in patterns:
        if TOWERS & set(str(pattern).replace("\\", "").split(".")):
            t.refuse(
                "unfrozen_parameters",
                f"{show(pattern)}: a vision tower is trained as a whole, by `method.parts.vision: trained` in a native "
                "file",
            )


def _listed(t: Translator, key: str) -> list[Any]:
    asked = t.get(key, [])
    return asked if isinstance(asked, list) else [asked]
