"""Tiny models of images and text with everything that prepares images: processor files, tokens and a chat template.

``write_tiny_vision`` is ``write_tiny_multimodal`` with image tokens of their own (a byte is no image) and images of
28 x 28 pixels a square, or patches of 14 x 14; ``processor_of`` builds the family's processor in transformers from the
same folder, as a reference. Imports torch only when called.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from manyhands.core.files import write_json
from tests.support import multimodal, other_vision, tiny

FAMILIES = ("gemma3", "qwen2_5_vl", "qwen3_vl", "llava", "llava_onevision", "idefics3", "smolvlm", "internvl", "gemma4")
# whose layout is that of one of these: prepared and checked, not trained in tests
LIKE_THEM = (
    "qwen2_vl",
    "qwen3_5",
    "llava_next",
    "llava_next_video",
    "glm4v",
    "glm46v",
    "glm4v_moe",
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "exaone4_5",
    "mistral3",
    "lighton_ocr",
    "gemma4 experts",
    "mistral3 experts",
)
CHAT = (
    "{{% for message in messages %}}<|im_start|>{{{{ message['role'] + '\\n' }}}}"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}"
    "<|im_end|>\n{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
_QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_IDEFICS_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
_SQUARE = {"height": 28, "width": 28}
_CANVASES = [[28, 28], [28, 56], [56, 28], [56, 56]]
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

# Tokens by name, what the template writes for an image, preprocessor_config.json, processor_config.json, and of
# config.json (beside the ids of the tokens) what goes with them.
KINDS: dict[str, tuple[dict[str, str], str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "<start_of_image>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE},
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        {"image_token_index": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
    ),
    **{
        kind: (
            _QWEN_TOKENS,
            _QWEN_IMAGE,
            {
                "image_processor_type": "Qwen2VLImageProcessorFast",
                "size": {"shortest_edge": 784, "longest_edge": 12_544},
            },
            {"processor_class": "Qwen3VLProcessor"},
            {f"{name}_id": name for name in _QWEN_TOKENS},
        )
        for kind in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    },
    **{
        kind: (
            _QWEN_TOKENS,
            _QWEN_IMAGE,
            {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 28 * 28, "max_pixels": 112 * 112},
            {"processor_class": processor},
            {f"{name}_id": name for name in _QWEN_TOKENS},
        )
        for kind, processor in {
            "qwen2_5_vl": "Qwen2_5_VLProcessor",
            "qwen2_vl": "Qwen2VLProcessor",
            "exaone4_5": "Exaone4_5_Processor",
        }.items()
    },
    **{
        kind: (
            {"image_token": "<|image|>", "video_token": "<|video|>"},
            "<|begin_of_image|><|image|><|end_of_image|>",
            {
                "image_processor_type": f"{name}ImageProcessor",
                "size": {"shortest_edge": 2 * 784, "longest_edge": 2 * 12_544},
            },
            {"processor_class": f"{name}Processor"},
            {"image_token_id": "image_token", "video_token_id": "video_token"},
        )
        for kind, name in {"glm4v": "Glm4v", "glm46v": "Glm46V", "glm4v_moe": "Glm4v"}.items()
    },
    **{
        kind: (
            {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
            "[IMG]",
            {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 84}, "patch_size": 14},
            {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
            {"image_token_index": "image_token"},
        )
        for kind in ("mistral3", "mistral3 experts")
    },
    "lighton_ocr": (
        {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
        "<|image_pad|>",
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 84}, "patch_size": 28},
        {"processor_class": "LightOnOcrProcessor", "patch_size": 14, "spatial_merge_size": 2},
        {"image_token_id": "image_token"},
    ),
    **{
        kind: (
            {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
            | {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
            "<|image|>",
            {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
            {"processor_class": "Gemma4Processor", "image_seq_length": 70},
            {"image_token_id": "image_token", "boi_token_id": "boi_token", "eoi_token_id": "eoi_token"},
        )
        for kind in ("gemma4", "gemma4 experts")
    },
    **{
        f"llava_next{video}": (
            {"image_token": "<image>"} | ({"video_token": "<video>"} if video else {}),
            "<image>\n",
            {
                "image_processor_type": "LlavaNextImageProcessor",
                "size": {"shortest_edge": 28},
                "crop_size": _SQUARE,
                "image_grid_pinpoints": _CANVASES[1:],
            },
            other_vision.LLAVA_PROCESSOR | {"processor_class": kind},
            {"image_token_index": "image_token"} | ({"video_token_index": "video_token"} if video else {}),
        )
        for video, kind in {"": "LlavaNextProcessor", "_video": "LlavaNextVideoProcessor"}.items()
    },
    "llava": (
        {"image_token": "<image>"},
        "<image>\n",
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": _SQUARE},
        other_vision.LLAVA_PROCESSOR,
        {"image_token_index": "image_token"},
    ),
    "llava_onevision": (
        {"image_token": "<image>", "video_token": "<video>"},
        "<image>\n",
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": _SQUARE,
            "image_grid_pinpoints": _CANVASES,
        },
        {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        {"image_token_index": "image_token", "video_token_index": "video_token"},
    ),
    **{
        kind: (
            _IDEFICS_TOKENS,
            "<image>",
            {
                "image_processor_type": f"{name}ImageProcessor",
                "size": {"longest_edge": 56},
                "max_image_size": {"longest_edge": 28},
            },
            {"processor_class": f"{name}Processor", "image_seq_len": 1},
            {"image_token_id": "image_token"},
        )
        for kind, name in {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}.items()
    },
    "internvl": (
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "<IMG_CONTEXT>\n",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": _SQUARE, "max_patches": 3},
        {"processor_class": "InternVLProcessor", "image_seq_length": 1},
        {"image_token_id": "context_image_token"},
    ),
}  # fmt: skip
# Of config.json, so that a model makes as many features of an image as its processor writes placeholders.
_MODEL: dict[str, dict[str, Any]] = {
    "llava_onevision": {"image_grid_pinpoints": _CANVASES, "vision_feature_select_strategy": "full"},
    "llava_next": {"image_grid_pinpoints": _CANVASES[1:]},
    "llava_next_video": {"image_grid_pinpoints": _CANVASES[1:]},
    "idefics3": {"scale_factor": 2},
    "smolvlm": {"scale_factor": 2},
    "internvl": {"image_seq_length": 1, "downsample_ratio": 0.5},
}
_NO_VIDEO = {"num_frames": 1, "fps": 1, "model_input_names": [], "merge_size": 2}
MORE = 16  # rows of the vocabulary behind the bytes and four special tokens, more than any family has tokens


def add_processor(folder: Path, family: str, template: str | None = None, bos: str | None = None) -> dict[str, int]:
    """Writes tokenizer, chat template and processor files of ``family`` into a folder; returns ids by the field of
    config.json."""
    tokens, image, pre, processor, fields = (KINDS | other_vision.KINDS)[family]
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokens.values()]}, replace_extra_special_tokens=False)
    if bos is not None:
        tokenizer.bos_token = bos
    tokenizer.chat_template = (template or CHAT).format(image=image) if template is None else template
    tokenizer.save_pretrained(folder)
    _name_tokens(folder, tokens)
    write_json(folder / "preprocessor_config.json", pre)
    write_json(folder / "processor_config.json", processor)
    return {field: int(tokenizer.convert_tokens_to_ids(tokens[name])) for field, name in fields.items()}


def _name_tokens(folder: Path, tokens: dict[str, str]) -> None:
    """As publishers name the tokens of images: attributes of the tokenizer."""
    import json

    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    write_json(path, values | {"model_specific_special_tokens": tokens})


def write_tiny_processor(folder: Path, family: str, **how: Any) -> Path:
    """A folder with tokenizer, processor and a config.json of the family, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = add_processor(folder, family, **how)
    write_json(folder / "config.json", {"model_type": family.partition(" ")[0], "vision_config": {}, **ids})
    return folder


def write_tiny_vision(folder: str | Path, family: str, dtype: str = "float32", seed: int = 0) -> Path:
    """A checkpoint of ``family`` that takes images. Returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ids = add_processor(folder, family)
    kind, own, towers, fields = (multimodal.WHOLE | other_vision.LIKE_OTHERS | other_vision.MODELS)[family]
    vocabulary = {"vocab_size": tiny.VOCAB_SIZE + MORE}
    changed = (kind, own | vocabulary, towers, fields | ids | _MODEL.get(family, {}))
    multimodal.write_tiny_multimodal(folder, dtype, seed, family, changed)
    add_processor(folder, family)  # over what a model of text alone has
    return folder


def processor_of(folder: Path, family: str) -> Any:
    """The family's own processor, with images by PIL; without torchvision transformers cannot open most of them."""
    from manyhands.data.images.processor import ImageProcessor, family_of
    from manyhands.data.tokenize.tokenizer import load_tokenizer

    layout = family_of(folder).images
    assert layout is not None
    home = other_vision.HOMES.get(family, family)
    if home in ("pixtral", "gemma4"):  # they take a size from the module of torchvision, which the other has too
        pil = importlib.import_module(f"transformers.models.{home}.image_processing_pil_{home}")
        sys.modules.setdefault(f"transformers.models.{home}.image_processing_{home}", pil)
    module = importlib.import_module(f"transformers.models.{home}.processing_{home}")
    values = dict((KINDS | other_vision.KINDS)[family][3])
    kind = getattr(module, values.pop("processor_class"))
    tokenizer = load_tokenizer(folder)
    if family == "smolvlm":
        module.num2words = str  # of videos alone
    image_processor = ImageProcessor(folder, layout).own
    others = {"video_processor", "feature_extractor"}.intersection(kind.get_attributes())
    more = {name: SimpleNamespace(**_NO_VIDEO) for name in others}
    kind = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    parts = {"image_processor": image_processor, "tokenizer": tokenizer, **more}
    return kind(**parts, chat_template=tokenizer.chat_template, **values)
