"""Train some weights of a model and leave the others as they are, chosen by name. Knows no files and no ranks.

Trained weights become float32 masters under their own names and are cast where they are used
(``modules_to_save.py``); frozen ones keep the dtype they compute in. Where everything is trained the model is as for
full training: masters, and no casts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from manyhands.config.patterns import reaches
from manyhands.config.schema import MethodSection
from manyhands.convert.modules_to_save import train_parameters
from manyhands.convert.protocol import BaseConverter
from manyhands.core.errors import UserError


def train_by_pattern(model: nn.Module, method: MethodSection, token_ids: Iterable[int] = ()) -> list[str]:
    """Train what ``method.train`` reaches (everything if it is empty) and ``method.freeze`` does not; names of what is
    trained.

    Works on meta and on a loaded model. A tied weight is one weight: it is reached by each of its names. UserError for
    a pattern that reaches nothing, for nothing trained, and for new tokens (``token_ids``) whose rows are not trained.
    """
    names = name_parameters(model)
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
    train_parameters(model, chosen, cast=len(chosen) < len(names))
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
    for pattern in patterns:
        hits = {key for key, own in names.items() if any(reaches(name, pattern) for name in own)}
        if not hits:
            raise UserError(
                f"{pattern!r} in {where} matches no weight",
                where=where,
                fix="name weights or modules of the model, or a pattern of them, for example model.layers.0 or *.mlp.*",
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
