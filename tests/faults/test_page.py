"""docs/faults.md says what the rows say, and no more."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import ROOT
from tests.faults.audit import Audit
from tests.faults.cells import Cell, cells
from tests.faults.page import ROWS, read_hostile, read_rows, read_soaked, write_page

ROW = {"exits": [0], "lost": 2, "detected_s": 0.5, "again_s": None, "said": "a | b", "wrong": "", "forked": True}


def test_the_page_is_what_the_results_make_of_it() -> None:
    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    written = write_page(read_rows(ROWS), read_soaked(), read_hostile())
    assert page == written, "make faults ARGS='--limit-s 0' writes it again"


def test_every_row_is_of_a_cell() -> None:
    assert set(read_rows(ROWS)) <= set(cells())


def test_the_page_counts_what_was_measured_and_names_what_was_not() -> None:
    first, second, *others = cells()
    rows = {first: {**ROW, "when": "2026-01-02"}, second: {**ROW, "wrong": "it hung", "when": "2026-01-03"}}
    page = write_page(rows)
    assert f"Measured: 2 of {len(others) + 2} cells, 2026-01-02 to 2026-01-03; 1 of them did not hold" in page
    assert f"| {first.fault} | 2 | 1 | 0 | 2 | 0.5 s |" in page and f"**{second.name}: it hung**" in page
    for launcher in dict.fromkeys(cell.launcher for cell in others):
        _, _, missing = page.partition(f"Not measured under {launcher}: ")
        for layout in {cell.layout for cell in others if cell.launcher == launcher}:
            assert layout in missing.partition(".")[0]


def test_cases_of_hostile_files_are_added_up() -> None:
    rows = [{"kind": "run", "cases": 500, "failed": 0, "seconds": 2, "when": "2026-01-02"} for _ in range(2)]
    rows.append({"kind": "image", "cases": 10, "failed": 1, "seconds": 0, "when": "2026-01-03"})
    assert "Measured on 2026-01-03: 1,010 cases of 2 kinds of files; 1 of them did not hold." in write_page(
        {}, None, rows
    )


def test_cells_are_told_apart_by_the_names_of_their_runs() -> None:
    every = list(cells())
    assert len({cell.run_name for cell in every}) == len(every) == len(set(every))
    assert Cell("SIGKILL of one rank", "step", "LoRA, DDP x2") in every


def test_no_cell_asks_for_what_its_runs_do_not_have() -> None:
    """A plant waits for the process that it is to kill: where there is none, it would itself be what hangs."""
    of_zero = [cell for cell in cells() if "ZeRO" in cell.layout]
    assert of_zero and not any(cell.moment == "staging" or "writer" in cell.fault for cell in of_zero)
    assert {cell.moment for cell in of_zero} >= {"saving", "export", "step"}


def test_steps_lost_are_those_that_any_rank_began_again(tmp_path: Path) -> None:
    """One that was in flight too, though its rank did not get all of its batches."""
    attempts = {1: (10, range(5, 9)), 2: (11, range(5, 10)), 3: (20, range(7, 13)), 4: (21, range(7, 13))}
    begun = [
        {"begun": step, "rank": number % 2, "pid": pid} for number, (pid, steps) in attempts.items() for step in steps
    ]
    trained = {"step": 5, "rank": 0, "pid": 10, "samples": [1]}
    (tmp_path / "audit").write_text("".join(json.dumps(line) + "\n" for line in (*begun, trained)))
    audit = Audit.read(tmp_path / "audit")
    assert audit.num_lost() == 3 and audit.lines == (trained,), "steps 7, 8 and 9"
