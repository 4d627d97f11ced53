"""What a transformers model consists of: the class that opens it, its blocks, its text and the towers around that.

Blocks and text are found by the module tree alone. A multimodal model is opened as a whole, so that the same model is
trained, reopened and adapted: its tensors' names are those of the published files, and PEFT finds an adapter's layers
in what a user loads. Trained on text, what text never passes through (vision and audio towers, their projectors) is
left out of memory, neither loaded nor adapted, quantized, sharded or saved in checkpoints, and what is exported takes
it from the source, byte for byte. With images ``model/multimodal.py`` lets them pass through towers and projectors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from manyhands import families
from manyhands.core.errors import UserError


def hugging_face_model(model: Any) -> Any:
    """The transformers model itself, or the one inside a wrapper that calls it ``model``."""
    from transformers import PreTrainedModel

    inner = model if isinstance(model, PreTrainedModel) else model.model
    assert isinstance(inner, PreTrainedModel)
    return inner


def auto_class(config: Any) -> Any:
    """``AutoModelForMultimodalLM`` for a transformers config of text and more, or of a text that it alone knows, else
    ``AutoModelForCausalLM``.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    whole = config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES and (
        is_multimodal(config) or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    return AutoModelForMultimodalLM if whole else AutoModelForCausalLM


def auto_class_of(folder: Any, *, trust_remote_code: bool = False) -> Any:
    """The same for a model's folder."""
    from transformers import AutoConfig

    return auto_class(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code))


def is_multimodal(config: Any) -> bool:
    """Whether a transformers config holds that of a text model beside others."""
    return config.get_text_config() is not config


def base_path(model: nn.Module) -> str:
    """The name of the module whose result the head takes; "" where there is none. A few models have it under another
    name than their prefix, or within a text model that has the head.
    """
    prefix = getattr(model, "base_model_prefix", "")
    if prefix in model._modules or "lm_head" in model._modules:
        return prefix if prefix in model._modules else "model" if "model" in model._modules else ""
    text = model._modules.get("language_model")
    inner = base_path(text) if text is not None and "lm_head" in text._modules else ""
    return f"language_model.{inner}" if inner else ""


def find_decoder(model: Any) -> Any:
    """The text decoder without a head."""
    decoder = model.get_decoder()
    return decoder.get_submodule(base_path(decoder)) if "lm_head" in decoder._modules else decoder


def text_modules(model: Any) -> set[nn.Module] | None:
    """Every module of a multimodal model's text decoder; None for a model that is all text."""
    config = getattr(model, "config", None)
    return set(model.get_decoder().modules()) if config is not None and is_multimodal(config) else None


def text_parameters(model: Any) -> dict[str, nn.Parameter]:
    """The parameters of decoder, embeddings and head by name; all of a model that is all text."""
    text = text_modules(model)
    named = dict(model.named_parameters())
    if text is None:
        return named
    text |= {module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None}
    own = {id(parameter) for module in text for parameter in module.parameters()}
    return {name: parameter for name, parameter in named.items() if id(parameter) in own}


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder blocks by their names in ``model``, in order.

    A block is an outermost ``GradientCheckpointingLayer``: transformers gives that base to every layer that is
    repeated. Of a multimodal model the text decoder's count, not those of its towers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks: dict[str, nn.Module] = {}
    text = text_modules(model)
    for name, module in model.named_modules():
        if text is not None and module not in text:
            continue
        inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            blocks[name] = module
    if not blocks:
        raise UserError(
            f"the model {type(model).__name__} has no blocks that can be found",
            where="model.name",
            why="none of its layers is a transformers GradientCheckpointingLayer",
            fix="use a decoder family whose implementation comes with transformers",
        )
    return blocks


def find_tower_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of the towers of a multimodal model, by name, in order; {} where these are left out."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    text = text_modules(model) or set(model.modules())
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if isinstance(module, GradientCheckpointingLayer) and module not in text and not inside:
            blocks[name] = module
    return blocks


def find_mlps(block: nn.Module) -> list[nn.Module]:
    """A block's dense MLPs, whose result for a token depends on that token alone.

    These are its modules that take hidden states and nothing else, and whose own modules with weights are all linear
    layers: neither attention, nor a mixer, nor experts.
    """

    def is_mlp(module: nn.Module) -> bool:
        weighted = [child for child in module.children() if next(child.parameters(), None) is not None]
        takes = inspect.signature(type(module).forward).parameters
        return bool(weighted) and all(isinstance(child, nn.Linear) for child in weighted) and len(takes) == 2

    return [module for module in block.children() if is_mlp(module)]


def with_class(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A module of class ``kind`` that shares all else with ``module``: parameters, buffers, children, hooks, mode."""
    new = kind.__new__(kind)
    vars(new).update(vars(module))
    return new


def set_attention(model: Any, implementation: str) -> None:
    """Let the text of ``model`` compute attention so; towers keep theirs, which knows no documents."""
    config = model.config
    text = config.get_text_config()
    keys = [key for key in config.sub_configs if getattr(config, key, None) is text]
    model.set_attn_implementation(dict.fromkeys(["", *keys], implementation) if keys else implementation)


def find_experts(model: nn.Module) -> dict[str, Any]:
    """The modules that hold a block's routed experts, by name: those of transformers'
    ``use_experts_implementation``, and of classes that a family names.
    """
    named = families.weighing_inputs()
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ in named or (hasattr(module, "is_concatenated") and hasattr(module, "has_gate"))
    }


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer inside a block, by its full name; neither embeddings nor the head, nor routers, nor layers
    that are not called.
    """
    return {name: linear for name, linear, routes in _linears_of_blocks(model) if not routes}


def shared_gates(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers whose one output weighs a shared expert, by their full names."""
    return {name: linear for name, linear, routes in _linears_of_blocks(model) if routes and linear.out_features == 1}


def _linears_of_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Linear, bool]]:
    """Full name, layer, and whether it routes tokens."""
    numbers = {name: experts.num_experts for name, experts in find_experts(model).items()}
    bypassed = families.bypassed_linears() or ("-",)
    for block_name, block in find_blocks(model).items():
        for name, module in block.named_modules():
            full_name = f"{block_name}.{name}"
            if isinstance(module, nn.Linear) and not full_name.endswith(bypassed):
                yield full_name, module, families.routes(full_name, module.out_features, numbers)


class TextNeedsTower(UserError, AttributeError):
    """Text reached a part that is left out. An ``AttributeError`` too, so that ``hasattr`` works on such a part."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"text of this model passes through {name}, which is left out where a model is trained on text alone",
            where="model.name",
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


def leave_out_towers(model: Any, which: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Replace by a ``LeftOut`` every module with parameters that is neither decoder, embeddings nor head.

    Parameters of the modules around these too (such as the token that ends a row of an image). Returns their names; a
    text model is not changed. ``which`` says whether the one of this name is left out.
    """
    if not is_multimodal(model.config):
        return []
    text = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    _leave_out(model, {id(module) for module in text if module is not None}, "", which)
    return left_out(model)


def _leave_out(module: nn.Module, kept: set[int], prefix: str, which: Callable[[str], bool]) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        if which(prefix + name):
            delattr(module, name)
            module.add_module(name, LeftOut(prefix + name))
    for name, child in list(module.named_children()):
        if id(child) in kept or next(child.parameters(), None) is None:
            continue
        if any(id(inner) in kept for inner in child.modules()):
            _leave_out(child, kept, f"{prefix}{name}.", which)
        elif which(prefix + name):
            setattr(module, name, LeftOut(prefix + name))


def left_out(model: nn.Module) -> list[str]:
    """Names of the parts that ``leave_out_towers`` replaced."""
    return [name for name, module in model.named_modules() if isinstance(module, LeftOut)]


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether ``name`` is that of one of ``modules``, or of something within it."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)
