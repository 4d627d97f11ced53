"""Train some weights of a model and leave the others as they are: chosen by name, or complete modules beside adapters
(PEFT's ``modules_to_save``). Knows no files and no ranks.

Trained weights become float32 masters under their own names; each use casts them to the dtype that the module computed
in before, as adapters do. A tied weight is trained in every module that holds it, and remains tied. Frozen weights keep
the dtype they compute in. Where everything is trained the model is as for full training: masters, and no casts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from manyhands.config.patterns import EMBEDDING_NAMES, HEAD_NAMES, expand, matches, reaches
from manyhands.config.schema import MethodSection
from manyhands.convert.protocol import BaseConverter
from manyhands.core.errors import UserError
from manyhands.model.structure import find_blocks, inside, text_parameters, with_class
from manyhands.model.weights import quantized_layers


def train_by_pattern(model: nn.Module, method: MethodSection, token_ids: Iterable[int] = ()) -> list[str]:
    """Train what ``method.train`` reaches (everything if it is empty) and ``method.freeze`` does not; names of what is
    trained. Of a model of text and images among the text's weights alone: ``method.parts`` is for the others.

    Works on meta and on a loaded model. A tied weight is one weight: it is reached by each of its names. UserError for
    a pattern that reaches nothing, for nothing trained, and for new tokens (``token_ids``) whose rows are not trained.
    """
    outside = {name for name, _ in model.named_parameters()} - set(text_parameters(model))
    names = {key: own for key, own in name_parameters(model).items() if own[0] not in outside}
    chosen = _reach(names, method.train, "method.train") if method.train else set(names)
    chosen -= _reach(names, method.freeze, "method.freeze")
    if not chosen:
        raise UserError(
            "no weight is trained",
            where="method.freeze",
            why="method.freeze reaches every weight that method.train does"
            if method.train
            else "method.freeze reaches every weight",
            fix="freeze less, or train more",
        )
    if any(True for _ in token_ids):
        _check_rows_of_tokens(model, chosen)
    model.requires_grad_(False)
    train_parameters(model, chosen, cast=len(chosen) < len(names) + len(outside))
    return [own[0] for key, own in names.items() if key in chosen]


def name_parameters(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _reach(names: dict[int, list[str]], patterns: Iterable[str], where: str) -> set[int]:
    """Ids of the parameters that any of ``patterns`` matches, by their own name or that of a module that holds them."""
    reached: set[int] = set()
    every_name = [name for own in names.values() for name in own]
    for pattern in patterns:
        parts = expand(pattern, every_name)
        hits = {key for key, own in names.items() if any(reaches(name, part) for name in own for part in parts)}
        if not hits:
            raise UserError(
                f"{pattern!r} in {where} matches no weight",
                where=where,
                fix="name weights or modules of the model, or a pattern of them, for example layers.0, layers[-2:] "
                "or *.mlp.*",
                details=[own[0] for own in names.values()][:20],
            )
        reached |= hits
    return reached


def _check_rows_of_tokens(model: Any, chosen: set[int]) -> None:
    modules = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    frozen = [what for what, module in modules.items() if module is not None and id(module.weight) not in chosen]
    if frozen:
        raise UserError(
            f"the rows of model.new_tokens would not be trained in the {' and the '.join(frozen)}",
            where="model.new_tokens",
            fix="let method.train reach embeddings and head (embed_tokens, lm_head), or leave model.new_tokens out",
        )


class TrainedPatterns(BaseConverter):
    """The weights that ``method.train`` and ``method.freeze`` choose."""

    def on_meta(self, model: Any) -> None:
        new_tokens = self.context.plan.new_tokens
        train_by_pattern(model, self.context.method, () if new_tokens is None else new_tokens.ids)


EMBEDDERS = (nn.Conv2d, nn.Conv3d, nn.Linear)  # of patches


class CastsItsMasters:
    """A base class put in front of a module's own: its forward pass uses its parameters cast to ``compute_dtype``.

    The casts take the masters' place during the forward pass. (torch.compile traces that; a copy of the module would
    break the graph.)
    """

    compute_dtype: torch.dtype
    _parameters: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        masters = dict(self._parameters)
        if isinstance(self, EMBEDDERS):  # towers cast images to the dtype of this weight, which is the master's
            args = tuple(x.to(self.compute_dtype) if x.is_floating_point() else x for x in args)
        try:
            for key, master in masters.items():
                self._parameters[key] = None if master is None else master.to(self.compute_dtype)
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._parameters.update(masters)


def find_modules_to_save(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Names of the modules that ``patterns`` match, outermost ones only.

    UserError for a pattern that matches none, or one that includes complete blocks: that would be full training.
    """
    blocks = list(find_blocks(model))
    names = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if name and next(module.parameters(), None) is not None
    ]
    chosen: list[str] = []
    for pattern in patterns:
        hits = [name for name in names if matches(name, pattern)] or _find_by_role(model, pattern)
        if not hits or any(block == name or inside(block, [name]) for name in hits for block in blocks):
            what = "includes complete blocks" if hits else "matches no module with weights"
            raise UserError(
                f"{pattern!r} in method.modules_to_save {what}",
                where="method.modules_to_save",
                fix="name the head, the embeddings, norms or parts of blocks; to train everything use method.name=full",
                details=sorted({name.rpartition(".")[2] for name in names if not name[-1].isdigit()})[:20],
            )
        chosen += hits
    return [name for name in dict.fromkeys(chosen) if not inside(name, set(chosen) - {name})]


def _find_by_role(model: Any, pattern: str) -> list[str]:
    """Embeddings or head by a name that another model, or the model's own file, has for them."""
    module = None
    if pattern in HEAD_NAMES:
        module = model.get_output_embeddings()
    elif pattern in EMBEDDING_NAMES:
        module = model.get_input_embeddings()
    return [name for name, one in model.named_modules() if one is module]


def train_fully(model: nn.Module, names: Collection[str]) -> None:
    """Make the parameters of the modules ``names`` trained masters, in float32 (float64 if they are).

    UserError for a quantized layer, which has no weight to train.
    """
    if quantized := [name for name in quantized_layers(model) if inside(name, names)]:
        raise UserError(
            "quantized layers cannot be fully trained",
            where="method.modules_to_save",
            fix="leave them out, so that adapters train beside them, or use method.name=lora",
            details=quantized[:20],
        )
    train_parameters(model, {id(p) for name in names for p in model.get_submodule(name).parameters()})


def train_parameters(model: nn.Module, wanted: Collection[int], *, cast: bool = True) -> None:
    """Make the parameters of these ids trained masters. With ``cast`` a module that casts them at each use takes the
    place of the one that holds them.
    """
    masters: dict[int, nn.Parameter] = {}
    casting: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in casting:  # under a second name
            model.set_submodule(name, casting[module])
            continue
        own = {key: p for key, p in module._parameters.items() if p is not None and id(p) in wanted}
        for key, parameter in own.items():
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            masters.setdefault(id(parameter), nn.Parameter(parameter.detach().to(dtype)))
            setattr(module, key, masters[id(parameter)])
        # A parameter of a whole model (``image_newline``) is cast by the model itself where it is used;
        # another class would also be one that transformers has no rules for.
        casts = cast and not isinstance(module, CastsItsMasters | PreTrainedModel)
        if own and casts:
            kind: Any = type(module)
            fields = {"compute_dtype": next(iter(own.values())).dtype}
            trained = type(f"Trained{kind.__name__}", (CastsItsMasters, kind), fields)
            casting[module] = with_class(module, trained)
            model.set_submodule(name, casting[module])


def fully_trained_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with parameters that are fully trained, by name; both names of a tied weight."""
    return {name: module for name, module in model.named_modules() if issubclass(type(module), CastsItsMasters)}
