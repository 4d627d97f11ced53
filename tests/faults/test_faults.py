"""A few cells of the fault matrix, and a few cycles of the soak, as ``make faults`` and the soak run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.matrix import Cell, Matrix, cells, write_table
from tests.faults.soak import soak, steps_trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # whole runs in processes of their own
LAYOUT = "LoRA, DDP x2"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("faults"))


def test_a_rank_killed_while_it_saves_loses_the_steps_since_the_checkpoint(matrix: Matrix) -> None:
    found = matrix.measure(Cell("SIGKILL of one rank", "saving", LAYOUT))
    assert found.wrong == "" and found.exits == [0] and 0 < found.lost <= 5
    assert found.detected_s is not None and found.again_s is not None and "restarting from step" in found.said


def test_a_data_worker_that_is_killed_is_a_fault_and_not_the_end(matrix: Matrix) -> None:
    found = matrix.measure(Cell("SIGKILL of a data worker", "step", LAYOUT))
    assert found.wrong == "" and found.exits == [0], found


def test_a_soak_of_five_cycles_ends_as_a_run_left_alone(tmp_path: Path) -> None:
    first = soak(tmp_path, num_cycles=5, limit_s=0, is_last=False)  # the run left alone
    assert first.cycles == 0 and not first.is_same
    found = soak(tmp_path, num_cycles=5, limit_s=600)
    assert found.cycles == 5 and found.is_same and steps_trained(tmp_path) >= found.num_steps


def test_the_table_has_a_row_for_each_cell_and_shows_what_was_not_run() -> None:
    text = write_table({}, "not measured")
    assert text.count("\n| ") == 1 + sum(1 for _ in cells()) and "Measured: 0 of" in text
