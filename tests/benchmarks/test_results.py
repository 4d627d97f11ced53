"""docs/results.md against the raw rows that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from manyhands.bench.rows import TABLE, BenchRow, read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LEARNING = (ROOT / "docs/lab/learning.md").read_text(encoding="utf-8")
PAGES = [(ROOT / "docs/results.md"), *sorted((ROOT / "docs/lab").glob("*.md"))]


def table() -> list[list[str]]:
    """Cells of the rows of docs/results.md."""
    lines = (ROOT / "docs/results.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line[2:-2].split(" | ")] for line in lines if re.match(r"\|.*`h\d00-.*\|$", line)]


def number(cell: str) -> float:
    return float(cell.split()[0].rstrip(",").replace(",", ""))


@pytest.mark.parametrize("cells", table(), ids=lambda cells: f"{cells[0][:40]} {cells[1]} {cells[2]}")
def test_the_figures_of_each_line_are_those_of_a_raw_row(cells: list[str]) -> None:
    _, gpus, ours, peer, memory, seconds, _, file = cells
    rows = [row for row in read(RESULTS / f"{file.strip('`')}.jsonl") if row["gpus"] == int(gpus)]
    found = [row for row in rows if "planned_gib" in row and row["tokens_per_s_gpu"] == number(ours)]
    assert any(
        memory.split(" ‡")[0] == f"{row['planned_gib']:.1f}, {row['peak_reserved_gib'] + row.get('outside_gib', 0):.1f}"
        and seconds.split(", ")[-1] == f"{row['step_s']:.3f}"
        for row in found
    )
    if not peer:
        return
    theirs = [row for row in rows if row["label"] in ("trl", "unsloth") and row["row"] == found[0]["row"]]
    theirs = [row for row in theirs if row.get("machine") == found[0].get("machine")]
    best = max(row["tokens_per_s_gpu"] for row in theirs)
    assert number(peer) == best and ("machine" in found[0]) == ("†" not in peer)
    if "×" in peer:
        assert peer.endswith(f", {number(ours) / best:.2f} ×")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_the_figures_that_the_command_shows_are_those_of_raw_rows(row: BenchRow) -> None:
    rows = [found for file in RESULTS.glob("*.jsonl") for found in read(file) if found.get("row") == row.name]
    known = {(r["gpus"], r["tokens_per_s_gpu"], round(r["peak_allocated_gib"], 1)) for r in rows if "planned_gib" in r}
    assert {(gpus, *figures) for gpus, figures in row.recorded.items()} <= known


@pytest.mark.parametrize("kind", ["h100", "h200"])
def test_profiled_steps_are_those_of_the_rows_that_they_name(kind: str) -> None:
    rows = read(RESULTS / f"{kind}-close.jsonl")
    for profile in read(RESULTS / f"{kind}-profiles.jsonl"):
        (row,) = [r for r in rows if (r["run"], r["label"]) == (profile["run"], profile["label"])]
        assert (row["row"], row["machine"]) == (profile["profile_of"], profile["machine"])


def test_the_demo_has_learned_what_is_claimed() -> None:
    report = json.loads((RESULTS / "demo.json").read_text())
    before, after = report["evaluations"][0], report["evaluations"][-1]
    losses = f"{before['loss']:.3f} to {after['loss']:.3f}"
    accuracies = f"{100 * before['accuracy']:.1f} % to {100 * after['accuracy']:.1f} %"
    assert f"Held-out loss {losses}, token accuracy {accuracies}" in LEARNING
    assert losses in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"[\w*-]+\.jsonl?\b", page.read_text(encoding="utf-8")):
        assert list(RESULTS.glob(name)) or list(ROOT.glob(f"tests/**/{name}")), name
