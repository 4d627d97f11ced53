"""Pairs of answers made from GSM8K: the same by every call, with results that are wrong throughout."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import gsm8k_pairs

SOLUTION = "He has 3+4=<<3+4=7>>7 cats.\nWith 1,000 dogs that is 1,000+7=<<1000+7=1007>>1,007 pets.\n#### 1,007"


def test_results_are_wrong_wherever_they_stand() -> None:
    changed = gsm8k_pairs.change_results(SOLUTION, random.Random(0))
    cats, pets = changed.split("=")[2][:1], changed.split("#### ")[1]
    assert cats != "7" and pets not in ("1007", "1,007") and len(pets) == 4
    assert changed == (
        f"He has 3+4=<<3+4={cats}>>{cats} cats.\nWith 1,000 dogs that is 1,000+{cats}=<<1000+{cats}={pets}>>{pets} "
        f"pets.\n#### {pets}"
    )


def test_rows_are_the_same_by_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"How many, {n}?", "answer": SOLUTION} for n in range(9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder in ("a", "b"):
        given = ["--data", str(tmp_path / "train.jsonl"), "--output", str(tmp_path / folder)]
        monkeypatch.setattr(sys, "argv", ["gsm8k_pairs", *given, "--pairs", "5", "--held-out", "2"])
        gsm8k_pairs.main()
    train, test = ((tmp_path / "a" / name).read_text() for name in ("train.jsonl", "test.jsonl"))
    assert (train, test) == tuple((tmp_path / "b" / name).read_text() for name in ("train.jsonl", "test.jsonl"))
    pairs = [json.loads(line) for line in (train + test).splitlines()]
    assert len({pair["prompt"] for pair in pairs}) == 7 and all(pair["chosen"] != pair["rejected"] for pair in pairs)
