"""Which of transformers' auto classes opens a model: one of text and more is opened whole, not as its text decoder
alone.

So the same model is trained, reopened and adapted: its tensors' names are those of the published files, and PEFT finds
an adapter's layers in what a user loads. Knows no family's name.
"""

from __future__ import annotations

from typing import Any

from manyhands.convert.towers import is_multimodal


def auto_class(config: Any) -> Any:
    """``AutoModelForMultimodalLM`` for a transformers config of text and more that it knows, else
    ``AutoModelForCausalLM``.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    whole = is_multimodal(config) and config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return AutoModelForMultimodalLM if whole else AutoModelForCausalLM


def auto_class_of(folder: Any, *, trust_remote_code: bool = False) -> Any:
    """The same for a model's folder."""
    from transformers import AutoConfig

    return auto_class(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code))
