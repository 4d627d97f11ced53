"""Weights trained beside frozen ones: full modules beside adapters (PEFT's ``modules_to_save``), or any parameters.
Knows no files and no ranks.

Trained weights become float32 masters under their own names; each use casts them to the dtype that the module computed
in before, as adapters do. A tied weight is trained in every module that holds it, and remains tied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from manyhands.config.patterns import matches
from manyhands.convert.nf4 import Nf4Linear
from manyhands.core.errors import UserError
from manyhands.model.structure import find_blocks


class CastsItsMasters:
    """A base class put in front of a module's own: its forward pass uses its parameters cast to ``compute_dtype``.

    The casts take the masters' place during the forward pass. (torch.compile traces that; a copy of the module would
    break the graph.)
    """

    compute_dtype: torch.dtype
    _parameters: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        masters = dict(self._parameters)
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
        hits = [name for name in names if matches(name, pattern)]
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


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``modules`` or a part of one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def train_fully(model: nn.Module, names: Collection[str]) -> None:
    """Make the parameters of the modules ``names`` trained masters, in float32 (float64 if they are).

    UserError for a layer in NF4, which has no weight to train.
    """
    in_nf4 = [name for name, module in model.named_modules() if isinstance(module, Nf4Linear) and inside(name, names)]
    if in_nf4:
        raise UserError(
            "layers in 4 bits cannot be fully trained",
            where="method.modules_to_save",
            fix="leave them out, so that adapters train beside them, or use method.name=lora",
            details=in_nf4[:20],
        )
    train_parameters(model, {id(p) for name in names for p in model.get_submodule(name).parameters()})


def train_parameters(model: nn.Module, wanted: Collection[int], *, cast: bool = True) -> None:
    """Make the parameters of these ids trained masters. With ``cast`` the module that holds them casts them at
    each use.
    """
    masters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own = {key: p for key, p in module._parameters.items() if p is not None and id(p) in wanted}
        for key, parameter in own.items():
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            masters.setdefault(id(parameter), nn.Parameter(parameter.detach().to(dtype)))
            setattr(module, key, masters[id(parameter)])
        if own and cast and not isinstance(module, CastsItsMasters):
            kind = type(module)
            dtype = next(iter(own.values())).dtype
            module.__class__ = type(f"Trained{kind.__name__}", (CastsItsMasters, kind), {"compute_dtype": dtype})


def fully_trained_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with parameters that are fully trained, by name; both names of a tied weight."""
    return {name: module for name, module in model.named_modules() if issubclass(type(module), CastsItsMasters)}
