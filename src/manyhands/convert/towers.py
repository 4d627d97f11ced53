"""A multimodal model that is trained on text alone: what its text never passes through is left out of memory.

Vision and audio towers and their projectors stay on disk: they are not loaded, adapted, quantised, sharded or saved in
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
    """Text met what is left out. An ``AttributeError`` too, so that whoever only asks what a module has is answered."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"Text of this model passes through {name}, which is left out where a model is trained on text alone.",
            fix="use a model of a family whose text needs its decoder only",
        )


class LeftOut(nn.Module):
    """Stands in the place of a tower, or of a parameter of the whole model's own; has no parameters."""

    device = torch.device("meta")  # asked by some families before they know that there is nothing to look at

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
    """Put a ``LeftOut`` in the place of every module with parameters that is neither decoder, embeddings nor head.

    And of parameters of the modules around these (what marks an image's end of row, say). Returns their names; nothing
    is done to a text model.
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
    """Names of the parts that ``leave_out_towers`` took away."""
    return [name for name, module in model.named_modules() if isinstance(module, LeftOut)]


def is_left_out(name: str, parts: Iterable[str]) -> bool:
    """Whether a tensor's name is that of one of ``parts``, or of something within it."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)
