"""docs/results.md against the raw rows that it names: a figure of the speed tables stands in one of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from manyhands.bench.rows import TABLE, BenchRow, read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TEXT = (ROOT / "docs" / "results.md").read_text()


def table(header: str) -> list[list[str]]:
    """Cells of the rows below the line that begins so."""
    lines = TEXT[TEXT.index(header) :].splitlines()[2:]
    rows = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip().replace("**", "") for cell in row.strip("|").split("|")] for row in rows]


def number(cell: str) -> float | None:
    found = re.search(r"\d[\d,]*(\.\d+)?", cell)
    return float(found[0].replace(",", "")) if found else None


def measured() -> set[tuple[bool, int, int]]:
    """(ours, GPUs, tokens/s a GPU) of all raw rows."""
    rows = [row for file in RESULTS.glob("*.jsonl") for row in read(file) if "gpus" in row]
    rates = [("planned_gib" in row, row["gpus"], row.get("tokens_per_s_gpu") or row.get("tok_s_gpu")) for row in rows]
    return {(ours, num_gpus, rate) for ours, num_gpus, rate in rates if rate}


@pytest.mark.parametrize("row", table("| work | GPUs | ours"), ids=lambda row: f"{row[0][:40]} {row[1]}")
def test_each_speed_is_that_of_a_raw_row(row: list[str]) -> None:
    known, num_gpus = measured(), int(row[1])
    assert (True, num_gpus, number(row[2])) in known
    theirs = number(re.sub("in bfloat16|recomputes|on 1", "", row[3]))
    if theirs is not None:
        is_ours = row[3].startswith("ours")
        assert any((is_ours, gpus, theirs) in known for gpus in (num_gpus, 1))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_the_figures_that_the_command_shows_are_those_of_raw_rows(row: BenchRow) -> None:
    rows = [found for file in RESULTS.glob("*.jsonl") for found in read(file) if found.get("row") == row.name]
    known = {(r["gpus"], r["tokens_per_s_gpu"], round(r["peak_allocated_gib"], 1)) for r in rows if "planned_gib" in r}
    assert {(gpus, *figures) for gpus, figures in row.recorded.items()} <= known


def test_ratios_to_the_best_peer_are_those_of_their_line() -> None:
    rows = table("| work, one H200 | ours")
    assert rows
    for row in rows:
        ours, *theirs = (number(cell) for cell in row[1:4])
        assert ours is not None and number(row[4]) == round(ours / max(rate for rate in theirs if rate), 2)


@pytest.mark.parametrize(
    "header",
    [
        "| of a step on one H200 | 8B",
        "| of a step on one H200 | 70B",
        "| of a step in full |",
        "| of a step of one sample",
    ],
)
def test_what_a_step_takes_sums_to_it(header: str) -> None:
    *parts, steps = table(header)
    for column, step in enumerate(map(number, steps[1:]), start=1):
        taken = [number(row[column]) or 0.0 for row in parts]
        assert step is not None and abs(sum(taken) - step) <= 0.05 * len(parts)
        shares = [re.search(r"\((\S+) %\)", row[column]) for row in parts]
        assert all(abs(part / step - float(s[1]) / 100) < 0.006 for part, s in zip(taken, shares, strict=True) if s)


@pytest.mark.parametrize("kind", ["h100", "h200"])
def test_profiled_steps_are_those_of_the_rows_that_they_name(kind: str) -> None:
    rows = read(RESULTS / f"{kind}-close.jsonl")
    for profile in read(RESULTS / f"{kind}-profiles.jsonl"):
        (row,) = [r for r in rows if (r["run"], r["label"]) == (profile["run"], profile["label"])]
        assert (row["row"], row["machine"]) == (profile["profile_of"], profile["machine"])


def test_the_demo_has_learned_what_is_said_of_it() -> None:
    report = json.loads((RESULTS / "demo.json").read_text())
    before, after = report["evaluations"][0], report["evaluations"][-1]
    losses = f"{before['loss']:.3f} to {after['loss']:.3f}"
    accuracies = f"{100 * before['accuracy']:.1f} % to {100 * after['accuracy']:.1f} %"
    assert f"Held-out loss {losses}, token accuracy {accuracies}" in TEXT
    assert losses in (ROOT / "README.md").read_text()


def test_the_files_that_are_named_are_there() -> None:
    named = re.findall(
        r"(?:benchmarks/results/)?((?:h100|h200|gsm8k|methods|packing|prepare|demo)[\w*.-]*\.jsonl?)", TEXT
    )
    assert len(named) > 10
    for name in named:
        assert list(RESULTS.glob(name)), name
