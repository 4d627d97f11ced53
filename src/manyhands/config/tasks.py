"""What a run can train, by the name of ``task`` in its run file. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.core.references import import_reference
from manyhands.core.terms import LANGUAGE_MODEL, LossTerm, Metric, StepValue

if TYPE_CHECKING:
    import numpy as np

# Names of ``data.format``: conversations, two answers to one prompt, answers that are good or bad, plain text, and rows
# that say themselves what is trained.
CONVERSATIONS = ("messages", "sharegpt", "alpaca", "prompt", "question", "query")
PAIRS = ("preference", "rejected_response")
JUDGED = ("label",)
TEXT = ("text",)
READY = ("tokens", "segments")


@dataclass(frozen=True)
class Task:
    """What a sample is made of, the terms of its loss, whose metrics evaluations show, and its words.

    Args:
        summary: of the key ``task``.
        description: in a model card.
        formats: of the rows it takes (``data/read/formats.py``), the one to suggest first.
        make_terms: from the run's configuration.
        section: of the run file, which this task alone reads.
        num_documents: of a sample: they stay together in order, packs and batches, which tells ``LossTerm.compute``
            where each begins (``DOCUMENTS`` in ``data/store/streams.py``).
    """

    name: str
    summary: str
    description: str
    formats: tuple[str, ...]
    make_terms: Callable[[Any], tuple[LossTerm, ...]] = lambda config: (LANGUAGE_MODEL,)
    section: str = ""
    num_documents: int = 1

    @property
    def takes_text(self) -> bool:
        """Whether it trains plain text, which may be split."""
        return not set(TEXT).isdisjoint(self.formats)

    @property
    def takes_chats(self) -> bool:
        """Whether the chat template writes some of its rows."""
        return not set(self.formats) <= {*TEXT, *READY}

    @property
    def mixes(self) -> bool:
        """Whether each row may have a format of its own."""
        return self.takes_text and self.takes_chats


def weigh_samples(samples: Any, numbers: np.ndarray) -> np.ndarray:
    """1 for each sample."""
    return numbers >= 0


def weigh_chosen_tokens(samples: Any, numbers: np.ndarray) -> np.ndarray:
    """The loss tokens of the first document of each sample, the chosen answer."""
    count = import_reference("manyhands.data.store.streams:count_first_loss_tokens")
    return count(samples, numbers)


REFERENCE_ENTRIES = frozenset({"reference", "cu_reference"})
PREFERENCE_METRICS = (
    Metric("preference_accuracy", "preferred", label="preference accuracy", is_share=True),
    Metric("reward_margin", "margin", label="reward margin"),
)


def make_preference_terms(config: Any) -> tuple[LossTerm, ...]:
    """The term of ``preference.loss``, and that of ``preference.sft_weight``, which it computes too."""
    settings = config.preference

    def compute(*arguments: Any) -> Any:
        return import_reference("manyhands.model.preference:compute_preference")(settings, *arguments)

    pairs = LossTerm(
        *("preference", 1.0, weigh_samples, compute, PREFERENCE_METRICS, REFERENCE_ENTRIES),
        needs_reference=settings.needs_reference,
    )
    sft = LossTerm("sft", settings.sft_share, weigh_chosen_tokens, lambda *arguments: {})
    return (pairs, sft) if settings.sft_share else (pairs,)


def cycle_answers(samples: Any, numbers: np.ndarray) -> np.ndarray:
    """Samples that have the prompt of each of these and the answer of the one before it."""
    return import_reference("manyhands.data.store.store:cycle_answers")(samples, numbers)


KTO_METRICS = (
    Metric("kl", "kl", label="KL"),
    Metric("desirable_reward", "desirable_reward", label="reward of good answers"),
    Metric("undesirable_reward", "undesirable_reward", label="reward of bad answers"),
)


def make_kto_terms(config: Any) -> tuple[LossTerm, ...]:
    """The term of judged answers, with the KL of the step that it compares with."""
    settings = config.preference

    def compute(*arguments: Any) -> Any:
        return import_reference("manyhands.model.preference:compute_kto")(settings, *arguments)

    def compute_kl(*arguments: Any) -> Any:
        return import_reference("manyhands.model.preference:compute_kl")(*arguments)

    value = StepValue("kl", cycle_answers, compute_kl)
    entries = frozenset({"label", "cu_label"})
    return (LossTerm("kto", 1.0, weigh_samples, compute, KTO_METRICS, entries, value, needs_reference=True),)


TASKS = {
    task.name: task
    for task in (
        Task(
            "sft",
            "conversations, loss on answers",
            "supervised fine-tuning on conversations",
            (*CONVERSATIONS, *READY),
        ),
        Task("cpt", "text, loss on all tokens", "continued pre-training on text", (*TEXT, *READY)),
        Task(
            "mixed",
            "both, by format",
            "supervised fine-tuning and continued pre-training on text",
            (*CONVERSATIONS, *TEXT, *READY),
        ),
        Task(
            "preference",
            "pairs of answers, loss on which is chosen",
            "preference tuning on pairs of answers",
            PAIRS,
            make_preference_terms,
            section="preference",
            num_documents=2,
        ),
        Task(
            "kto",
            "answers, each good or bad",
            "preference tuning on judged answers",
            JUDGED,
            make_kto_terms,
            section="preference",
        ),
    )
}
DEFAULT_TASK = next(iter(TASKS))


def name_tasks(fits: Callable[[Task], bool]) -> str:
    """The names of the tasks that fit, for an error's way out."""
    return " or ".join(task.name for task in TASKS.values() if fits(task))
