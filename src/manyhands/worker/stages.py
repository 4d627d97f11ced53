"""Stages before the first step: data opened, model built on shards, parallelism applied, optimizer made, state
resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.checkpoint.load import find_sound
from manyhands.checkpoint.manifest import clean_leftovers
from manyhands.convert.build import build_on_meta, count_parameters, describe_new, load_weights, make_all
from manyhands.convert.protocol import Context
from manyhands.core.collective_errors import run_on_rank_0
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.holding import full_numel
from manyhands.core.limits import FEATURES_FOLDER
from manyhands.data.batches import collate
from manyhands.data.collate import BatchShape
from manyhands.data.image_batch import FeatureFiles, FeatureWork, digest_of_pixels
from manyhands.data.image_files import PixelBounds
from manyhands.data.store import SampleSet, TokenStore
from manyhands.data.streams import Sample, cut_to_loss
from manyhands.data.tokenizer import open_tokenizer
from manyhands.engine.apply import apply
from manyhands.facts.identity import check_files
from manyhands.launch.resume_rules import refuse_other_checkpoint
from manyhands.model.checks import check_batches, check_loss, check_packing, check_padding, foreign_errors
from manyhands.model.features import KeptFeatures, digest_of_weights
from manyhands.model.image_checks import ProbeImages, check_images
from manyhands.training.types import TrainState
from manyhands.worker.batches import images_of, shape_of
from manyhands.worker.context import RankContext

PROBE_TOKENS = 2048  # of the micro-batch for self-tests, which run uncompiled and keep every activation


def open_data(rank: RankContext) -> None:
    """Opens the samples that rank 0 has prepared, and checks that they are the same."""
    plan = rank.plan
    if not Path(plan.data_folder).is_dir():
        raise UserError(
            f"rank {rank.world.rank} does not see the prepared data",
            where=plan.data_folder,
            why="data is prepared by rank 0, and this machine does not share its disk",
            fix="put data.cache on a disk that all machines share, or copy the folder to the same place",
            exit_code=EXIT_FAILED,
        )
    rank.store = TokenStore.open(plan.data_folder)
    if (rank.store.digest, rank.store.content) != (plan.data_digest, plan.data_content):
        raise UserError(
            "the prepared data is not the plan's",
            where=f"{plan.data_folder}, as rank {rank.world.rank} sees it",
            why="its tokens differ from those that rank 0 has prepared",
            fix="copy rank 0's folder to this machine again, or start again",
            exit_code=EXIT_FAILED,
        )
    rank.order = rank.store.order_samples(rank.config.seed, **plan.step_size)
    rank.tokenizer = open_tokenizer(plan.model_folder, rank.config.model)


def check_base(rank: RankContext) -> None:
    """One rank of each machine checks that the model's files there are those of the plan, which rank 0 has made."""
    if rank.world.local_rank == 0:
        check_files(Path(rank.plan.model_folder), rank.config, rank.plan.model_files, progress=lambda _: rank.beat())


def find_checkpoint(rank: RankContext) -> None:
    """Whether the run resumes, from the newest checkpoint that is sound: converters leave first values alone where one
    brings others.
    """
    checkpoints = rank.folder.checkpoints
    run_on_rank_0(
        lambda: clean_leftovers(checkpoints, rank.print)
    )  # the others wait: it may rename what they would list
    rank.checkpoint = find_sound(checkpoints, rank.print)
    if (found := rank.checkpoint) is not None:
        run_on_rank_0(lambda: refuse_other_checkpoint(found, rank.config, rank.folder))


def build_model(rank: RankContext) -> None:
    """The model on meta, changed by the plan's converters; weights onto their shards; the optimizer."""
    plan, config, world = rank.plan, rank.config, rank.world
    if config.kernels.deterministic:
        use_deterministic_kernels()
    context = Context(config, plan, world.device, resumes=rank.checkpoint is not None)
    converters = rank.converters = make_all(context)
    reported: set[str] = set()
    rank.loss_model = build_on_meta(context, converters, rank.print)
    for line in describe_new(converters, reported):
        rank.print(line)
    rank.engine = apply(
        rank.loss_model, plan, world, lambda module, device: load_weights(context, converters, module, device), config
    )
    for line in describe_new(converters, reported):
        rank.print(line)
    if note := rank.engine.make_optimizer(plan, config):
        rank.print(note)
    trained = sum(full_numel(p) for p in rank.model.parameters() if p.requires_grad)
    total = count_parameters(rank.model)
    rank.measured |= {"num_parameters": total, "num_trained_parameters": trained}
    rank.print(f"model: {total:,} parameters, {trained:,} trained ({trained / total:.2%})")
    keep_features(rank)


def use_deterministic_kernels() -> None:
    """For this process, before kernels are chosen: what has none that sums in a fixed order raises RuntimeError."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it


def keep_features(rank: RankContext) -> None:
    """From now on features of images are kept, where the plan says so."""
    images, data = rank.loss_model.images, rank.config.data
    if images is None or not rank.plan.keeps_features:
        return
    names = digest_of_pixels(rank.plan.model_folder, PixelBounds.of(data)) + digest_of_weights(images, rank.model)
    folder = Path(data.cache).expanduser() / FEATURES_FOLDER
    rank.features = FeatureWork(str(folder), names, int(data.feature_cache_gb * 1e9))
    images.kept = KeptFeatures(images, rank.model, FeatureFiles(rank.features))


def check_model(rank: RankContext) -> None:
    """Fast paths are compared with the loaded model itself, before the first step of a launch."""
    with foreign_errors(rank.loss_model):
        check_loss(rank.engine, rank.loss_model, rank.world.device)
        check_rows = check_packing if rank.plan.packing else check_padding
        check_rows(rank.engine, rank.loss_model, rank.world.device)
        check_batches(
            rank.engine,
            rank.loss_model,
            rank.world.device,
            packing=rank.plan.packing,
            longest=max(
                int(each.lengths.max()) for each in (rank.store.train, rank.store.validation) if len(each.lengths)
            ),
        )
        if rank.loss_model.images is not None and (work := images_of(rank)) is not None:
            probe = ProbeImages(rank.config, work, rank.tokenizer)
            must_see = rank.config.model.init == "pretrained"
            verdict = check_images(
                rank.engine, rank.loss_model, probe, rank.world.device, rank.plan.packing, must_see=must_see
            )
            rank.print(verdict.describe())
        batch = probe_batch(rank)
        for converter in rank.converters:
            found = converter.before_first_step(rank.model, rank.engine, batch)
            if found is not None:
                rank.print(found.text)
                rank.measured |= found.measured
    rank.print(f"loss: {rank.loss_model.how_loss}")
    if rank.world.device.type == "cuda":
        torch.cuda.empty_cache()  # what the checks held, in pieces of other sizes than a step's
        torch.cuda.reset_peak_memory_stats(rank.world.device)


def resume(rank: RankContext) -> None:
    """From the newest complete checkpoint, on whatever number of ranks there is now."""
    if rank.checkpoint is not None:
        rank.state = TrainState(**rank.engine.load(rank.checkpoint, is_checked=True, report=rank.print))
        rank.print(f"resumed after step {rank.state.step} from {rank.checkpoint.name}")


class ProbeSamples:
    """Samples of which a longer one is cut to ``PROBE_TOKENS``, its last loss token among them."""

    def __init__(self, samples: SampleSet) -> None:
        self.samples, self.streams = samples, samples.streams

    def sample(self, index: int) -> Sample:
        return cut_to_loss(self.samples.sample(index), self.streams, PROBE_TOKENS)


def probe_batch(rank: RankContext) -> dict[str, Any]:
    """This rank's samples of the first step, the shortest first, up to ``PROBE_TOKENS``; where there are more ranks
    than samples they share. One sample at least: cut where it is longer, or as it is where images may lie in it.
    """
    samples, world, train = rank.order.samples(0, 0), rank.world, rank.store.train
    mine = samples[world.rank % len(samples) :: world.world_size]
    mine = mine[np.argsort(train.lengths[mine], kind="stable")]
    count = int(np.searchsorted(np.cumsum(train.lengths[mine]), PROBE_TOKENS, side="right"))
    shape = shape_of(rank)
    shape = BatchShape(shape.packed, shape.tile, images=shape.images, tells_documents=shape.tells_documents)
    batch = collate(ProbeSamples(train) if shape.images is None else train, mine[: max(1, count)], shape)
    return {name: value.to(world.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
