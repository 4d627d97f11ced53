"""What is trained beside a frozen model, under PEFT's names: gathered to be saved, and filled from a PEFT adapter.

PEFT's names are ours behind a prefix, with one more word for rows of tokens. Must not know how parameters were sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from manyhands.convert.lora import adapted_layers
from manyhands.convert.new_tokens import ROWS, token_modules
from manyhands.convert.protocol import BaseConverter
from manyhands.convert.trainable import fully_trained_modules
from manyhands.core.errors import UserError
from manyhands.core.holding import full_shape, gather, local, local_part
from manyhands.facts.safetensors import read_headers
from manyhands.model.structure import text_modules
from manyhands.model.weights import stacked_layers

PEFT_PREFIX = "base_model.model."
PEFT_ROWS = f"token_adapter.{ROWS}"
WEIGHTS = "adapter_model.safetensors"
SAVED_BY_TRANSFORMERS = ".modules_to_save.default."  # between a module that is trained whole and a weight in it
LORA_PARAMETERS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


class StartingAdapter(BaseConverter):
    """Starts from the values of a PEFT adapter."""

    def after_load(self, model: nn.Module) -> None:
        assert self.context.plan.adapter is not None
        read_adapter(model, self.context.plan.adapter.folder)


def added_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that the frozen model does not have (LoRA A and B, magnitudes, rows of tokens), by our names."""
    added = {
        f"{name}.{key}": parameter
        for name, layer in adapted_layers(model).items()
        for key, parameter in layer.named_parameters()
        if key in LORA_PARAMETERS
    }
    return added | {f"{name}.{ROWS}": module.get_parameter(ROWS) for name, module in token_modules(model).items()}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All that an adapter's file holds, by PEFT's names: what was added, and fully trained modules; a tied weight
    once.
    """
    paths = expert_paths(model)
    found = {}
    for name, parameter in added_parameters(model).items():
        layer = next((layer for layer in paths if name.startswith(f"{layer}.")), "")
        own = _path_in_peft(model, paths, layer, name) if layer else name.replace(ROWS, PEFT_ROWS)
        found[f"{PEFT_PREFIX}{own}"] = parameter
    seen: set[int] = set()
    for name, module in fully_trained_modules(model).items():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{PEFT_PREFIX}{name}.{key}"] = parameter
    return found


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full tensors under PEFT's names and in its shapes. Where they are sharded every rank must call this."""
    stacked = _stacked(model)
    return {
        name: _as_in_peft(gather(parameter), stacked.get(name)) for name, parameter in adapter_parameters(model).items()
    }


def expert_paths(model: nn.Module) -> dict[str, str]:
    """Where PEFT has the factors of each adapted stack: it wraps the module of the experts once for each of their
    parameters, the last one outermost.
    """
    paths: dict[str, str] = {}
    adapted = adapted_layers(model)
    for name in reversed([name for name in stacked_layers(model) if name in adapted]):
        path = name.rpartition(".")[0]
        while path in paths.values():
            path += ".base_layer"
        paths[name] = path
    return paths


class _Stacked(NamedTuple):
    """How PEFT has a factor of g experts: B (o, r g) with the expert as its fastest index, A (g r, i)."""

    num_groups: int
    is_b: bool
    # PEFT takes a stack (g, i, o) for (g, o, i) unless its class has ``is_transposed``: A is then our B, transposed
    is_exchanged: bool


def _is_exchanged(model: nn.Module, stack: str) -> bool:
    return getattr(model.get_submodule(stack.rpartition(".")[0]), "exchanges_factors", False)


def _path_in_peft(model: nn.Module, paths: Mapping[str, str], stack: str, name: str) -> str:
    key = name.removeprefix(stack)
    if _is_exchanged(model, stack):
        key = key.translate(str.maketrans("AB", "BA"))
    return paths[stack] + key


def _stacked(model: nn.Module) -> dict[str, _Stacked]:
    """Factors of experts by PEFT's names."""
    layers: dict[str, Any] = dict(adapted_layers(model))
    return {
        f"{PEFT_PREFIX}{path}.lora_{side}.weight": _Stacked(layers[name].num_groups, side == "B", exchanged)
        for name, path in expert_paths(model).items()
        for exchanged in (_is_exchanged(model, name),)
        for side in "AB"
    }


def _as_in_peft(factor: torch.Tensor, stacked: _Stacked | None) -> torch.Tensor:
    """(g o, r) -> (o, r g), or of exchanged ones (g r, i) -> (i, r g) and (g o, r) -> (g r, o); others as they are."""
    if stacked is None:
        return factor
    groups = factor.unflatten(0, (stacked.num_groups, -1))
    groups = groups.mT if stacked.is_exchanged else groups
    return groups.permute(1, 2, 0).flatten(1) if stacked.is_b else groups.flatten(0, 1)


def _from_peft(stored: Any, stacked: _Stacked | None) -> Any:
    """The reverse, read in full but for a factor that is as it is."""
    if stacked is None or not (stacked.is_b or stacked.is_exchanged):
        return stored
    num = stacked.num_groups
    groups = stored[:].unflatten(1, (-1, num)).permute(2, 0, 1) if stacked.is_b else stored[:].unflatten(0, (num, -1))
    return (groups.mT if stacked.is_exchanged else groups).flatten(0, 1)


def _shape_in_peft(parameter: torch.Tensor, stacked: _Stacked | None) -> tuple[int, ...]:
    return tuple(_as_in_peft(torch.empty(full_shape(parameter), device="meta"), stacked).shape)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of fully trained tied weights -> their names in ``adapter_state``. PEFT expects the weight under
    each.
    """
    first = {id(parameter): name for name, parameter in adapter_parameters(model).items()}
    return {
        name: first[id(parameter)]
        for module_name, module in fully_trained_modules(model).items()
        for key, parameter in module.named_parameters(recurse=False)
        if (name := f"{PEFT_PREFIX}{module_name}.{key}") != first[id(parameter)]
    }


def whole_parts(model: nn.Module) -> list[str]:
    """Names of what is trained whole around the text of a multimodal model: outermost modules all of whose weights
    are.
    """
    text = text_modules(model)
    if text is None:
        return []
    modules = fully_trained_modules(model)
    trained = {id(p) for module in modules.values() for p in module.parameters(recurse=False)}
    holders = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}  # type: ignore[operator]
    outer = [name for name, module in modules.items() if module not in text and id(module) not in holders]
    return list(dict.fromkeys(_outermost(model, name, trained) for name in outer))


def _outermost(model: nn.Module, name: str, trained: Collection[int]) -> str:
    words = name.split(".")
    for above in (".".join(words[:end]) for end in range(1, len(words))):
        module = model.get_submodule(above)
        if type(module) is not nn.ModuleList and all(
            id(p) in trained for p in module.parameters()
        ):  # PEFT wraps no list
            return above
    return name


def second_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Of these of PEFT's names those of a projector or a tower that is trained whole: by the name under which
    transformers' ``load_adapter`` looks for it, which does not read PEFT's own.
    """
    prefixes = {f"{PEFT_PREFIX}{part}." for part in whole_parts(model)}
    return {
        prefix.removesuffix(".") + SAVED_BY_TRANSFORMERS + name.removeprefix(prefix): name
        for name in names
        for prefix in prefixes
        if name.startswith(prefix)
    }


def check_adapter(model: nn.Module, folder: str | Path) -> None:
    """UserError unless names and shapes of a PEFT adapter's folder are the model's. Reads the header only."""
    path = Path(folder) / WEIGHTS
    _refuse_misfit(model, {name: tensor.shape for name, tensor in read_headers([path]).items()}, where=str(path))


@torch.no_grad()
def read_adapter(model: nn.Module, folder: str | Path) -> None:
    """Copy the tensors of a PEFT adapter's folder into the model, sharded or not; each rank reads only its slices.
    UserError unless names and shapes agree exactly.
    """
    path = Path(folder) / WEIGHTS
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = file.keys()  # a safetensors file is no iterator
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            _fill(model, shapes, file.get_slice, where=str(path))
    except (OSError, SafetensorError) as error:
        raise UserError("the adapter's weights cannot be read", where=str(path), why=str(error)) from error


def _fill(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Any],
    where: str,
) -> None:
    _refuse_misfit(model, shapes, where)
    parameters = adapter_parameters(model)
    aliases = {name: parameters[first] for name, first in tied_names(model).items()}
    stacked = _stacked(model)
    for name, parameter in parameters.items():
        if name in shapes and local(parameter).numel():
            local(parameter).copy_(local_part(parameter, _from_peft(read(name), stacked.get(name))))
    for name in shapes.keys() & aliases.keys():
        parameter = aliases[name]
        if not torch.equal(own := local(parameter), local_part(parameter, read(name)).to(own.device, own.dtype)):
            raise UserError(
                f"the adapter holds {name} and the weight that it is tied to with different values",
                where=where,
                why="it was trained untied; this model's embeddings and head share one weight",
                fix="set tie_word_embeddings to false in the base model's config.json, or leave method.adapter out",
            )


def _refuse_misfit(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    parameters = adapter_parameters(model)
    aliases = {name: parameters[first] for name, first in tied_names(model).items()}
    aliases |= {name: parameters[first] for name, first in second_names(model, parameters).items()}
    # Rows of tokens that the adapter does not have keep the frozen values: a run may add tokens to an adapter.
    may_lack = (
        {name for name in parameters if name.endswith(PEFT_ROWS)}
        if not any(name.endswith(PEFT_ROWS) for name in shapes)
        else set()
    )
    wrong = [f"missing: {name}" for name in sorted(parameters.keys() - shapes.keys() - may_lack)]
    wrong += [f"unexpected: {name}" for name in sorted(shapes.keys() - parameters.keys() - aliases.keys())]
    stacked = _stacked(model)
    wanted = {name: _shape_in_peft(parameter, stacked.get(name)) for name, parameter in parameters.items()}
    wrong += [
        f"shape of {name}: {shapes[name]}, the model has {shape}"
        for name, shape in sorted(wanted.items())
        if name in shapes and shapes[name] != shape
    ]
    if wrong:
        raise UserError(
            "the adapter does not fit the model",
            where=where,
            fix="use the same base model, rank and target modules",
            details=wrong[:20],
        )
