"""What several tools' files say of the parts of a vision-language model, in their words for modules. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.config.sources import IMAGES
from manyhands.config.text import names

# Modules that lead a tower's features to the text, as transformers' models call them.
PROJECTORS = names("multi_modal_projector merger deepstack_merger_list connector")
TOWER_ADAPTERS = (
    "adapters are for the language model alone: set it to true, or train all weights of the tower by "
    "`method.parts.vision: trained` in a native file"
)
PROJECTOR_IS_KEPT = (
    "adapters are for the language model alone, and the projector stays as it is: name it as a module to save, which "
    "trains it, or write `method.parts.projector: trained` in a native file"
)


def is_projector(module: Any) -> bool:
    """Whether a name of a module to save (``visual.merger``) is a projector's."""
    return any(part in PROJECTORS for part in str(module).split("."))


def split_projector(modules: Sequence[Any]) -> tuple[list[str], bool]:
    """(the other modules to save, whether the projector is one)."""
    return [str(name) for name in modules if not is_projector(name)], any(map(is_projector, modules))


def takes_images(model_config: Mapping[str, Any] | None) -> bool:
    """Whether config.json is that of a model with a vision tower."""
    return model_config is not None and bool(model_config.get("vision_config"))


def row_has_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column of images, or parts that are images."""
    if any(row.get(name) not in (None, "", []) for name in IMAGES):
        return True
    turns: Sequence[Any] = next((row[name] for name in ("messages", "prompt") if isinstance(row.get(name), list)), [])
    parts = [part for turn in turns if isinstance(turn, Mapping) for part in turn.get("content") or ()]
    return any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)
