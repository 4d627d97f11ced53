"""What verification compares logits on: tokens of the training data, by the model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from manyhands.config.schema import RunConfig
from manyhands.core.collective_errors import run_on_rank_0
from manyhands.data.batch.batches import Batch, collate, to_device
from manyhands.data.batch.collate import BatchShape
from manyhands.data.store.store import SampleSet, TokenStore
from manyhands.data.store.streams import TOKENS, from_streams, split_documents
from manyhands.export.reference import save_probe
from manyhands.infer.images import PromptImages, sizes_of
from manyhands.model.inputs import image_work
from manyhands.model.loss import LossModel
from manyhands.planner.types import Plan

NUM_TOKENS = 32
MAX_LOOKED_AT, MAX_LENGTH = 10_000, 4096  # samples, and tokens of the one whose images are shown to the model


class Computing(Protocol):
    """What is called of an engine."""

    @property
    def is_local(self) -> bool: ...

    def logits(self, batch: Batch, rows: torch.Tensor | None = None) -> torch.Tensor: ...


def write_probe(
    path: Path,
    engine: Computing,
    loss_model: LossModel,
    config: RunConfig,
    plan: Plan,
    store: TokenStore,
    tokenizer: Any,
    device: torch.device,
) -> None:
    """Writes the model's logits on the first training sample's first tokens, or its last with images. Collective."""
    loss_model.eval()
    train, inputs = store.train, None
    number = find_sample_with_images(train, plan, loss_model) if engine.is_local else None
    if number is not None:
        sample = train.sample(number)
        first = split_documents(sample, train.streams)[0]
        ids = torch.from_numpy(first[TOKENS.name].copy()).long()[None]
        shape = BatchShape(packed=plan.packing, images=image_work(config, plan, store))
        batch = to_device(collate(train, np.array([number]), shape), device)
        images = PromptImages(Path(plan.model_folder), tokenizer, sizes_of(config))
        inputs = images.inputs(loss_model.model, ids[0].tolist(), from_streams(sample))
        with torch.no_grad():
            logits = engine.logits(batch)[:, : ids.shape[1]][:, -NUM_TOKENS:]
    else:
        ids = torch.from_numpy(train.sample(0)[TOKENS.name][:NUM_TOKENS].copy()).long()[None].to(device)
        length = ids.shape[1]
        positions = torch.arange(length, device=device)[None]
        bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
        logits = engine.logits(
            {"input_ids": ids, "position_ids": positions, "cu_seq_lens": bounds, "max_length": length}
        )
    run_on_rank_0(lambda: save_probe(path, ids, logits, plan.layout.compute_dtype, inputs))


def find_sample_with_images(train: SampleSet, plan: Plan, loss_model: LossModel) -> int | None:
    """A short training sample with images; None where there is none, or the model reads text alone."""
    counts, lengths = train.num_images, train.lengths
    if counts is None or plan.parts.get("vision", "left_out") == "left_out":
        return None
    images, tokens = loss_model.images, train.image_tokens
    shown = counts > 0
    if images is not None and tokens is not None and images.layout.kind.fails_on_one_token:
        shown = tokens > 1  # transformers' own forward pass takes no only image of one token
    found = np.flatnonzero(shown[:MAX_LOOKED_AT] & (lengths[:MAX_LOOKED_AT] <= MAX_LENGTH))
    return int(found[0]) if len(found) else None
