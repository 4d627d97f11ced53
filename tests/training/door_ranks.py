"""Loss terms and a task that no product code names, and what one rank does with them for ``test_doors``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from manyhands.config.schema import StopSection
from manyhands.core.terms import LANGUAGE_MODEL, LossTerm, Metric
from manyhands.core.world import World
from manyhands.data.batch.batches import collate
from manyhands.data.batch.collate import BatchShape
from manyhands.data.batch.order import SampleOrder
from manyhands.data.store.streams import DOCUMENTS, MASK, TOKENS, Sample, count_loss_tokens, make_sample
from manyhands.engine.apply import replicate
from manyhands.engine.native import NativeEngine
from manyhands.model.loss import IGNORED, LossModel
from manyhands.training.loop import Loop, evaluate, train
from manyhands.training.step import StepWork
from manyhands.training.types import Hook, TrainState
from manyhands.worker.batches import iterate_steps
from manyhands.worker.rank import Data
from tests.support.plans import make_plan
from tests.support.tiny import tiny_model

NUM_PAIRS, BATCH = 12, 6


class Pairs:
    """Sample n: two documents, the first tokens of which are 2 n and 2 n + 1."""

    streams = (TOKENS, MASK, DOCUMENTS)
    has_weights, num_images, image_units = False, None, None

    def __init__(self) -> None:
        samples = [self.sample(number) for number in range(NUM_PAIRS)]
        self.lengths = np.array([len(sample["tokens"]) for sample in samples])
        self.num_loss_tokens = np.array([count_loss_tokens(sample) for sample in samples])

    def sample(self, index: int) -> Sample:
        draw = np.random.default_rng(index)
        first, second = draw.integers(3, 14, 2).tolist()
        ids, mask = draw.integers(50, 90, first + second), draw.random(first + second) < 0.6
        ids[0], ids[first], mask[[1, first + 1]] = 2 * index, 2 * index + 1, True
        return make_sample(ids.astype(np.int32), mask) | {"documents": np.array([first, second], dtype=np.int32)}


def spread(model: LossModel, batch: dict[str, Any], hidden: torch.Tensor, metrics: bool) -> dict[str, Any]:
    """Over loss tokens, as most terms."""
    rows = batch["label_positions"]
    values = hidden[rows].float().square().mean(-1)
    return {"spread": (values.sum() + hidden.sum() * 0, torch.tensor(len(rows)))}


def reach(model: LossModel, batch: dict[str, Any], hidden: torch.Tensor, metrics: bool) -> dict[str, Any]:
    """Over all tokens but padding, which comes last."""
    num_tokens = batch["documents"].sum()
    return {"reach": (hidden[:num_tokens].float().abs().mean(-1).sum() + hidden.sum() * 0, num_tokens)}


def prefer(model: LossModel, batch: dict[str, Any], hidden: torch.Tensor, metrics: bool) -> dict[str, Any]:
    """-log sigmoid of how much likelier a pair's first document is, a pair weighing 1."""
    losses = F.cross_entropy(
        model.logits_of(hidden).float(), batch["labels"].flatten(), ignore_index=IGNORED, reduction="none"
    )
    numbers = torch.repeat_interleave(batch["documents"].long())  # of each token's document
    by_document = losses.new_zeros(len(batch["documents"])).index_add(0, numbers, losses[: len(numbers)])
    begins = batch["cu_documents"][:-1].long()
    margins = by_document[begins + 1] - by_document[begins]
    found = {"prefer": (-F.logsigmoid(margins).sum() + losses.sum() * 0, torch.tensor(len(begins)))}
    return found | ({"preferred": ((margins > 0).sum(), torch.tensor(len(begins)))} if metrics else {})


def count_tokens(samples: Pairs, numbers: np.ndarray) -> np.ndarray:
    return np.array([len(samples.sample(int(number))["tokens"]) for number in numbers])


TERMS = {
    "lm": LANGUAGE_MODEL,
    "spread": LossTerm("spread", 0.5, compute=spread),
    "reach": LossTerm("reach", 2.0, count_tokens, reach),
    "prefer": LossTerm(
        "prefer",
        weigh=lambda samples, numbers: np.ones(len(numbers)),
        compute=prefer,
        metrics=(Metric("preferred", "preferred", label="pairs preferred", is_share=True),),
    ),
}


class Keep(Hook):
    def __init__(self) -> None:
        self.results: list[dict[str, float]] = []

    def after_step(self, state, result):  # type: ignore[no-untyped-def]
        self.results.append({"loss": result.loss, "norm": result.grad_norm, **result.terms})


def train_pairs(names: Sequence[str]) -> dict[str, Any]:
    """Two steps of SGD, each followed by an evaluation on all pairs; what was in each micro-batch of this rank."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    terms, pairs = tuple(TERMS[name] for name in names), Pairs()
    loss_model = LossModel(tiny_model("llama"), terms=terms)
    replica = replicate(loss_model, "full") if size > 1 else None
    world = World(rank, rank, size, device)
    engine = NativeEngine(loss_model, world, replica=replica)
    engine.optimizer = torch.optim.SGD(loss_model.parameters(), lr=0.1)
    plan = make_plan(strategy="ddp" if size > 1 else "single", world_size=size, num_steps=2, batch_samples=BATCH)
    config: Any = SimpleNamespace(method=SimpleNamespace(neftune_alpha=None), seed=0)
    context: Any = SimpleNamespace(plan=plan, config=config, world=world)
    store: Any = SimpleNamespace(train=pairs, validation=pairs)
    data = Data(store, SampleOrder(NUM_PAIRS, 0, BATCH), tokenizer=None)
    seen: list[list[int]] = []

    def works() -> Iterator[StepWork]:
        for work in iterate_steps(context, data, loss_model):
            batches = list(work.micro_batches)
            for batch in batches:
                begins = batch["cu_seq_lens"][: len(batch["documents"])].long()
                seen.append(batch["input_ids"][0, begins].tolist())
            yield replace(work, micro_batches=batches)

    def held_out(state: TrainState) -> Any:
        batch = collate(pairs, np.arange(NUM_PAIRS)[rank::size], BatchShape(packed=True))
        counts = {"num_samples": NUM_PAIRS, "num_tokens": 0, "num_loss_tokens": {"": 0}}
        return evaluate(engine, loss_model, [batch], state, **counts, device=device, terms=terms)  # type: ignore[arg-type]

    keep, evaluations = Keep(), []
    state = train(
        Loop(
            engine=engine,
            schedule=lambda step: 0.1,
            works=works(),
            state=TrainState(),
            stop=StopSection(),
            num_steps=2,
            max_grad_norm=0.0,
            seed=0,
            rank=rank,
            device=device,
            terms=terms,
            hooks=[keep],
            evaluate=lambda state: evaluations.append(held_out(state)) or evaluations[-1],
            evaluate_after=lambda step: True,
        )
    )
    rows = [{"loss": each.loss, **each.terms, **each.figures} for each in evaluations]
    return {"steps": keep.results, "evaluations": rows, "best": (state.best_step, state.best_loss), "seen": seen}


def compute_reference(names: Sequence[str], numbers: Sequence[int]) -> float:
    """The loss of some samples before training, in float64, document by document."""
    model, pairs = tiny_model("llama", "float64").double(), Pairs()
    model.load_state_dict({name: value.double() for name, value in tiny_model("llama").state_dict().items()})
    sums, weights = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for number in numbers:
        sample, log_probabilities = pairs.sample(number), []
        parts = [
            torch.from_numpy(np.array(sample[name])).split(sample["documents"].tolist()) for name in ("tokens", "mask")
        ]
        for ids, mask in zip(*parts, strict=True):
            with torch.no_grad():
                hidden = model.model(ids[None].long())[0][0]
                each = -F.cross_entropy(model.lm_head(hidden[:-1]), ids[1:].long(), reduction="none")[mask[1:]]
            log_probabilities.append(each.sum())
            found = {
                "lm": (-each.sum(), len(each)),
                "spread": (hidden[:-1][mask[1:]].square().mean(-1).sum(), len(each)),
                "reach": (hidden.abs().mean(-1).sum(), len(ids)),
                "prefer": (0.0, 0.5),
            }
            for name in names:
                sums[name], weights[name] = sums[name] + found[name][0], weights[name] + found[name][1]
        if "prefer" in names:
            sums["prefer"] -= F.logsigmoid(log_probabilities[0] - log_probabilities[1])
    return float(sum(TERMS[name].coefficient * sums[name] / weights[name] for name in names))
