"""Embeddings and head with more rows than their files, for new tokens. Must not know how parameters were sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyhands.facts.types import NewTokens

CHUNK_ROWS = 8192  # read at once for the mean


def rows_by_token(model: Any) -> set[str]:
    """Names of the parameters with one row for each token: those of embedding and head."""
    modules: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {
        f"{name}.{key}"
        for name, module in model.named_modules(remove_duplicate=False)
        if any(module is m for m in modules)
        for key in ("weight", "bias")
        if module._parameters.get(key) is not None
    }


def resize_embeddings(model: Any, num_tokens: int) -> None:
    """Give a loaded transformers model at least ``num_tokens`` rows in embedding and head; the values of new rows are
    undefined.
    """
    if num_tokens > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)


@dataclass(frozen=True)
class Resized:
    """A file's matrix with the rows of new tokens, sliced like the file.

    Rows of tokens that the tokenizer did not know, and rows that the file has not, are the mean of the rows before the
    first new token: a token that is like every other, whose logit is no outlier (Hewitt 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Summed in float64, in one order on every rank.
    """

    stored: Any  # a safetensors slice
    new: NewTokens

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        num_stored, fresh_ids = self.stored.get_shape()[0], self.new.fresh_ids
        begin, end = slices[0].start, slices[0].stop
        part = self.stored[(slice(min(begin, num_stored), min(end, num_stored)), *slices[1:])]
        new_rows = {token for token in fresh_ids if begin <= token < end} | set(range(max(begin, num_stored), end))
        if new_rows:
            mean = _mean_row(self.stored, slices[1:], min((num_stored, *fresh_ids))).to(part.dtype)
            part = torch.cat([part, mean.expand(end - begin - len(part), *mean.shape)])
            part[torch.tensor(sorted(new_rows)) - begin] = mean
        return part


def _mean_row(stored: Any, columns: tuple[slice, ...], num_rows: int) -> torch.Tensor:
    total = sum(
        stored[(slice(i, min(i + CHUNK_ROWS, num_rows)), *columns)].double().sum(0)
        for i in range(0, num_rows, CHUNK_ROWS)
    )
    return torch.as_tensor(total) / num_rows
