"""What one rank does for ``test_kto``: the loss of judged answers with its gradients, and the same in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from manyhands.config.schema import PreferenceSection
from manyhands.config.tasks import TASKS
from manyhands.convert.lora import adapted_layers, without_adapters
from manyhands.data.batch.batches import collate
from manyhands.data.batch.collate import BatchShape
from manyhands.data.store.store import cycle_answers
from manyhands.data.store.streams import (
    DOCUMENTS,
    LABELS,
    MASK,
    TOKENS,
    Sample,
    exchange_answer,
    join_documents,
    make_sample,
)
from manyhands.model.loss import LossModel
from manyhands.training.step import with_values
from manyhands.worker.batches import mark_values
from tests.training.preference_ranks import make_model

NUM_SAMPLES, LONGEST = 6, 16
KEYS = {"beta": 0.5, "desirable_weight": 0.7, "undesirable_weight": 1.5}


class Judged:
    """Sample n: a prompt and an answer, good where n is even."""

    streams = (TOKENS, MASK, DOCUMENTS, LABELS)
    num_samples = NUM_SAMPLES

    def sample(self, index: int) -> Sample:
        if index >= NUM_SAMPLES:
            asked, answered = divmod(index - NUM_SAMPLES, NUM_SAMPLES)
            return exchange_answer(self.sample(asked), self.sample(answered), LONGEST)
        draw = np.random.default_rng(index)
        prompt, answer = draw.integers(2, 9, 2).tolist()
        ids, mask = draw.integers(50, 90, prompt + answer), np.arange(prompt + answer) >= prompt
        return {**join_documents([make_sample(ids.astype(np.int32), mask)]), "label": np.array([index % 2 == 0])}


def compute(cuts: Sequence[Sequence[int]], packed: bool) -> Any:
    """(loss, KL, gradients) of all samples, in micro-batches of ``cuts``, each divided over the ranks."""
    samples, model, settings = Judged(), make_model(), PreferenceSection(**KEYS)
    terms = TASKS["kto"].make_terms(SimpleNamespace(preference=settings))
    loss_model, layers = LossModel(model, fuse=True, terms=terms), tuple(adapted_layers(model).values())
    loss_model.without_adapters = lambda: without_adapters(layers)
    rank, size = dist.get_rank(), dist.get_world_size()

    def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    engine = SimpleNamespace(forward=loss_model, all_reduce_sum=all_reduce_sum)
    chosen = cycle_answers(samples, np.arange(NUM_SAMPLES))
    units = [*(chosen[list(numbers)] for numbers in cuts), *(np.array(numbers) for numbers in cuts)]
    batches = [collate(samples, numbers[rank::size].astype(np.int64), BatchShape(packed)) for numbers in units]
    loss, kl = torch.zeros((), dtype=torch.float64), None
    for batch in with_values(engine, mark_values(batches, len(cuts))):
        share = loss_model(batch)["kto"][0].double() / NUM_SAMPLES
        share.backward()
        loss += share.detach()
        kl = float(batch["kl"])
    gradient = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.requires_grad])
    for tensor in (loss, gradient):
        dist.all_reduce(tensor)
    return float(loss), kl, gradient


def reference() -> Any:
    """The same in float64, answer by answer, by the formula of TRL 1.15 (``KTOTrainer._compute_loss``)."""
    samples, model = Judged(), make_model("float64")
    layers = tuple(adapted_layers(model).values())

    def reward(sample: Sample) -> torch.Tensor:
        ids, mask = torch.from_numpy(sample["tokens"]).long(), torch.from_numpy(sample["mask"])

        def score() -> torch.Tensor:
            return -cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")[mask[1:]].sum()

        with torch.no_grad(), without_adapters(layers):
            before = score()
        return score() - before

    with torch.no_grad():
        others = [reward(samples.sample(int(n))) for n in cycle_answers(samples, np.arange(NUM_SAMPLES))]
    rewards = [reward(samples.sample(n)) for n in range(NUM_SAMPLES)]
    kl = torch.stack(others).mean().clamp(min=0)
    chosen = KEYS["desirable_weight"] * (1 - torch.sigmoid(KEYS["beta"] * (torch.stack(rewards[::2]) - kl)))
    rejected = KEYS["undesirable_weight"] * (1 - torch.sigmoid(KEYS["beta"] * (kl - torch.stack(rewards[1::2]))))
    loss = torch.cat([chosen, rejected]).mean()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    return float(loss.detach()), float(torch.stack(others).mean()), gradient
