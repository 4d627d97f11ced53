"""``manyhands eval``: losses and answers of a trained model on held-out samples, beside its base and what the run
recorded.

Whoever uses a run's files opens them as this does. Loss, perplexity and token accuracy are sums over all loss tokens of
all copies of the model, divided once; text metrics compare the answer alone, never the prompt, with the last turn that
a sample trains.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from manyhands.config.schema import PreferenceSection
from manyhands.core.errors import UserError
from manyhands.core.terms import LANGUAGE_MODEL, LossTerm
from manyhands.core.text import report_aside
from manyhands.data.batch.batches import collate, to_device
from manyhands.data.batch.collate import BatchShape
from manyhands.data.store.store import SampleSet, TokenStore
from manyhands.data.store.streams import (
    DOCUMENTS,
    LABELS,
    MASK,
    TOKENS,
    Sample,
    from_streams,
    images_within,
    split_documents,
    weights_of,
)
from manyhands.infer.batch import open_replica
from manyhands.infer.decode import Completion
from manyhands.infer.images import PromptImages, image_token_of, refuse_images
from manyhands.infer.load import ModelLocation, open_found_tokenizer
from manyhands.infer.prompts import PromptTokens
from manyhands.infer.replicas import ALL_GPUS, DeviceSlot, Placement, count_weight_bytes, run_tasks
from manyhands.infer.settings import GenerationSettings
from manyhands.infer.text_metrics import LOSS_METRICS, PAIR_METRICS, TEXT_METRICS, check_metrics, make_extractor, score
from manyhands.infer.worker import BatchCapacity, PromptQueue
from manyhands.model.loss import Answers, LossModel
from manyhands.model.preference import compute_rewards

BATCH_TOKENS = 8192  # of a forward pass, padding included

Report = Callable[[str], object]


@dataclass(frozen=True)
class EvaluationData:
    """Samples of a token store: ``set_name`` is ``train`` (a file given by --data) or ``validation``. ``limit``: the
    first so many samples are answered, None for all; losses take all of at most ``max_tokens``.
    """

    folder: Path
    set_name: str
    name: str
    max_tokens: int | None = None
    limit: int | None = None

    def open(self) -> SampleSet:
        store = TokenStore.open(self.folder)
        return store.train if self.set_name == "train" else store.validation

    def choose(self, samples: SampleSet) -> np.ndarray:
        """Numbers of the samples to measure: of a run those that its main validation loss is of."""
        among = None
        if self.set_name == "validation":
            among = TokenStore.open(self.folder).divide_validation().get("")
        numbers = samples.take_tokens(self.max_tokens, among)
        return numbers[samples.num_loss_tokens[numbers] > 0]


@dataclass(frozen=True)
class ScoredAnswer:
    """One answer beside its reference; ``scores`` by metric."""

    prompt: str
    reference: str
    answer: str
    finish_reason: str
    scores: dict[str, float]


@dataclass
class Scores:
    """What was measured of one model: ``values`` by metric in the order asked."""

    values: dict[str, float] = field(default_factory=dict)
    num_samples: int = 0
    num_loss_tokens: int = 0
    answers: list[ScoredAnswer] = field(default_factory=list)
    seconds: float = 0.0
    pairs: np.ndarray = field(default_factory=lambda: np.zeros((0, 2, 2)))  # see ``score_pairs``


def measure(
    found: ModelLocation,
    data: EvaluationData,
    metrics: Sequence[str],
    *,
    settings: GenerationSettings | None = None,
    extract: str | None = None,
    placement: Placement = ALL_GPUS,
    report: Report = report_aside,
) -> Scores:
    """Measures a model on all its GPUs. UserError for metrics that the samples cannot give."""
    begin, metrics = time.monotonic(), check_metrics(metrics, extract)
    settings = settings or GenerationSettings()
    samples = data.open()
    slots = placement.slots(count_weight_bytes(found.weights))
    has_losses = any(metric in LOSS_METRICS for metric in metrics)
    has_texts = any(metric in TEXT_METRICS for metric in metrics)
    has_pairs = any(metric in PAIR_METRICS for metric in metrics)
    if has_losses and any(stream.name == DOCUMENTS.name for stream in samples.streams):
        raise UserError(
            "the loss of preferences is measured by the evaluations of its run",
            where=data.name,
            why="this command has the cross-entropy of single answers alone",
            fix="read the run's report; of pairs of answers also --metrics preference_accuracy,reward_margin, and "
            "compare texts with the chosen answers: rougeL",
        )
    if has_pairs and not are_pairs(samples):
        raise UserError(
            "these samples are no pairs of answers",
            where=data.name,
            fix=f"evaluate a run of task: preference, or choose from {', '.join((*LOSS_METRICS, *TEXT_METRICS))}",
        )
    numbers = data.choose(samples)
    groups = list(group_by_length(samples.lengths, numbers)) if has_losses or has_pairs else []
    turns: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for number in map(int, numbers[: data.limit] if has_texts else ()):
        turn = last_turn(split_documents(samples.sample(number), samples.streams)[0])
        if turn is not None:
            turns[number] = turn
    if has_texts and not turns:
        raise UserError(
            "no sample has a prompt to answer",
            where=data.name,
            why="all tokens of the samples are trained, as those of a text",
            fix=f"choose from {', '.join(LOSS_METRICS)}",
        )
    if not groups and not turns:
        raise UserError("there is no sample with loss tokens", where=data.name, fix="give other data: --data FILE")
    image_token = image_token_of(found.weights)
    prompts = [
        PromptTokens(number, ids, images_within(samples.sample(number), ids.count(image_token)))
        for number, (prompt, _) in turns.items()
        for ids in [tuple(prompt.tolist())]
    ]
    queue, waiting = PromptQueue(prompts, settings.max_new_tokens, len(slots)), list(enumerate(groups))[::-1]
    kind_of_groups = "pairs" if has_pairs else "loss"

    def next_task(capacity: BatchCapacity) -> tuple[str, Any] | None:
        if waiting:
            return kind_of_groups, waiting.pop()
        batch = queue.take(capacity)
        return None if batch is None else ("answers", batch)

    sums: dict[int, list[float]] = {}
    pairs: dict[int, np.ndarray] = {}
    answers: dict[int, Completion] = {}

    def take(result: tuple[str, Any]) -> None:
        kind, value = result
        if kind in ("loss", "pairs"):
            done: dict[int, Any] = sums if kind == "loss" else pairs
            done.update([value])
            report(f"{kind}: {len(done):,} of {len(groups):,} batches")
        else:
            answers.update(value)
            report(f"answers: {len(answers):,} of {len(prompts):,}")

    given: dict[str, Any] = dict(found=found, settings=settings, placement=placement, num_replicas=len(slots))
    run_tasks(slots, functools.partial(Evaluator, data=data, **given), next_task, take)
    scores = Scores(num_samples=len(numbers) if sums or pairs else len(answers))
    if pairs:
        scores.pairs = np.concatenate([pairs[number] for number in sorted(pairs)])
    values: dict[str, float] = {}
    if sums:  # in the order of the batches, so that the number of copies does not change a bit
        loss, weight, correct, num_labels = np.sum([sums[number] for number in sorted(sums)], axis=0).tolist()
        means = {LANGUAGE_MODEL.name: loss / weight, "correct": correct / num_labels}
        values = {"loss": means[LANGUAGE_MODEL.name]}
        values |= {metric.name: metric.figure(means[metric.of]) for metric in LANGUAGE_MODEL.metrics}
        scores.num_loss_tokens = int(num_labels)
    if answers:
        decode, extractor = open_texts(found), make_extractor(extract) if extract else None
        for number in sorted(answers):
            prompt, expected = map(decode, turns[number])
            answer = answers[number]
            judged = score(answer.text, expected, metrics, extractor)
            scores.answers.append(ScoredAnswer(prompt, expected, answer.text, answer.finish_reason, judged))
        for name in scores.answers[0].scores:
            values[name] = sum(one.scores[name] for one in scores.answers) / len(scores.answers)
    scores.values = {name: values[name] for name in metrics if name in values}
    scores.seconds = time.monotonic() - begin
    return scores


def open_texts(found: ModelLocation) -> Callable[[Any], str]:
    """Tokens to the text that a person reads: without special tokens."""
    tokenizer = open_found_tokenizer(found)
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True).strip()


def last_turn(sample: Sample) -> tuple[np.ndarray, np.ndarray] | None:
    """(prompt, reference) ids: the last run of loss tokens and all before it. None where nothing is before it: text."""
    trained = np.flatnonzero(sample[MASK.name])
    if not len(trained):
        return None
    end = int(trained[-1]) + 1
    gaps = np.flatnonzero(~sample[MASK.name][:end])
    start = int(gaps[-1]) + 1 if len(gaps) else 0
    return (sample[TOKENS.name][:start], sample[TOKENS.name][start:end]) if start else None


class Evaluator:
    """A copy of the model that measures batches of samples and answers prompts."""

    def __init__(
        self,
        slot: DeviceSlot,
        *,
        found: ModelLocation,
        data: EvaluationData,
        settings: GenerationSettings,
        placement: Placement,
        num_replicas: int,
    ) -> None:
        self._worker, self._samples = open_replica(slot, found, settings, placement, num_replicas), data.open()
        self.capacity = self._worker.capacity

    def run(self, task: tuple[str, Any]) -> tuple[str, Any]:
        """Tasks are (``loss`` or ``pairs``, (number of the batch, samples)) and (``answers``, prompts)."""
        kind, value = task
        if kind == "answers":
            return kind, self._worker.run(value)
        number, samples = value
        answerer = self._worker.answerer
        if kind == "pairs":
            return kind, (number, score_pairs(answerer.model, self._samples, samples, answerer.images))
        return kind, (number, sum_losses(answerer.model, self._samples, samples, answerer.images))


@torch.no_grad()
def sum_losses(model: Any, samples: SampleSet, numbers: np.ndarray, images: PromptImages | None = None) -> list[float]:
    """Loss, its weight, right tokens and loss tokens of some samples, summed in float64."""
    seen = samples.num_images is not None and bool(samples.num_images[numbers].any())
    if seen or getattr(model, "hf_device_map", None):
        # By the model's own forward pass: where layers are divided, what ``LossModel`` calls is not on one device.
        total = np.zeros(4)
        for number in numbers:
            weights = torch.from_numpy(weights_of(samples.sample(int(number))))[1:].double()
            ((losses, hits, trained),) = _compute_alone(model, samples, int(number), images)
            correct = (hits & trained).sum()
            total += [float((losses * weights).sum()), float(weights.sum()), float(correct), float(trained.sum())]
        return total.tolist()
    device, loss_model = next(model.parameters()).device, LossModel(model).eval()
    shape = BatchShape(packed=False, tells_documents=loss_model.needs_documents)
    terms = loss_model(to_device(collate(samples, numbers, shape), device), metrics=True)
    return torch.stack([*terms["lm"], *terms["correct"]]).double().tolist()


def are_pairs(samples: SampleSet) -> bool:
    """Whether each sample has two answers, and not one that is judged."""
    names = {stream.name for stream in samples.streams}
    return DOCUMENTS.name in names and LABELS.name not in names


@torch.no_grad()
def score_pairs(model: Any, samples: SampleSet, numbers: np.ndarray, images: PromptImages | None = None) -> np.ndarray:
    """(p, 2, 2) float64: of the chosen and the rejected answer of each pair its log-probability and its tokens."""
    if getattr(model, "hf_device_map", None):
        raise UserError(
            "pairs of answers are not measured where one copy's layers are divided over GPUs",
            where="--device-map",
            fix="use GPUs that hold a whole copy, or read the evaluations of the run's report",
        )
    if samples.num_images is not None and samples.num_images[numbers].any():
        scores = [
            (-float(losses[trained].sum()), int(trained.sum()))
            for number in numbers
            for losses, _, trained in _compute_alone(model, samples, int(number), images)
        ]
        return np.array(scores, dtype=np.float64).reshape(-1, 2, 2)
    found: list[Answers] = []

    def collect(loss_model: LossModel, batch: Any, hidden: torch.Tensor, metrics: bool) -> dict[str, Any]:
        found.append(loss_model.answers(batch, hidden))
        return {}

    device, loss_model = next(model.parameters()).device, LossModel(model, terms=(LossTerm("pairs", compute=collect),))
    shape = BatchShape(packed=False, tells_documents=loss_model.needs_documents)
    loss_model.eval()(to_device(collate(samples, numbers, shape), device))
    return torch.stack([found[0].log_probabilities, found[0].num_tokens.double()], -1).view(-1, 2, 2).cpu().numpy()


def judge_pairs(settings: PreferenceSection, pairs: np.ndarray, reference: np.ndarray | None) -> dict[str, float]:
    """The metrics of pairs (p, 2, 2), as in evaluations of the run. ``reference``: those before training."""
    flat = torch.from_numpy(pairs).flatten(0, 1)
    before = None if reference is None else torch.from_numpy(reference).flatten(0, 1)[:, 0]
    rewards = compute_rewards(settings, Answers(flat[:, 0], flat[:, 1]), before)
    margins = rewards[0::2] - rewards[1::2]
    return {"preference_accuracy": float((margins > 0).double().mean()), "reward_margin": float(margins.mean())}


def _compute_alone(
    model: Any, samples: SampleSet, number: int, images: PromptImages | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(losses float64, whether the token is the arg max, whether it is trained) of each document's tokens but the
    first, by the model's own forward pass on it; all documents of a sample see its images."""
    sample = samples.sample(number)
    stored = from_streams(sample) if samples.num_images is not None else ()
    if stored and images is None:
        raise refuse_images()
    for document in split_documents(sample, samples.streams):
        ids = torch.tensor(document[TOKENS.name], dtype=torch.int64)
        inputs = images.inputs(model, ids.tolist(), stored) if stored and images is not None else {}
        logits = model(input_ids=ids[None].to(model.device), use_cache=False, **inputs).logits[0, :-1].float().cpu()
        losses = cross_entropy(logits, ids[1:], reduction="none").double()
        yield losses, logits.argmax(-1) == ids[1:], torch.from_numpy(document[MASK.name].copy())[1:]


def group_by_length(lengths: np.ndarray, numbers: np.ndarray, max_tokens: int = BATCH_TOKENS) -> Iterator[np.ndarray]:
    """Samples of like lengths together, each group at most ``max_tokens`` with its padding, or one sample."""
    ordered, start = numbers[np.argsort(-lengths[numbers], kind="stable")], 0
    while start < len(ordered):
        size = max(1, max_tokens // max(1, int(lengths[ordered[start]])))
        yield ordered[start : start + size]
        start += size
