"""Writing a Hugging Face model folder from the model in memory, sharded or not. Collective; rank 0 writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from manyhands.config.schema import ModelSection, RunConfig
from manyhands.core.collective_errors import run_on_rank_0
from manyhands.core.files import write_atomically, write_json
from manyhands.export.files import begin_folder, commit_folder, copy_config, extend_ends, write_tensors, write_tokenizer
from manyhands.export.record import CARD
from manyhands.export.reference import Reference, TensorReference, describe_tensor
from manyhands.export.tensors import iterate_whole, lay_out, refuse_beyond
from manyhands.planner.types import Plan

SHARD_BYTES = 5 * 10**9


def export_model(
    folder: Path,
    model: nn.Module,
    source: Path,
    dtype: str,
    *,
    rank: int,
    merge: bool = False,
    asked: ModelSection | None = None,
    replace: bool = False,
    reference_path: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    card: Callable[[], str] | None = None,
) -> Reference | None:
    """Writes weights, config, generation config and tokenizer as ``folder``; the reference on rank 0, None elsewhere.

    ``model`` is the Hugging Face model inside every wrapper, ``dtype`` the saved one. Tensors are named as in
    ``source``, the folder it was loaded from. What the model took no part of (towers) is copied from there, cast where
    ``dtype`` is not the source's. ``merge`` adds adapters into the weights they adapt. ``asked`` has the chat
    template and new tokens. ``replace``: the caller owns what is there. ``reference_path`` is written too,
    before any weight is. ``card`` makes the model card's text, on rank 0. UserError on every rank if the folder cannot
    be written, or ``dtype`` does not reach a value.
    """
    saved_dtype, vocab_size = getattr(torch, dtype), model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    partial = folder.with_name(folder.name + ".tmp")
    run_on_rank_0(lambda: begin_folder(folder, replace=replace))
    layout = lay_out(model, source, saved_dtype)
    writer = ShardWriter(partial, layout.sizes, shard_bytes)
    failure: Exception | None = None
    for name, tensor in iterate_whole(model, layout.dtypes, merge=merge, beyond=layout.beyond):
        if rank == 0 and failure is None:
            try:
                for stored_name, part in layout.parts_of(name, tensor):
                    writer.add(stored_name, part)
            except Exception as error:  # the other ranks continue to gather, so this one must too
                failure = error

    def finish() -> Reference:
        if failure is not None:
            raise failure
        for stored_name, tensor in layout.read_copied():
            writer.add(stored_name, tensor)
        if layout.beyond:
            shutil.rmtree(partial)
        refuse_beyond(layout.beyond, saved_dtype, str(folder))
        writer.write_index()
        copy_config(source, partial, dtype, vocab_size)
        tokens = write_tokenizer(source, partial, asked)
        if asked is not None:
            extend_ends(partial, asked)
        copied = tuple(stored.name for stored in layout.copied)
        reference = Reference(kind="model", dtype=dtype, tensors=writer.described, tokens=tokens, copied=copied)
        if reference_path is not None:
            reference.write(reference_path)
        if card is not None:
            write_atomically(partial / CARD, card())
        commit_folder(partial, folder)
        return reference

    return run_on_rank_0(finish)


def choose_dtype(plan: Plan, config: RunConfig, *, merge: bool) -> str:
    """What a model is saved in. Merged, with nothing asked: as the weights were computed with."""
    return plan.layout.frozen_dtype if merge and config.output.dtype == "auto" else plan.output_dtype


class ShardWriter:
    """Collects tensors in a known order; writes a safetensors file when full, so one file is in memory."""

    def __init__(self, folder: Path, sizes: dict[str, int], shard_bytes: int) -> None:
        self.folder, self.total = folder, sum(sizes.values())
        self.shards = split_shards(sizes, shard_bytes)
        self.pending: dict[str, torch.Tensor] = {}
        self.described: dict[str, TensorReference] = {}
        self.files: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.described[name] = describe_tensor(tensor)  # of the memory, before anything is written
        self.pending[name] = tensor
        number = next(i for i, shard in enumerate(self.shards) if name in shard)
        if len(self.pending) == len(self.shards[number]):
            place = f"-{number + 1:05d}-of-{len(self.shards):05d}" if len(self.shards) > 1 else ""
            file = f"model{place}.safetensors"
            write_tensors(self.folder / file, self.pending)
            self.files |= dict.fromkeys(self.pending, file)
            self.pending = {}

    def write_index(self) -> None:
        if len(self.shards) > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": self.files}
            write_json(self.folder / "model.safetensors.index.json", index)


def split_shards(sizes: dict[str, int], shard_bytes: int) -> list[set[str]]:
    """Names of each file, in order; a tensor larger than ``shard_bytes`` has a file of its own."""
    shards: list[set[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > shard_bytes:
            shards.append(set())
            filled = 0
        shards[-1].add(name)
        filled += size
    return shards
