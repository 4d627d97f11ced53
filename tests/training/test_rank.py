"""What a rank does when it is asked to stop, and when its numbers are guarded."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.core.collective_errors import run_on_all_ranks
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.launch.environment import Launcher
from manyhands.launch.run.folder import RunFolder
from manyhands.planner.efficiency import lay_out_step
from manyhands.training.guards import RollBack
from manyhands.training.types import TrainState
from manyhands.worker import guards, run, training
from manyhands.worker.rank import Data, Process, Rank
from manyhands.worker.session import Session
from tests.support.plans import make_plan


def make_rank(folder: Path, rank: int = 0) -> Any:
    """Of a run without configuration and plan."""
    process = Process(is_first=rank == 0, terminal=io.StringIO())
    process.log = process.terminal
    return Rank(None, None, RunFolder(folder), World(rank, rank, 2, torch.device("cpu")), process)  # type: ignore


@pytest.mark.parametrize("kind", ["torchrun", "accelerate", "slurm", "manyhands"])
@pytest.mark.parametrize("number", [0, 1])
def test_on_the_file_stop_all_ranks_end_with_0_where_an_agent_would_start_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    monkeypatch.setattr(run, "run_on_all_ranks", lambda work: [True, False])  # of both ranks
    folder = RunFolder(tmp_path)
    folder.stop_file.touch()
    session = Session(Launcher(kind, number, number, 2, 2))
    session.terminal = io.StringIO()
    session.stop_by_file = number == 0  # rank 0 alone looks for it
    assert run.end_interrupted(session, folder) == (0 if kind in ("torchrun", "accelerate") else 130)
    if number == 0:
        assert folder.was_stopped_by_file() and not folder.stop_file.exists()


def test_a_signal_ends_a_rank_with_its_own_code_under_torchrun_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run_on_all_ranks", lambda work: [work()])
    session, folder = Session(Launcher("torchrun", 0, 0, 1, 1)), RunFolder(tmp_path)
    session.terminal, session.stop = io.StringIO(), SimpleNamespace(number=15, exit_code=143)  # type: ignore
    assert run.end_interrupted(session, folder) == 143
    assert folder.read_status()["reason"] == "SIGTERM"


def test_a_look_for_the_file_stop_that_fails_is_repeated(tmp_path: Path) -> None:
    def fail() -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    rank = make_rank(tmp_path)
    rank.folder.stop_file = SimpleNamespace(exists=fail)
    assert not training.is_asked_to_stop(rank)
    rank.folder.stop_file, rank.process.look_again_at = SimpleNamespace(exists=lambda: True), 0.0
    assert training.is_asked_to_stop(rank)


def test_a_full_disk_is_named_by_its_file_or_by_whoever_knows_the_folder(tmp_path: Path) -> None:
    """Writing to an open file fails without its name: the current folder may be on another disk."""

    def fill(*name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", *name)

    with pytest.raises(OSError, match="No space left"):
        run_on_all_ranks(fill)
    with pytest.raises(UserError) as caught:
        run_on_all_ranks(lambda: fill(str(tmp_path / "weights")))
    assert caught.value.where == str(tmp_path / "weights") and f"free in {tmp_path}" in caught.value.why


def test_samples_of_a_bad_batch_are_listed_with_the_ranks_that_trained_them() -> None:
    lengths, units = np.full(8, 16), np.array([90, 80, 70, 0, 0, 0, 0, 0])
    plan = make_plan(strategy="ddp", world_size=2, micro_tokens=64, batch_samples=8, image_unit_cost=1.0)
    numbers, zeros = np.arange(8), np.zeros(8, dtype=np.int64)
    trained = lay_out_step(plan, numbers, lengths, units)
    owners = {int(one): rank for rank in range(2) for one in trained.samples_of_rank(rank)}
    by_tokens = lay_out_step(plan, numbers, lengths)
    assert owners != {int(one): rank for rank in range(2) for one in by_tokens.samples_of_rank(rank)}
    order = SimpleNamespace(locate=lambda step: (0, step), samples=lambda epoch, index: numbers)
    store = SimpleNamespace(
        train=SimpleNamespace(lengths=lengths, image_units=units, num_images=None, sources=zeros, places=numbers),
        meta={"sources": [{"name": "images"}]},
        lines=numbers + 1,
        file_number=lambda number: 0,
    )
    listed = guards.list_samples(plan, Data(store, order, None), step=0)  # type: ignore[arg-type]
    assert {one["sample"]: one["rank"] for one in listed} == owners


def test_a_rollback_leaves_out_and_names_only_the_steps_after_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(tmp_path)
    engine: Any = SimpleNamespace(drop_gradients=lambda: None, load=lambda folder, **_: {"step": 9})
    monkeypatch.setattr(guards, "find_checkpoint", lambda rank: Path("step-000009"))
    before = TrainState(step=10, left_out=[3])
    state = guards.roll_back(rank, engine, before, RollBack(range(7, 11), "step 11 gave loss nan"), {})
    assert state.left_out == [3, 9, 10] and state.num_rollbacks == 1
    assert "rolled back to step-000009, steps 10, 11 will be left out" in rank.process.log.getvalue()


def test_an_evaluation_that_a_rollback_takes_back_is_not_in_the_report_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(tmp_path)
    measured = {"evaluations": [{"step": step} for step in (0, 4, 6)]}
    saved = {"step": 5, "evaluated_step": 4}
    engine: Any = SimpleNamespace(drop_gradients=lambda: None, load=lambda folder, **_: saved)
    monkeypatch.setattr(guards, "find_checkpoint", lambda rank: Path("step-000005"))
    guards.roll_back(rank, engine, TrainState(), RollBack([6], "step 7 gave loss nan"), measured)
    assert [one["step"] for one in measured["evaluations"]] == [0, 4]
