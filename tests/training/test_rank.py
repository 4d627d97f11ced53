"""What a rank does when it is asked to stop, and when its numbers are guarded."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from manyhands.core.world import World
from manyhands.launch.run_folder import RunFolder
from manyhands.planner.efficiency import lay_out_step
from manyhands.training.guards import RollBack
from manyhands.training.types import StepResult, TrainState
from manyhands.worker import guards, run, training
from manyhands.worker.context import RankContext
from tests.support.plans import make_plan


def make_rank(folder: Path, rank: int = 0) -> RankContext:
    context = RankContext(folder=RunFolder(folder), world=World(rank, rank, 2, torch.device("cpu")))
    context.terminal = context.log = io.StringIO()
    return context


@pytest.mark.parametrize("kind", ["torchrun", "accelerate", "slurm", "manyhands"])
@pytest.mark.parametrize("number", [0, 1])
def test_on_the_file_stop_all_ranks_end_with_0_where_an_agent_would_start_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    monkeypatch.setattr(run, "run_on_all_ranks", lambda work: [True, False])  # of both ranks
    rank = make_rank(tmp_path, number)
    rank.folder.stop_file.touch()
    rank.stop_by_file = number == 0  # rank 0 alone looks for it
    session = SimpleNamespace(
        context=rank,
        launcher=SimpleNamespace(kind=kind),
        stop=None,
        is_first=rank.is_first,
        close_heartbeat=lambda: None,
    )
    assert run.end_interrupted(session) == (0 if kind in ("torchrun", "accelerate") else 130)
    if number == 0:
        assert rank.folder.was_stopped_by_file() and not rank.folder.stop_file.exists()


def test_a_signal_ends_a_rank_with_its_own_code_under_torchrun_too(tmp_path: Path) -> None:
    rank = make_rank(tmp_path)
    session = SimpleNamespace(
        context=rank,
        launcher=SimpleNamespace(kind="torchrun"),
        stop=SimpleNamespace(number=15, exit_code=143),
        is_first=True,
        close_heartbeat=lambda: None,
    )
    assert run.end_interrupted(session) == 143
    assert rank.folder.read_status()["reason"] == "SIGTERM"


def test_a_look_for_the_file_stop_that_fails_is_repeated(tmp_path: Path) -> None:
    def fail() -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    rank = make_rank(tmp_path)
    rank.folder.stop_file = SimpleNamespace(exists=fail)  # type: ignore[assignment]
    assert not training.is_asked_to_stop(rank)
    rank.folder.stop_file, rank.look_again_at = SimpleNamespace(exists=lambda: True), 0.0  # type: ignore[assignment]
    assert training.is_asked_to_stop(rank)


def test_samples_of_a_bad_batch_are_listed_with_the_ranks_that_trained_them() -> None:
    lengths, units = np.full(8, 16), np.array([90, 80, 70, 0, 0, 0, 0, 0])
    plan = make_plan(strategy="ddp", world_size=2, micro_tokens=64, batch_samples=8, image_unit_cost=1.0)
    numbers, zeros = np.arange(8), np.zeros(8, dtype=np.int64)
    trained = lay_out_step(plan, numbers, lengths, units)
    owners = {int(one): rank for rank in range(2) for one in trained.samples_of_rank(rank)}
    by_tokens = lay_out_step(plan, numbers, lengths)
    assert owners != {int(one): rank for rank in range(2) for one in by_tokens.samples_of_rank(rank)}
    rank = RankContext(plan=plan, world=World(0, 0, 2, torch.device("cpu")))
    rank.order = SimpleNamespace(locate=lambda step: (0, step), samples=lambda epoch, index: numbers)  # type: ignore
    rank.store = SimpleNamespace(  # type: ignore[assignment]
        train=SimpleNamespace(lengths=lengths, image_units=units, sources=zeros, places=numbers),
        meta={"sources": [{"name": "images"}]},
        lines=numbers + 1,
        file_number=lambda number: 0,
    )
    result = StepResult(**(dict.fromkeys(StepResult.__dataclass_fields__, 0) | {"step": 1, "rank_losses": ()}))
    described = guards.describe_batch(rank, result, "nonfinite", "skip")
    assert {one["sample"]: one["rank"] for one in described["samples"]} == owners  # type: ignore[attr-defined]


def test_a_rollback_leaves_out_and_names_only_the_steps_after_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(tmp_path)
    rank.state = TrainState(step=10, left_out=[3])
    rank.engine = SimpleNamespace(drop_gradients=lambda: None, load=lambda folder, **_: {"step": 9})  # type: ignore
    monkeypatch.setattr(guards, "find_checkpoint", lambda rank: setattr(rank, "checkpoint", Path("step-000009")))
    guards.roll_back(rank, RollBack(range(7, 11), "step 11 gave loss nan"))
    assert rank.state.left_out == [3, 9, 10] and rank.state.num_rollbacks == 1
    assert "rolled back to step-000009, steps 10, 11 will be left out" in rank.log.getvalue()  # type: ignore[union-attr]


def test_an_evaluation_that_a_rollback_takes_back_is_not_in_the_report_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(tmp_path)
    rank.measured["evaluations"] = [{"step": step} for step in (0, 4, 6)]
    saved = {"step": 5, "evaluated_step": 4}
    rank.engine = SimpleNamespace(drop_gradients=lambda: None, load=lambda folder, **_: saved)  # type: ignore
    monkeypatch.setattr(guards, "find_checkpoint", lambda rank: setattr(rank, "checkpoint", Path("step-000005")))
    guards.roll_back(rank, RollBack([6], "step 7 gave loss nan"))
    assert [one["step"] for one in rank.measured["evaluations"]] == [0, 4]
