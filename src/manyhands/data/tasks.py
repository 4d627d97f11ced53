"""What a run can train, by the name of ``task`` in its run file. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.core.terms import LANGUAGE_MODEL, LossTerm


@dataclass(frozen=True)
class Task:
    """The terms of its loss, whose metrics evaluations show, and its words in a model card.

    What a sample is, its streams declare (``streams.py``): one of several ``documents``, such as a pair, stays together
    in every batch, which tells ``LossTerm.compute`` where each begins.
    """

    name: str
    description: str
    terms: tuple[LossTerm, ...] = (LANGUAGE_MODEL,)


TASKS = {
    task.name: task
    for task in (
        Task("sft", "supervised fine-tuning on conversations"),
        Task("cpt", "continued pre-training on text"),
        Task("mixed", "supervised fine-tuning and continued pre-training on text"),
    )
}
