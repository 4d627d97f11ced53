"""A few cells of the fault matrix, and a few cycles of the soak, as ``make faults`` and the soak run them: in processes
of their own, as forks of one that has had threads cannot train.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.faults.cells import OURS, TORCHRUN, Cell
from tests.faults.page import Found, found_in, read_rows
from tests.faults.plants import SAVED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # whole runs in processes of their own
SAVING = Cell("SIGKILL of one rank", "saving", "LoRA, DDP x2", OURS)
WORKER = Cell("SIGKILL of a data worker", "step", "LoRA, DDP x2", OURS)
ELSEWHERE = Cell("SIGKILL of all ranks", "step", "LoRA, DDP x2", TORCHRUN)


def run(*arguments: str) -> str:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-m", *arguments], env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Found]:
    rows = tmp_path_factory.mktemp("faults") / "rows.jsonl"
    run("tests.faults.matrix", "--rows", str(rows), "--only", *(cell.name for cell in (SAVING, WORKER, ELSEWHERE)))
    return {cell: found_in(row) for cell, row in read_rows(rows).items()}


def test_a_rank_killed_while_it_saves_loses_the_steps_since_the_checkpoint(found: dict[Cell, Found]) -> None:
    """The save of step 8 may just be complete, or is not any more: what the message says is what is done again."""
    one = found[SAVING]
    assert one.wrong == "" and one.exits == [0]
    assert one.detected_s is not None and one.again_s is not None
    said = re.search(r"restarting from step (\d+), (\d+) steps? lost", one.said)
    assert said is not None, one.said
    saved, lost = map(int, said.groups())
    assert saved in (4, SAVED) and lost == one.lost, one
    assert SAVED <= saved + lost <= 12, "from the save's step on, and the next save waits for this one"


def test_a_data_worker_that_is_killed_is_a_fault_and_not_the_end(found: dict[Cell, Found]) -> None:
    assert found[WORKER].wrong == "" and found[WORKER].exits == [0], found[WORKER]


def test_under_torchrun_the_same_command_goes_on(found: dict[Cell, Found]) -> None:
    one = found[ELSEWHERE]
    assert one.wrong == "" and one.exits[0] != 0 and one.exits[-1] == 0 and one.again_s is None, one


def test_a_soak_of_five_cycles_that_is_interrupted_ends_as_a_run_left_alone(tmp_path: Path) -> None:
    command = ("tests.faults.soak", str(tmp_path), "--cycles", "5", "--limit-s")
    first = json.loads(run(*command, "0").splitlines()[-1])  # the run left alone
    assert first["cycles"] == 0 and not first["is_same"]
    last = json.loads(run(*command, "600").splitlines()[-1])
    assert last["cycles"] == 5 and last["is_same"] and last["steps_trained"] >= last["num_steps"]
