"""What is taken for granted of a model whose images are inferred (``families.infer_images``), asked of its structure on
meta. What only numbers show, ``image_checks.py`` asks of the loaded model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from manyhands.core.errors import UserError
from manyhands.model.attention import count_positions


def check_structure(model: Any) -> None:
    """UserError where images reach a model in another way than ``families.infer_images`` takes for granted."""
    base = getattr(model, model.base_model_prefix, model)
    vision = getattr(model.config, "vision_config", None)
    why = ""
    if not hasattr(base, "get_image_features"):
        why = f"{type(base).__name__} has no get_image_features"
    elif needed := [
        name
        for name, parameter in inspect.signature(base.get_image_features).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ][1:]:
        why = f"features of images need {', '.join(needed)} beside pixel_values"
    elif count_positions(model.config) > 1 or hasattr(base, "get_rope_index"):
        why = "tokens of an image have positions by row and column"
    elif not getattr(vision, "image_size", None):
        why = "its vision_config does not say the size of an image"
    if why:
        raise UserError(
            f"images cannot be trained with models of type {model.config.model_type}",
            where="model.name",
            why=why,
            fix="leave the images out of the data, or use a model of a type in the table of docs/vision.md",
        )


def find_unused(
    model: Any, names: Iterable[str], features: Callable[[], tuple[torch.Tensor, Sequence[torch.Tensor]]]
) -> set[str]:
    """Those of the parameters ``names`` that ``features`` of one image on meta do not depend on."""
    outer = {name: model.get_parameter(name) for name in names}
    with torch.enable_grad():
        first, deeper = features()
        total = torch.stack([values.sum() for values in (first, *deeper)]).sum()
        found = torch.autograd.grad(total, list(outer.values()), allow_unused=True)
    return {name for name, gradient in zip(outer, found, strict=True) if gradient is None}
