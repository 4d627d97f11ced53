"""Scores of answers: by hand, and beside rouge-score where it is installed."""

from __future__ import annotations

import importlib.util
import random

import pytest

from manyhands.core.errors import UserError
from manyhands.infer.text_metrics import EXTRACTORS, check_metrics, exact_match, f1, make_extractor, rouge_l, rouge_n

GSM8K = "She sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"


@pytest.mark.parametrize(
    ("extract", "answer", "expected"),
    [
        ("gsm8k", "In all 72.\n#### 72", 1),
        ("gsm8k", "#### 72.00", 0),  # the same number, not the same text: as lm-eval's strict match
        ("gsm8k", "In all 72.", 0),
        ("gsm8k", "#### 72 no, #### 73", 1),  # the first counts
        ("number", "She has $72.", 1),
        ("number", "72, or 73", 0),  # the last counts
        ("number", "She has 72, in all. Well...", 1),  # neither a comma behind it nor an ellipsis is of a number
        ("number", "72... of them", 1),
        ("number", "-72", 0),
        (r"in all (\d+)", "in all 71, no, in all 72", 1),
    ],
)
def test_an_answer_is_right_if_what_is_extracted_is(extract: str, answer: str, expected: int) -> None:
    reference = GSM8K if extract in EXTRACTORS else "in all 72"
    assert exact_match(answer, reference, make_extractor(extract)) == expected


def test_numbers_are_compared_without_commas_and_signs_and_texts_as_they_are() -> None:
    gsm8k = make_extractor("gsm8k")
    assert exact_match("#### 1,200", "#### 1200", gsm8k) == 1
    assert (
        exact_match(" a  b\n", "a b") == 1
        and exact_match("A b", "a b") == 0
        and exact_match("1,2 and 3", "12 and 3") == 0
    )
    assert exact_match(r"so \boxed{7}", r"\boxed{7}", make_extractor("boxed")) == 1
    fraction = r"\boxed{\frac{1}{2}}"
    assert exact_match(f"so {fraction}.", fraction, make_extractor("boxed")) == 1
    assert exact_match(r"so \boxed{\frac{1}{3}}", fraction, make_extractor("boxed")) == 0
    assert exact_match(r"\boxed{" * 500, fraction, make_extractor("boxed")) == 0
    assert exact_match("it is 1,200, I think", "1200", make_extractor("number")) == 1
    assert exact_match("The answer is B.", "B", make_extractor("choice")) == 1


def test_word_overlap_by_hand() -> None:
    assert f1("the cat sat", "the cat") == pytest.approx(0.8)
    assert f1("a a b", "a b b") == pytest.approx(2 / 3)
    assert rouge_n("the cat sat on", "the cat lay on", 2) == pytest.approx(1 / 3)
    assert rouge_l("the cat sat on it", "the sat it lay") == pytest.approx(2 * 3 / 9)
    assert f1("", "a") == f1("a", "") == rouge_l("", "") == 0


@pytest.mark.skipif(importlib.util.find_spec("rouge_score") is None, reason="rouge-score is not installed")
def test_rouge_is_that_of_rouge_score() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    choose = random.Random(0)
    for _ in range(200):
        one, other = (
            " ".join(choose.choices(["The", "cat's", "dog,", "12", "é", "x-y."], k=choose.randint(0, 12))) for _ in "ab"
        )
        expected = scorer.score(other, one)
        assert rouge_n(one, other, 1) == pytest.approx(expected["rouge1"].fmeasure)
        assert rouge_n(one, other, 2) == pytest.approx(expected["rouge2"].fmeasure)
        assert rouge_l(one, other) == pytest.approx(expected["rougeL"].fmeasure)


@pytest.mark.parametrize(
    ("metrics", "extract", "said"),
    [
        (["los"], None, "no metric los"),
        ([], None, "no metric is named"),
        (["loss"], "gsm8k", "--extract is for exact_match"),
        (["exact_match"], "(", "not a valid regular expression"),
    ],
)
def test_what_cannot_be_measured_is_refused(metrics: list[str], extract: str | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_metrics(metrics, extract)


def test_a_pattern_that_never_ends_is_refused() -> None:
    with pytest.raises(UserError, match="takes too long"):
        exact_match("a" * 40, "a", make_extractor(r"(a|a)+(a|a)+(a|a)+$!"))
