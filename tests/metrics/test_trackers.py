"""Trackers: what they are told, that a failing one costs only itself, and each real library without a network."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.launch.run import prepare
from manyhands.metrics import open_sinks, trackers
from manyhands.metrics.trackers import TrackerRun, TrackerSink, open_trackers
from manyhands.training.types import TrainState
from tests.metrics.test_sinks import evaluation, step_result
from tests.support.plans import make_plan

STATE = TrainState()
SETTINGS = {"method.name": "lora", "method.target_modules": ["q_proj"], "optimizer.learning_rate": 1e-3}


class Recorded:
    identity = "r1"

    def __init__(self, fails_at: int = -1) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.fails_at, self.outcome = fails_at, ""

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route to host\nlong story")
        self.rows.append((step, dict(values)))

    def close(self, outcome: str) -> None:
        self.outcome = outcome


def run_config(**log: Any) -> RunConfig:
    return RunConfig(name="demo", model={"name": "tiny"}, data={"train": "rows.jsonl"}, log=log)


def test_steps_devices_and_evaluations_are_sent_without_what_is_no_number():
    tracker = Recorded()
    sink = TrackerSink("wandb", tracker, io.StringIO(), every_steps=2)
    for step in (1, 2):
        sink.record_devices(step, [{"memory_allocated_bytes": 2**30, "peak_bytes": 2**31, "utilization": math.nan}])
        sink.after_step(STATE, step_result(step))
    sink.after_evaluation(STATE, evaluation(2))
    sink.close("interrupted")
    (_, of_step), (_, of_evaluation) = tracker.rows
    assert [step for step, _ in tracker.rows] == [2, 2] and tracker.outcome == "interrupted"
    assert (of_step["loss/all"], of_step["peak_memory_gib/rank0"]) == (1.0, 2.0)
    assert "utilization_percent/rank0" not in of_step and "loss/rank1" not in of_step, "nan is no measurement"
    assert of_evaluation["validation/loss"] == 1.5


def test_a_tracker_that_fails_is_left_once_and_training_continues():
    tracker, terminal = Recorded(fails_at=2), io.StringIO()
    sink = TrackerSink("mlflow", tracker, terminal)
    for step in (1, 2, 3):
        sink.after_step(STATE, step_result(step))
    sink.close()
    assert [step for step, _ in tracker.rows] == [1] and not tracker.outcome
    assert terminal.getvalue().count("mlflow takes no more measurements (no route to host)") == 1


def test_that_a_tracker_has_failed_is_told_on_the_terminal_of_a_run_and_in_its_log(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.OPENERS, "wandb", lambda run: Recorded(fails_at=1))
    terminal, log = io.StringIO(), io.StringIO()
    config = run_config(wandb="p", tensorboard=False)
    for sink in open_sinks(tmp_path, make_plan(), config, terminal, log=log):
        sink.after_step(STATE, step_result(1))
        sink.close()
    for shown in (terminal, log):
        assert shown.getvalue().count("wandb takes no more measurements") == 1


def test_a_resumed_run_is_the_same_one_there_and_a_fresh_one_is_not(tmp_path, monkeypatch):
    runs: list[TrackerRun] = []

    def opened(given: TrackerRun) -> Recorded:
        runs.append(given)
        return Recorded()

    monkeypatch.setitem(trackers.OPENERS, "wandb", opened)
    for resumes in (False, True, False):
        assert len(open_trackers(tmp_path, run_config(wandb="p"), SETTINGS, io.StringIO(), resumes=resumes)) == 1
    assert [given.identity for given in runs] == [None, "r1", None]
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "r1"}
    assert open_trackers(tmp_path, run_config(), SETTINGS, io.StringIO(), resumes=True) == []


def test_what_cannot_be_opened_is_named_with_the_key(tmp_path, monkeypatch):
    def refuse(_: TrackerRun) -> Recorded:
        raise RuntimeError("no API key configured")

    monkeypatch.setitem(trackers.OPENERS, "wandb", refuse)
    with pytest.raises(UserError, match=r"log\.wandb: the run cannot be opened there") as caught:
        open_trackers(tmp_path, run_config(wandb="p"), SETTINGS, io.StringIO(), resumes=False)
    assert caught.value.why == "no API key configured" and "WANDB_MODE=offline" in caught.value.fix
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"log\.mlflow is set, and the package mlflow is not installed"):
        prepare._refuse_missing_trackers(run_config(mlflow="p"))


def take_two_launches(folder: Path, name: str) -> None:
    for resumes, step, outcome in ((False, 1, "failed"), (True, 2, "finished")):
        terminal = io.StringIO()
        (sink,) = open_trackers(folder, run_config(**{name: "p"}), SETTINGS, terminal, resumes=resumes)
        sink.after_step(STATE, step_result(step, learning_rates={"model.layers[0]": 0.5}))
        sink.close(outcome)
        assert terminal.getvalue() == ""


def test_wandb_itself_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    take_two_launches(tmp_path, "wandb")
    identity = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    written = list((tmp_path / "wandb").rglob(f"run-{identity}.wandb"))
    assert len(written) == 2 and all(path.stat().st_size > 0 for path in written)


def test_mlflow_itself_in_a_folder(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    take_two_launches(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    run = client.get_run(json.loads((tmp_path / "trackers.json").read_text())["mlflow"])
    assert run.info.status == "FINISHED" and run.data.params["method.name"] == "lora"
    assert [metric.value for metric in client.get_metric_history(run.info.run_id, "loss/all")] == [2.0, 1.0]


def test_trackio_itself_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio", reason="trackio is not installed")
    take_two_launches(tmp_path, "trackio")
    assert list((tmp_path / "trackio").rglob("p*.db")), "the project's database"
