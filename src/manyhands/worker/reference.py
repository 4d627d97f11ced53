"""The stage that computes the log-probabilities of a preference loss's reference: those of the model before training,
once, before step 1, by the same ranks, packs and kernels that train.

They are kept beside the prepared data, float64, one for each document; a value is not a number until it is computed,
so that a longer run adds what it lacks. The file's name is a hash of what decides about them: data and template, the
base's files, what is loaded besides, and dtypes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.config.tasks import TASKS
from manyhands.core.collective_errors import run_on_all_ranks
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.terms import LossTerm
from manyhands.core.units import count_of, format_duration
from manyhands.data.store.store import SampleSet, read_beside, write_beside
from manyhands.data.store.streams import REFERENCE
from manyhands.model.loss import LossModel, Terms
from manyhands.planner.efficiency import lay_out_evaluation
from manyhands.planner.reference import identify_reference
from manyhands.training.loop import Interrupted
from manyhands.worker.batches import SetName, iterate_layouts
from manyhands.worker.rank import BuiltModel, Data, Rank
from manyhands.worker.training import choose_evaluated, stop_if_asked


def name_reference(rank: Rank) -> Path:
    """The file in which this machine keeps the values."""
    return Path(rank.plan.data_folder).parent / f"reference-{identify_reference(rank.config, rank.plan)[:32]}.bin"


def list_missing(rank: Rank, data: Data) -> tuple[np.ndarray, dict[SetName, np.ndarray]]:
    """(values (places, documents) so far, samples that the run reads and have none), equal on all ranks."""
    store, order = data.store, data.order
    num_documents = TASKS[rank.config.task].num_documents
    values = read_beside(REFERENCE, name_reference(rank), store.num_places)
    values = np.full((store.num_places, num_documents), np.nan) if values is None else values.copy()
    read = np.zeros(store.train.num_samples, dtype=bool)
    for step in range(rank.plan.num_steps):
        read[order.samples(*order.locate(step))] = True
        if read.all():
            break
    evaluated = choose_evaluated(store, rank.config.evaluate.max_tokens)
    sets: dict[SetName, np.ndarray] = {"train": np.flatnonzero(read)}
    sets["validation"] = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *evaluated.values()]))
    unknown = run_on_all_ranks(lambda: np.isnan(values).any(axis=1).tobytes())  # machines may keep different files
    lacks = np.any([np.frombuffer(each, dtype=bool) for each in unknown], axis=0)
    missing = {name: numbers[lacks[_samples(data, name).places[numbers]]] for name, numbers in sets.items()}
    return values, missing


def has_reference(rank: Rank, data: Data) -> bool:
    """Whether the model before training is not needed: nothing compares with it, or its values are there."""
    return rank.plan.reference != "stored" or not any(map(len, list_missing(rank, data)[1].values()))


def attach_reference(rank: Rank, data: Data, built: BuiltModel) -> Data:
    """The data with the reference's values in its samples, if the plan stores them; what is missing is computed first.

    The model has to be as it is before step 1. Every rank calls it.
    """
    if rank.plan.reference != "stored":
        return data
    values, missing = list_missing(rank, data)
    path, num = name_reference(rank), sum(map(len, missing.values()))
    if num:
        begin = time.monotonic()
        interrupted: Interrupted | None = None
        found = np.full_like(values, np.nan)
        try:
            _compute(rank, data, built, missing, found)
        except Interrupted as error:  # on all ranks: what is computed is kept
            interrupted = error
        known = torch.from_numpy(~np.isnan(found)).double()
        sums = built.engine.all_reduce_sum(torch.from_numpy(np.nan_to_num(found)))
        counts = built.engine.all_reduce_sum(known).numpy()  # ranks that share their samples compute them all
        values = np.where(counts > 0, sums.numpy() / np.maximum(counts, 1), values)
        run_on_all_ranks(lambda: write_beside(REFERENCE, path, values) if rank.world.local_rank == 0 else None)
        if interrupted is not None:
            raise interrupted
        seconds = format_duration(time.monotonic() - begin)
        rank.process.print(f"reference: {count_of(num, 'sample')} computed in {seconds}, kept in {path}")
    else:
        rank.process.print(f"reference: read from {path}")
    return replace(data, store=data.store.attach(REFERENCE, path))


def _compute(
    rank: Rank, data: Data, built: BuiltModel, missing: Mapping[SetName, np.ndarray], values: np.ndarray
) -> None:
    """Sets ``values`` (places, documents) of this rank's share of the missing samples."""
    engine, place = built.engine, rank.plan.layout.mesh.data_rank(rank.world.rank)
    with collecting(built.loss_model) as collected, torch.no_grad():
        for name, numbers in missing.items():
            if not len(numbers):
                continue
            samples, done = _samples(data, name), 0
            layout = lay_out_evaluation(rank.plan, samples, numbers)
            for _, micro_batches in iterate_layouts(rank, data, built.loss_model, name, [layout]):
                for chosen, batch in zip(layout.of_rank(place), micro_batches, strict=True):
                    stop_if_asked(rank, engine)
                    rank.process.beat()
                    engine.forward(batch)
                    found = collected.pop().cpu().numpy().reshape(len(chosen), -1)
                    if not np.isfinite(found).all():
                        raise UserError(
                            "log-probabilities of the model before training are not finite",
                            where=f"line {data.store.lines[samples.places[chosen[~np.isfinite(found).all(1)][0]]]:,}",
                            fix="use model.dtype: bfloat16 or float32, and check the model's weights",
                            exit_code=EXIT_FAILED,
                        )
                    values[samples.places[chosen]] = found
                    done += 1
                    if done % 50 == 0:
                        rank.process.print(
                            f"reference: {done:,} of {layout.num_micro_batches:,} micro-batches of {name}"
                        )


@contextlib.contextmanager
def collecting(loss_model: LossModel) -> Iterator[list[torch.Tensor]]:
    """Within it a forward pass adds the log-probabilities of its documents, (d) float64, to the list."""
    collected: list[torch.Tensor] = []

    def collect(model: LossModel, batch: Mapping[str, Any], hidden: torch.Tensor, metrics: bool) -> Terms:
        answers = model.answers(batch, hidden)
        collected.append(answers.log_probabilities)
        return {REFERENCE.name: (answers.log_probabilities.sum(), answers.num_tokens.sum())}

    terms, was_training = loss_model.terms, loss_model.training
    loss_model.terms = (LossTerm(REFERENCE.name, compute=collect),)
    loss_model.eval()
    try:
        yield collected
    finally:
        loss_model.terms = terms
        loss_model.train(was_training)


def _samples(data: Data, name: SetName) -> SampleSet:
    found: SampleSet = getattr(data.store, name)
    return found
