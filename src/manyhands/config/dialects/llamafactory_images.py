"""LLaMA-Factory's keys about images: which parts of a vision-language model are trained, where images are, how many
pixels they have.
"""

from __future__ import annotations

from manyhands.config.dialects import llamafactory_keys as keys
from manyhands.config.dialects.images import PROJECTOR_IS_KEPT, TOWER_ADAPTERS, split_projector
from manyhands.config.dialects.llamafactory_data import DatasetInfo
from manyhands.config.dialects.llamafactory_method import split_names
from manyhands.config.dialects.translation import Translator

# Its bounds of an image's pixels, which hold where nothing is written, by our keys.
PIXELS = {
    "image_max_pixels": ("data.shrink_images_above", 768 * 768),
    "image_min_pixels": ("data.enlarge_images_below", 32 * 32),
}
CROPS = {
    "image_do_pan_and_scan": "images are not cut into crops (pan and scan) beside themselves: set it to false",
    "crop_to_patches": "the model's own preprocessor_config.json says whether images are cut into tiles: write it "
    "there, and set this to false",
}


def map_images(t: Translator, info: DatasetInfo | None, has_images: bool) -> None:
    """Every key about images. ``has_images``: whether a training set names a column of them."""
    if not has_images:
        _note_no_images(t)
        return
    t.carry("data.images", True, "a data set names a column of images")
    if t.has("media_dir"):
        t.map("media_dir", "data.image_folder", str(t.get("media_dir")))
    elif info is not None and info.folder:
        t.carry("data.image_folder", info.folder, f"{keys.TOOL} looks for images in dataset_dir")
    t.already("media_dir")
    for key, (native, default) in PIXELS.items():
        if t.has(key):
            t.map(key, native, t.integer(key))
        t.carry(native, default, f"{keys.TOOL}'s default")
    for key, why in CROPS.items():
        t.only(key, (False, None), why)
    _map_parts(t)


def _note_no_images(t: Translator) -> None:
    for key in ("media_dir", *PIXELS, *CROPS):
        t.already(key, "no data set has images")
    for key in ("freeze_vision_tower", "freeze_multi_modal_projector"):
        if t.has(key) and not t.flag(key):
            t.ignore(key, "no data set has images: what they pass through is left as it is")
        t.already(key)
    t.only("freeze_language_model", (False, None), "no data set has images: nothing would be trained")
    if _saves_projector(t):
        t.ignore("additional_target", "no data set has images: the projector is left as it is")


def _saves_projector(t: Translator) -> bool:
    return split_projector(split_names(t.get("additional_target", "")))[1]


def _map_parts(t: Translator) -> None:
    """``freeze_*``: tower and projector are frozen unless the file says otherwise."""
    given = [key for key in keys.FREEZE_PARTS_DEFAULT if t.has(key)]
    frozen = {key: t.flag(key, default) for key, default in keys.FREEZE_PARTS_DEFAULT.items()}
    vision, projector, language = frozen.values()
    kind = t.get("finetuning_type", "lora")
    states = {True: "frozen", False: "trained"}
    if kind == "full":
        if vision and projector and language:
            t.contradict("freeze_language_model", "every part of the model is frozen: set one of these keys to false")
        parts = {"vision": states[vision], "projector": states[projector], "language": "frozen" if language else "full"}
    else:
        if kind == "lora" and not vision:
            t.refuse("freeze_vision_tower", TOWER_ADAPTERS)
        elif not vision:
            t.refuse("freeze_vision_tower", "layers of the vision tower are not trained by number: set it to true")
        if kind == "lora" and not projector and not _saves_projector(t):
            t.ignore("freeze_multi_modal_projector", PROJECTOR_IS_KEPT)
            given.remove("freeze_multi_modal_projector")
        if language:
            t.refuse("freeze_language_model", f"finetuning_type {kind} trains the language model: write full")
        saved = kind == "lora" and _saves_projector(t)
        trained = saved or (kind == "freeze" and not projector)
        given += ["additional_target"] * saved
        parts = {"vision": "frozen", "projector": states[not trained]}
    for key in given:
        t.map(key, "method.parts", parts)
    t.carry("method.parts", parts, f"{keys.TOOL}'s defaults")
