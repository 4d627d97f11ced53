"""Scores of an answer against its reference: exact match after extraction, word overlap (F1), ROUGE. Torch-free.

Each is a share in [0, 1] of one answer; a data set's figure is their mean. ROUGE is the F-measure on lowercase words of
letters and digits without stemming (Lin, 2004), as the package ``rouge-score`` computes it with its defaults.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import regex

from manyhands.config.tasks import PREFERENCE_METRICS
from manyhands.core.errors import UserError
from manyhands.core.terms import LANGUAGE_MODEL

MATCH_S = 1.0  # of one text; a pattern with nested repeats may never end
WORD = re.compile(r"[a-z0-9]+")
NUMBER = re.compile(r"-?\$?-?[\d,]*\.?\d+%?\.?")


@dataclass(frozen=True)
class Extractor:
    """Takes the part of a text that is compared: the first group of ``pattern``'s first or last match."""

    pattern: str
    takes_last: bool = True

    def extract(self, text: str) -> str | None:
        """None where there is no match. UserError for a pattern that takes too long."""
        try:
            found = list(regex.compile(self.pattern).finditer(text, timeout=MATCH_S))
        except TimeoutError:
            raise UserError(
                "the pattern takes too long", where=f"--extract {self.pattern}", fix="write it without nested repeats"
            ) from None
        if not found:
            return None
        match = found[-1 if self.takes_last else 0]
        return next((group for group in match.groups() if group is not None), match[0])


def _balance_braces(depth: int) -> str:
    """Text with balanced braces (``\\frac{1}{2}``), in linear time, which a recursive pattern would not take."""
    return "[^{}]*+" if depth == 0 else rf"(?:[^{{}}]++|\{{{_balance_braces(depth - 1)}\}})*+"


EXTRACTORS = {
    "gsm8k": Extractor(r"#### (\-?[0-9\.\,]+)", takes_last=False),  # as GSM8K's answers end
    "number": Extractor(r"-?\$?-?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)"),  # the last one; "72, or ..." has no comma in it
    "boxed": Extractor(rf"\\boxed\{{({_balance_braces(6)})\}}"),
    "choice": Extractor(r"\b([A-J])\b", takes_last=False),
}


def make_extractor(asked: str) -> Extractor:
    """By name, else a regular expression whose last match counts. UserError for one that is invalid."""
    if asked in EXTRACTORS:
        return EXTRACTORS[asked]
    try:
        regex.compile(asked)
    except regex.error as error:
        raise UserError(
            "the pattern is not a valid regular expression",
            where=f"--extract {asked}",
            why=str(error),
            fix=f"correct it, or use a name: {', '.join(EXTRACTORS)}",
        ) from None
    return Extractor(asked)


def normalize(text: str) -> str:
    """Blanks as one; of a number without commas, currency sign and a full stop at its end."""
    text = " ".join(text.split())
    return re.sub(r"[$,%]", "", text).rstrip(".") if NUMBER.fullmatch(text) else text


def exact_match(answer: str, reference: str, extractor: Extractor | None = None) -> float:
    """Whether they are equal, or after extraction. An answer without a match is wrong; a reference counts whole."""
    if extractor is not None:
        found = extractor.extract(answer)
        if found is None:
            return 0.0
        answer, reference = found, extractor.extract(reference) or reference
    return float(normalize(answer) == normalize(reference))


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of words, each as often as it occurs."""
    return _overlap(Counter(_words(answer)), Counter(_words(reference)))


def rouge_n(answer: str, reference: str, n: int) -> float:
    return _overlap(_ngrams(_words(answer), n), _ngrams(_words(reference), n))


def rouge_l(answer: str, reference: str) -> float:
    """By the longest common subsequence of words."""
    left, right = _words(answer), _words(reference)
    lengths = [0] * (len(right) + 1)
    for word in left:
        before = 0  # of the row above, one column to the left
        for column, other in enumerate(right, start=1):
            above = lengths[column]
            lengths[column] = before + 1 if word == other else max(above, lengths[column - 1])
            before = above
    return _harmonic(lengths[-1], len(left), len(right))


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def _overlap(left: Counter, right: Counter) -> float:
    return _harmonic((left & right).total(), left.total(), right.total())


def _harmonic(common: int, num_left: int, num_right: int) -> float:
    return 2 * common / (num_left + num_right) if common else 0.0


LOSS_METRICS = ("loss", *(metric.name for metric in LANGUAGE_MODEL.metrics))
PAIR_METRICS = tuple(metric.name for metric in PREFERENCE_METRICS)  # of pairs of answers
TEXT_METRICS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "f1": f1,
    "rouge1": lambda answer, reference: rouge_n(answer, reference, 1),
    "rouge2": lambda answer, reference: rouge_n(answer, reference, 2),
    "rougeL": rouge_l,
}


def score(answer: str, reference: str, metrics: Sequence[str], extractor: Extractor | None) -> dict[str, float]:
    """The asked text metrics of one answer. Extraction is for exact_match alone."""
    return {
        name: exact_match(answer, reference, extractor)
        if name == "exact_match"
        else TEXT_METRICS[name](answer, reference)
        for name in metrics
        if name in TEXT_METRICS
    }


def check_metrics(asked: Sequence[str], extract: str | None) -> tuple[str, ...]:
    """The metrics, each once. UserError for unknown ones, and for an extraction that nothing would use."""
    known = (*LOSS_METRICS, *PAIR_METRICS, *TEXT_METRICS)
    if unknown := next((name for name in asked if name not in known), None):
        raise UserError(f"there is no metric {unknown}", where="--metrics", fix=f"choose from {', '.join(known)}")
    if not asked:
        raise UserError("no metric is named", where="--metrics", fix=f"choose from {', '.join(known)}")
    if extract is not None:
        make_extractor(extract)
        if "exact_match" not in asked:
            raise UserError("--extract is for exact_match", where="--metrics", fix="add exact_match to --metrics")
    return tuple(dict.fromkeys(asked))
