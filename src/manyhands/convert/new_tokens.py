"""Rows of new tokens, trained beside adapters while the rest of embeddings and head stays frozen. Knows no files.

PEFT's ``trainable_token_indices``: the embedding, and a head that is not tied to it, hold ``trainable_tokens_delta``
(k, e) which REPLACES the weight's rows of k token ids. Training the full matrices (``modules_to_save``) would take
14 bytes more for each of their values, 4 GiB for 128,256 tokens of 2,048 dimensions, to change a handful of rows; and
PEFT puts the trained rows onto a base of any size that has them, whatever their values.

Shapes: k trained tokens, e hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.convert.protocol import BaseConverter
from manyhands.convert.trainable import CastsItsMasters
from manyhands.core.errors import UserError
from manyhands.core.holding import fill_from, select_rows
from manyhands.model.load import UNSTORED

ROWS, IDS = "trainable_tokens_delta", "trainable_token_ids"  # the first is PEFT's name


def add_token_rows(model: Any, token_ids: Iterable[int]) -> None:
    """Let the rows of ``token_ids`` be trained in embedding and head, unless these are fully trained anyway.

    Adds parameters in float32 (float64 if the weights are), to be filled by ``fill_token_rows`` once the weights are
    there. UserError for a head with a bias, which PEFT would drop.
    """
    ids = tuple(sorted(set(token_ids)))
    if not ids:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if not isinstance(embedding, CastsItsMasters):
        _hold_rows(embedding, ids)
        embedding.register_forward_hook(_ReplaceRows(ids, embedding).embed)
    if head is None or isinstance(head, CastsItsMasters):
        return
    if head.bias is not None:
        raise UserError(
            f"new tokens cannot be trained beside adapters in {type(model).__name__}",
            where="model.new_tokens",
            why="its head has a bias, which PEFT's trained tokens leave out",
            fix="train the full head with method.modules_to_save=[lm_head], or use method.name=full",
        )
    if not tied:
        _hold_rows(head, ids)
    head.register_forward_hook(_ReplaceRows(ids, embedding if tied else head).project)


def _hold_rows(module: Any, ids: tuple[int, ...]) -> None:
    weight = module.weight
    rows = torch.empty(
        len(ids), weight.shape[1], device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32)
    )
    module.register_parameter(ROWS, nn.Parameter(rows))
    setattr(module, IDS, ids)
    setattr(module, UNSTORED, (ROWS,))


class _ReplaceRows:
    """Forward hooks that replace the frozen rows by the trained ones of ``holder``."""

    def __init__(self, ids: tuple[int, ...], holder: nn.Module) -> None:
        self.ids, self.holder = torch.tensor(ids), holder

    def _ids_on(self, device: torch.device) -> torch.Tensor:
        if self.ids.device != device:
            self.ids = self.ids.to(device)  # once
        return self.ids

    def embed(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Token ids (...) and their frozen vectors (..., e) -> (..., e)."""
        ids = self._ids_on(output.device)
        position = torch.searchsorted(ids, args[0]).clamp(max=len(ids) - 1)
        vectors = F.embedding(position, getattr(self.holder, ROWS).to(output.dtype))
        scale = getattr(module, "embed_scale", None)  # some families scale in their embedding's forward pass
        if scale is not None:
            vectors = vectors * (scale.to(output.dtype) if isinstance(scale, torch.Tensor) else scale)
        return torch.where((ids[position] == args[0])[..., None], vectors, output)

    def project(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., e) and their logits (..., v), changed in place: a copy would hold
        another chunk of logits.
        """
        logits = F.linear(args[0], getattr(self.holder, ROWS).to(output.dtype))
        return output.index_copy_(-1, self._ids_on(output.device), logits)


@torch.no_grad()
def fill_token_rows(model: nn.Module) -> None:
    """Initialize the trained rows to the frozen ones. A collective where these are sharded."""
    for module in token_modules(model).values():
        fill_from(getattr(module, ROWS), select_rows(module.weight, getattr(module, IDS)))  # type: ignore[arg-type]


def token_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold trained rows, by name."""
    return {name: module for name, module in model.named_modules() if ROWS in module._parameters}


def token_indices(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Ids of the trained rows, by the name of the module that holds them."""
    return {name: getattr(module, IDS) for name, module in token_modules(model).items()}


class TrainedTokens(BaseConverter):
    """The rows of the run's new tokens, beside adapters."""

    def on_meta(self, model: Any) -> None:
        new_tokens = self.context.plan.new_tokens
        add_token_rows(model, () if new_tokens is None else new_tokens.ids)

    def after_load(self, model: nn.Module) -> None:
        fill_token_rows(model)
