"""What one rank does for ``test_preference``: losses of pairs with their gradients, and the same in float64."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, logsigmoid, relu

from manyhands.config.schema import MethodSection, PreferenceSection
from manyhands.config.tasks import TASKS
from manyhands.convert.lora import adapted_layers, apply_lora, without_adapters
from manyhands.data.batch.batches import collate
from manyhands.data.batch.collate import BatchShape
from manyhands.data.store.streams import REFERENCE, Sample
from manyhands.model.loss import LossModel
from manyhands.worker.reference import collecting
from tests.support.tiny import tiny_model
from tests.training.door_ranks import Pairs

NUM_PAIRS = 5
LOSSES: tuple[dict[str, Any], ...] = (
    {"loss": "sigmoid"},
    {"loss": "sigmoid", "label_smoothing": 0.1, "sft_weight": 0.5},
    {"loss": "robust", "label_smoothing": 0.1},
    {"loss": "hinge", "beta": 0.5},
    {"loss": "ipo", "beta": 0.3},
    {"loss": "sigmoid_norm", "beta": 2.0},
    {"loss": "cpo"},
    {"loss": "simpo", "beta": 2.0, "margin": 1.0, "label_smoothing": 0.1},
    {"loss": "orpo"},
)


class Stored(Pairs):
    """The same with the log-probabilities of a model before training."""

    streams = (*Pairs.streams, REFERENCE)

    def __init__(self, loss_model: LossModel) -> None:
        self.values = np.zeros((NUM_PAIRS, 2))
        super().__init__()
        batch = collate(Pairs(), np.arange(NUM_PAIRS), BatchShape(True))
        with collecting(loss_model) as collected, torch.no_grad():
            loss_model(batch)
        self.values = collected[0].reshape(-1, 2).numpy()

    def sample(self, index: int) -> Sample:
        return {**super().sample(index), REFERENCE.name: self.values[index % NUM_PAIRS]}


def make_model(dtype: str = "float32", method: str = "lora") -> Any:
    """A tiny model whose adapters change it; "stored": whose weights have changed."""
    model = tiny_model("llama", dtype)
    model.load_state_dict({name: value.to(model.dtype) for name, value in tiny_model("llama").state_dict().items()})
    if method == "stored":
        for number, parameter in enumerate(model.parameters()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.data += 0.02 * drawn.to(model.dtype)
    if method == "lora":
        apply_lora(model, MethodSection(rank=2, alpha=8.0), 0)
        for number, layer in enumerate(adapted_layers(model).values()):
            for at, factor in enumerate((layer.lora_A.weight, layer.lora_B.weight)):
                drawn = torch.randn(factor.shape, generator=torch.Generator().manual_seed(2 * number + at))
                factor.data.copy_(drawn * 0.1)
    return model


def compute(keys: dict[str, Any], cuts: Sequence[Sequence[int]], packed: bool, fuse: bool, method: str) -> Any:
    """(loss, figures, gradients) of all pairs, in micro-batches of ``cuts``, each divided over the ranks."""
    settings = PreferenceSection(**keys)
    model = make_model(method=method)
    pairs = Stored(LossModel(make_model(method="full"))) if method == "stored" else Pairs()
    terms = TASKS["preference"].make_terms(SimpleNamespace(preference=settings))
    loss_model = LossModel(model, fuse=fuse, terms=terms)
    if method == "lora":
        layers = tuple(adapted_layers(model).values())
        loss_model.without_adapters = lambda: without_adapters(layers)
    rank, size = dist.get_rank(), dist.get_world_size()
    totals = {term.name: float(term.weigh(pairs, np.arange(NUM_PAIRS)).sum()) for term in terms}
    loss, figures = torch.zeros((), dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for numbers in cuts:
        batch = collate(pairs, np.array(numbers[rank::size], dtype=np.int64), BatchShape(packed))
        found = loss_model(batch, metrics=True)
        share = sum(term.coefficient * found[term.name][0].double() / totals[term.name] for term in terms)
        share.backward()
        loss += share.detach()
        figures += torch.stack([number.double() for name in ("preferred", "margin") for number in found[name]])
    gradient = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.requires_grad])
    for tensor in (loss, figures, gradient):
        dist.all_reduce(tensor)
    return float(loss), figures.tolist(), gradient


def reference(keys: dict[str, Any], method: str) -> Any:
    """The same in float64, answer by answer."""
    settings, model, pairs = PreferenceSection(**keys), make_model("float64", method), Pairs()
    layers = tuple(adapted_layers(model).values())
    second = make_model("float64", "full") if method == "stored" else model

    def score(ids: torch.Tensor, mask: torch.Tensor, model: Any = model) -> torch.Tensor:
        return -cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")[mask[1:]].sum()

    losses, margins, nlls, num_tokens = [], [], [], 0
    for number in range(NUM_PAIRS):
        sample = pairs.sample(number)
        parts = [torch.from_numpy(np.array(sample[name])) for name in ("tokens", "mask")]
        (c, r), (c_mask, r_mask) = (part.split(sample["documents"].tolist()) for part in parts)
        c, r, n_c, n_r = c.long(), r.long(), c_mask[1:].sum(), r_mask[1:].sum()
        p_c, p_r = score(c, c_mask), score(r, r_mask)
        with torch.no_grad(), without_adapters(layers) if layers else nullcontext():
            q_c, q_r = score(c, c_mask, second), score(r, r_mask, second)
        b, e = settings.beta, settings.label_smoothing
        d = (p_c - q_c) - (p_r - q_r)
        d_norm = (p_c - q_c) / n_c - (p_r - q_r) / n_r
        odds = [p / n - torch.log(1 - torch.exp(p / n)) for p, n in ((p_c, n_c), (p_r, n_r))]
        x = {
            "ipo": b * d_norm,
            "sigmoid_norm": b * d_norm,
            "cpo": b * (p_c - p_r),
            "simpo": b * (p_c / n_c - p_r / n_r),
            "orpo": odds[0] - odds[1],
        }.get(settings.loss, b * d)
        losses.append(
            {
                "robust": (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e),
                "hinge": relu(1 - x),
                "ipo": (d_norm - 1 / (2 * b)) ** 2,
                "simpo": -(1 - e) * logsigmoid(x - settings.margin) - e * logsigmoid(settings.margin - x),
                "orpo": -b * logsigmoid(x),
            }.get(settings.loss, -(1 - e) * logsigmoid(x) - e * logsigmoid(-x))
        )
        margins.append(float(x.detach()))
        nlls.append(-p_c)
        num_tokens += int(n_c)
    loss = sum(losses) / NUM_PAIRS + settings.sft_share * sum(nlls) / num_tokens
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    return float(loss.detach()), [sum(x > 0 for x in margins), NUM_PAIRS, sum(margins), NUM_PAIRS], gradient
