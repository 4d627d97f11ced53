"""Pairs of answers from GSM8K: the worked solution, and the same one with wrong results.

    python benchmarks/gsm8k_pairs.py --data gsm8k/train.jsonl --output pairs --pairs 240 --held-out 60

Writes train.jsonl and test.jsonl, rows of prompt, chosen and rejected. Problems are drawn by --seed among those of at
most --characters. In the rejected answer each result of a calculation is, wherever it stands, another number of as many
digits.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
CALCULATION = re.compile(r"<<[^<>]*=([^<>=]+)>>")


def change_results(solution: str, rng: random.Random) -> str:
    """The solution with other digits in its results; those of a number that is a result twice are the same."""
    results = {found.replace(",", "") for found in CALCULATION.findall(solution)}
    results.add(NUMBER.findall(solution.split("####")[-1])[0].replace(",", ""))
    others: dict[str, str] = {}

    def change(match: re.Match[str]) -> str:
        number = match[0].replace(",", "")
        if number not in results:
            return match[0]
        while others.get(number, number) == number:
            drawn = "".join(str(rng.randrange(10)) if digit.isdigit() else digit for digit in number)
            others[number] = number if len(drawn) > 1 and drawn[0] == "0" else drawn
        return others[number]

    return NUMBER.sub(change, solution)


def write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=240)
    parser.add_argument("--held-out", type=int, default=60)
    parser.add_argument("--characters", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    rows = [json.loads(line) for line in given.data.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row["question"]) + len(row["answer"]) <= given.characters]
    rows = rng.sample(rows, given.pairs + given.held_out)
    pairs = [
        {
            "prompt": row["question"],
            "chosen": row["answer"],
            "rejected": change_results(row["answer"], rng),
        }
        for row in rows
    ]
    given.output.mkdir(parents=True, exist_ok=True)
    write_rows(given.output / "train.jsonl", pairs[: given.pairs])
    write_rows(given.output / "test.jsonl", pairs[given.pairs :])


if __name__ == "__main__":
    main()
