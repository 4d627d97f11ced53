"""Train a multimodal model on text alone: what text never passes through is not loaded.

Vision and audio towers and their projectors stay on disk: they are not loaded, adapted, quantized, sharded or saved in
checkpoints, and what is exported takes them from the source, byte for byte. Knows only the module tree, no family's
name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from manyhands.core.errors import UserError


class TextNeedsTower(UserError, AttributeError):
    """Text reached a part that is left out. An ``AttributeError`` too, so that ``hasattr`` works on such a part."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"text of this model passes through {name}, which is left out where a model is trained on text alone",
            fix="use a model of a family whose text needs its decoder only",
        )


class LeftOut(nn.Module):
    """A placeholder without parameters for a tower, or for a parameter of the multimodal model itself."""

    device = torch.device("meta")  # some families read it before they know that there is no image

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise TextNeedsTower(self.name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise TextNeedsTower(f"{self.__dict__.get('name', 'a part')}.{name}") from None


def is_multimodal(config: Any) -> bool:
    """Whether a transformers config holds that of a text model beside others."""
    return config.get_text_config() is not config


def text_modules(model: Any) -> set[nn.Module] | None:
    """Every module of a multimodal model's text decoder; None for a model that is all text."""
    config = getattr(model, "config", None)
    return set(model.get_decoder().modules()) if config is not None and is_multimodal(config) else None


def leave_out_towers(model: Any) -> list[str]:
    """Replace by a ``LeftOut`` every module with parameters that is neither decoder, embeddings nor head.

    Parameters of the modules around these too (such as the token that ends a row of an image). Returns their names; a text
    model is not changed.
    """
    if not is_multimodal(model.config):
        return []
    text = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    _leave_out(model, {id(module) for module in text if module is not None}, "")
    return left_out(model)


def _leave_out(module: nn.Module, kept: set[int], prefix: str) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        delattr(module, name)
        module.add_module(name, LeftOut(prefix + name))
    for name, child in list(module.named_children()):
        if id(child) in kept or next(child.parameters(), None) is None:
            continue
        if any(id(inner) in kept for inner in child.modules()):
            _leave_out(child, kept, f"{prefix}{name}.")
        else:
            setattr(module, name, LeftOut(prefix + name))


def left_out(model: nn.Module) -> list[str]:
    """Names of the parts that ``leave_out_towers`` replaced."""
    return [name for name, module in model.named_modules() if isinstance(module, LeftOut)]


def is_left_out(name: str, parts: Iterable[str]) -> bool:
    """Whether a tensor's name is that of one of ``parts``, or of something within it."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)
