"""What the samples of a run become as inputs of its model: the shape of a micro-batch, and all that a sample has
besides text. Callers need not know what that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.config.schema import RunConfig
from manyhands.core.limits import FEATURES_FOLDER
from manyhands.data.batch.batches import Batch
from manyhands.data.batch.collate import BatchShape
from manyhands.data.images.batch import FeatureFiles, FeatureWork, ImageWork, digest_of_pixels
from manyhands.data.images.files import PixelBounds
from manyhands.data.store.store import TokenStore
from manyhands.families.images import PIXELS
from manyhands.model.checks import Probed
from manyhands.model.features import KeptFeatures, digest_of_weights
from manyhands.model.image_checks import ProbeImages, check_images
from manyhands.model.loss import LossModel
from manyhands.planner.time.clock import pack_tile
from manyhands.planner.types import Plan


def batch_shape(
    config: RunConfig, plan: Plan, store: TokenStore, loss_model: LossModel, context_rank: int = 0
) -> BatchShape:
    """Returns the shape of the run's micro-batches; of those of a divided pack, that of ``context_rank``'s part."""
    kept = loss_model.images.kept if loss_model.images is not None else None
    work = image_work(config, plan, store, kept.work if kept is not None else None)
    lengths = (store.train.lengths, store.validation.lengths) if plan.packing else ()
    return _shape_packs(
        plan,
        lengths,
        BatchShape(
            plan.packing,
            images=work,
            tells_documents=loss_model.needs_documents,
            shares_prompts=plan.shares_prompts,
            context=plan.layout.mesh.context,
            context_rank=context_rank,
            exchanges_heads=plan.layout.exchanges_heads,
        ),
    )


def image_work(
    config: RunConfig, plan: Plan, store: TokenStore, features: FeatureWork | None = None
) -> ImageWork | None:
    """Returns how images become entries of a batch; None in a run without images."""
    outer = ("vision", "projector")  # left out where the training data turned out to have no image
    if store.train.num_images is None or all(plan.parts.get(part) == "left_out" for part in outer):
        return None
    data, sets = config.data, (store.train, store.validation)
    return ImageWork(
        plan.model_folder,
        PixelBounds.of(data),
        str(Path(data.cache).expanduser() / "images"),
        int(data.image_cache_gb * 1e9),
        int(data.image_memory_gb * 1e9),
        sum(int(each.image_units.sum()) for each in sets if each.image_units is not None),
        features,
    )


def keep_features(config: RunConfig, plan: Plan, loss_model: LossModel) -> None:
    """From now on features of images are kept, where the plan says so."""
    images, data = loss_model.images, config.data
    if images is None or not plan.keeps_features:
        return
    names = digest_of_pixels(plan.model_folder, PixelBounds.of(data)) + digest_of_weights(images, loss_model.model)
    folder = Path(data.cache).expanduser() / FEATURES_FOLDER
    work = FeatureWork(str(folder), names, int(data.feature_cache_gb * 1e9))
    images.kept = KeptFeatures(images, loss_model.model, FeatureFiles(work))


def close_features(loss_model: LossModel) -> tuple[dict[str, Any], str]:
    """Waits until the features that were computed are written; returns (what to report, a line), both empty where none
    are kept.
    """
    if loss_model.images is None or (kept := loss_model.images.kept) is None:
        return {}, ""
    kept.close()
    found = {"computed_images": kept.num_computed, "read_micro_batches": kept.num_read}
    line = f"features of images: {kept.num_computed:,} computed on this rank, {kept.num_read:,} micro-batches read them"
    return {"features": found}, line


def check_inputs(
    engine: Probed,
    loss_model: LossModel,
    config: RunConfig,
    plan: Plan,
    store: TokenStore,
    tokenizer: Any,
    device: torch.device,
) -> str:
    """Checks that what samples have besides text reaches the loaded model; returns a line, "" where there is nothing.
    Raises UserError.
    """
    work = image_work(config, plan, store) if loss_model.images is not None else None
    if work is None:
        return ""
    probe = ProbeImages(config, work, tokenizer)
    must_see = config.model.init == "pretrained"
    return check_images(engine, loss_model, probe, device, plan.packing, must_see=must_see).describe()


def describe_batch(batch: Batch) -> str:
    """How large a micro-batch is."""
    shape, pixels = tuple(batch["input_ids"].shape), batch.get(PIXELS)
    patches = f" with {len(pixels):,} patches or squares of images" if pixels is not None and len(pixels) else ""
    return f"{shape[0]} x {shape[1]:,} tokens{patches}"


def _shape_packs(plan: Plan, lengths: Sequence[np.ndarray], shape: BatchShape) -> BatchShape:
    """The shape with that of the plan's packs, if it packs; ``lengths`` in tokens of the samples of each set.

    Packs are padded to whole tiles on a GPU and where blocks are compiled; nothing is on a CPU otherwise. Compiled
    blocks get batches that differ in as little as possible: in the number of tokens, and not even in that where all
    samples have one length or blocks are launched as CUDA graphs. These have the tokens that the plan says: padding
    that attention leaves out would make it copy its result, which then is held twice.
    """
    if not plan.packing:
        return shape
    tile = pack_tile(plan.layout)
    pack_tokens = plan.layout.pack_tokens  # where all samples have one length, or with CUDA graphs
    if not plan.layout.compile and pack_tokens is None:
        return replace(shape, tile=tile)
    longest = max(int(each.max()) for each in lengths if len(each))
    if not plan.layout.compile:
        return replace(shape, tile=tile, row_length=longest)
    if pack_tokens is None:
        return replace(shape, tile=tile, longest=longest)
    shape = replace(shape, tile=tile, tokens=pack_tokens, longest=longest)
    if any(int(each.min()) < longest for each in lengths if len(each)):
        return shape
    return replace(shape, documents=pack_tokens // longest, row_length=longest)
